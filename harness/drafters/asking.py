"""Asking a drafter, and checking what it says; the only way the harness calls one.

A drafter may be somebody else's. What it raises, or returns against the contract, ends in one line with its name,
as for a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ecospec.errors import UserError, blaming
from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch, Drafter, DrafterTarget
from ecospec.policies import DraftTree
from ecospec.predictors.contract import NodeStates


class DrafterError(UserError):
    """A drafter raised, or broke the contract; the text names it."""


def _blaming(name: str) -> AbstractContextManager[None]:
    return blaming(f"drafter {name!r}", DrafterError, __file__)


def bind(drafter: Drafter, target: DrafterTarget) -> BoundDrafter:
    """Load a drafter for a target.

    Raises:
        UserError: nothing to load, or it does not fit the target.
        DrafterError: it raised something else, or gave no `BoundDrafter`.
    """
    with _blaming(drafter.name):
        bound: object = drafter.bind(target)
    if not isinstance(bound, BoundDrafter):
        raise DrafterError(f"drafter {drafter.name!r}: bind returned a {type(bound).__name__}; expected a BoundDrafter")
    with _blaming(drafter.name):
        features: object = bound.features
    if not isinstance(features, tuple) or not all(isinstance(each, int | str) for each in features):
        raise DrafterError(
            f"drafter {drafter.name!r}: its features are {features!r}; expected a tuple of layer indices or 'final'"
        )
    return bound


def note_positions(name: str, bound: BoundDrafter, count: int, request: str) -> None:
    """Tell a drafter how long a request may become.

    Raises:
        DrafterError: it raised.
    """
    with _blaming(name):
        bound.note_positions(count, request)


class AskedDrafts:
    """The requests of a batch at one drafter, each method as that of `DraftBatch`."""

    def __init__(self, name: str, bound: BoundDrafter, capacities: Sequence[int], *, vocab: int, nodes: int) -> None:
        """Open the requests.

        Args:
            vocab: V, the target's vocabulary.
            nodes: most nodes of a tree.

        Raises:
            DrafterError: it raised, or gave no `DraftBatch`.
        """
        self._name, self._vocab, self._nodes = name, vocab, nodes
        with _blaming(name):
            batch: object = bound.open(list(capacities))
        if not isinstance(batch, DraftBatch):
            raise self._broken(f"open returned a {type(batch).__name__}; expected a DraftBatch")
        self._batch = batch

    def _broken(self, what: str) -> DrafterError:
        return DrafterError(f"drafter {self._name!r}: {what}")

    def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
        """Take in a prompt.

        Raises:
            DrafterError: it raised.
        """
        with _blaming(self._name):
            self._batch.start(index, list(tokens), features)  # a copy, as below: what is counted is not theirs

    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
        """Take in what was emitted.

        Raises:
            DrafterError: it raised.
        """
        with _blaming(self._name):
            self._batch.extend([list(block) for block in blocks], list(features))

    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> list[DraftTree]:
        """A tree for every request.

        Raises:
            DrafterError: it raised, or what it returned are no such trees.
        """
        with _blaming(self._name):
            trees: object = self._batch.draft(list(bonuses), list(depths), top_k)
        if not isinstance(trees, list | tuple) or len(trees) != len(bonuses):
            found = f"{len(trees)} entries" if isinstance(trees, list | tuple) else f"a {type(trees).__name__}"
            raise self._broken(f"draft returned {found} for {len(bonuses)} requests")
        with _blaming(self._name):  # a tree of its own kind may raise when it is looked at
            return [self._checked(*each) for each in zip(trees, bonuses, depths, strict=True)]

    def _checked(self, tree: object, bonus: int, depth: int) -> DraftTree:
        if type(tree) is not DraftTree:  # of another kind, what is checked here need not be what a policy sees
            raise self._broken(f"draft returned a {type(tree).__name__}; expected a DraftTree")
        tokens = tree.tokens.tolist()
        if tokens[0] != bonus:
            raise self._broken(f"draft returned a tree with root {tokens[0]}; expected the bonus token, {bonus}")
        if len(tokens) > self._nodes:
            raise self._broken(f"draft returned a tree of {len(tokens)} nodes; expected at most {self._nodes}")
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            wrong = next(token for token in tokens if not 0 <= token < self._vocab)
            raise self._broken(f"draft returned a tree with token {wrong}; expected 0 to {self._vocab - 1}")
        deepest = max(tree.depths.tolist())
        if deepest > depth:
            raise self._broken(f"draft returned a tree of depth {deepest}; expected at most {depth}")
        return tree

    def leave(self, index: int) -> None:
        """Drop the request at ``index``.

        Raises:
            DrafterError: it raised.
        """
        with _blaming(self._name):
            self._batch.leave(index)

    def node_states(self, index: int) -> Callable[[DraftTree], NodeStates]:
        """What gives a predictor the states of the request that is now at ``index``.

        Raises:
            DrafterError: it raised.
        """
        with _blaming(self._name):
            found = self._batch.node_states(index)
        return self._refuse if found is None else found

    def _refuse(self, tree: DraftTree) -> NodeStates:
        raise self._broken("it has no states that a predictor could read; expected another drafter or predictor")
