"""Asking a predictor, and checking what it says; the only way the harness calls one.

A predictor may be somebody else's. What it raises, or returns against the contract, ends in one line with its name,
as for a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from ecospec.errors import UserError, blaming
from ecospec.policies import DraftTree, ExpertSets
from ecospec.predictors.contract import (
    BoundPredictor,
    PredictionRequest,
    Predictor,
    PredictorBatch,
    Routing,
    TargetView,
)


class PredictorError(UserError):
    """A predictor raised, or broke the contract; the text names it."""


def _blaming(name: str) -> AbstractContextManager[None]:
    return blaming(f"predictor {name!r}", PredictorError, __file__)


def bind(predictor: Predictor, target: TargetView) -> BoundPredictor:
    """Load a predictor for a target.

    Raises:
        UserError: nothing to load, or it does not fit the target.
        PredictorError: it raised something else, or gave no `BoundPredictor`.
    """
    with _blaming(predictor.name):
        bound: object = predictor.bind(target)
    if not isinstance(bound, BoundPredictor):
        raise PredictorError(
            f"predictor {predictor.name!r}: bind returned a {type(bound).__name__}; expected a BoundPredictor"
        )
    return bound


class AskedBatch:
    """The requests of a batch at one predictor; all methods take one entry for each that is still there."""

    def __init__(
        self,
        name: str,
        bound: BoundPredictor,
        shape: tuple[int, int, int],
        requests: Sequence[PredictionRequest],
        *,
        oracle: bool,
    ) -> None:
        """Open the requests; see `BoundPredictor.start_batch`.

        Args:
            shape: the target's MoE layers, experts in each, and K.
            oracle: whether it may ask for the true routing.

        Raises:
            PredictorError: it raised, or gave no `PredictorBatch`.
        """
        self._name, (self._layers, self._experts, self._top_k) = name, shape
        given = requests if oracle else [replace(request, true_routing=self._refuse) for request in requests]
        with _blaming(name):
            batch: object = bound.start_batch(list(given))
        if not isinstance(batch, PredictorBatch):
            raise self._broken(f"start_batch returned a {type(batch).__name__}; expected a PredictorBatch")
        self._batch = batch

    def _broken(self, what: str) -> PredictorError:
        return PredictorError(f"predictor {self._name!r}: {what}")

    def _refuse(self, tree: DraftTree) -> Routing:
        raise self._broken("it asked for the true routing; only one that declares oracle = True may")

    def predict(self, trees: Sequence[DraftTree]) -> list[ExpertSets]:
        """The expert sets of every tree.

        Raises:
            PredictorError: it raised, or what it returned is no routing of these trees.
        """
        with _blaming(self._name):
            routings: object = self._batch.predict(list(trees))
        if not isinstance(routings, list | tuple) or len(routings) != len(trees):
            found = f"{len(routings)} entries" if isinstance(routings, list | tuple) else f"a {type(routings).__name__}"
            raise self._broken(f"predict returned {found} for {len(trees)} requests")
        with _blaming(self._name):  # an array of its own kind may raise when it is looked at
            return [self._sets(routing, tree) for routing, tree in zip(routings, trees, strict=True)]

    def _sets(self, routing: object, tree: DraftTree) -> ExpertSets:
        expected = (self._layers, tree.size, self._top_k)
        if not isinstance(routing, np.ndarray) or routing.shape != expected or routing.dtype.kind not in "iu":
            found = (
                f"{routing.dtype} of shape {routing.shape}"
                if isinstance(routing, np.ndarray)
                else f"a {type(routing).__name__}"
            )
            raise self._broken(f"predict returned {found}; expected integers {expected} [MoE layers, nodes, K]")
        try:
            sets = ExpertSets.from_topk(routing, self._experts)
        except ValueError as error:
            raise self._broken(f"predict's {error}") from None
        if (sets.counts() != self._layers * self._top_k).any():
            raise self._broken("predict named an expert twice for a node and layer; expected K different ones")
        return sets

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep every request's accepted path.

        Raises:
            PredictorError: it raised.
        """
        with _blaming(self._name):
            self._batch.commit(nodes)

    def leave(self, index: int) -> None:
        """Drop the request at ``index``.

        Raises:
            PredictorError: it raised.
        """
        with _blaming(self._name):
            self._batch.leave(index)
