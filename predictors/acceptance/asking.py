"""Asking an acceptance estimator, and checking what it says; the only way the harness calls one.

An estimator may be somebody else's. What it raises, or returns against the contract, ends in one line with its name, as
for a policy.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager

import numpy as np

from ecospec.errors import UserError, blaming
from ecospec.policies import DraftTree
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance.contract import AcceptanceEstimator, AcceptanceRequest, BoundEstimator, SavedFolder
from ecospec.predictors.contract import NodeStates, TargetView


class EstimatorError(UserError):
    """An acceptance estimator raised, or broke the contract; the text names it."""


def _blaming(name: str) -> AbstractContextManager[None]:
    return blaming(f"acceptance estimator {name!r}", EstimatorError, __file__)


def bind_estimator(
    estimator: AcceptanceEstimator, target: TargetView, temperature: float, saved: SavedFolder | None = None
) -> AskedEstimator:
    """Load an estimator for a target.

    Args:
        saved: what the estimator was given to load from, where its user did not name it.

    Raises:
        UserError: nothing to load, or it does not fit the target.
        EstimatorError: it raised something else, gave no `BoundEstimator`, or one whose `fitted_on` is no set of texts.
    """
    with _blaming(estimator.name):
        bound: object = estimator.bind(target, temperature)
        fitted_on: object = getattr(bound, "fitted_on", None)
        keys = list(fitted_on) if isinstance(fitted_on, Set) else None
    if not isinstance(bound, BoundEstimator):
        raise EstimatorError(
            f"acceptance estimator {estimator.name!r}: bind returned a {type(bound).__name__}; "
            "expected a BoundEstimator"
        )
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise EstimatorError(
            f"acceptance estimator {estimator.name!r}: fitted_on is {reprlib.repr(fitted_on)}; expected a frozenset of "
            "the keys of the prompts that it was fitted to, empty for none"
        )
    return AskedEstimator(estimator.name, bound, saved, frozenset(map(str, keys)))


class AskedEstimator:
    """A bound estimator whose answers are checked.

    Attributes:
        saved: the folder that it was found in; None for one that its user named, and one that reads none.
    """

    def __init__(
        self,
        name: str,
        bound: BoundEstimator,
        saved: SavedFolder | None = None,
        fitted_on: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.saved = name, saved
        self._bound = bound
        self._fitted_on = fitted_on

    def check_prompts(self, prompts: Mapping[str, str]) -> None:
        """Refuse to judge an estimator by what it was fitted to.

        Args:
            prompts: ids of the prompts to be measured, by their keys.

        Raises:
            EstimatorError: it was fitted to one of them.
        """
        seen = [prompts[key] for key in prompts if key in self._fitted_on]
        if seen:
            raise EstimatorError(
                f"acceptance estimator {self.name!r} was fitted to {len(seen)} of these {len(prompts)} prompts, "
                f"such as {seen[0]}; expected other prompts, or --acceptance draft"
            )

    def estimate(self, tree: DraftTree, drafter_states: Callable[[DraftTree], NodeStates]) -> FloatArray:
        """float64 [N], each node's estimate.

        Raises:
            EstimatorError: it raised, or what it returned are no probabilities of this tree's nodes.
        """
        if tree.size == 1:
            return np.ones(1)
        with _blaming(self.name):
            found: object = self._bound.estimate(AcceptanceRequest(tree, drafter_states))
        if not isinstance(found, np.ndarray) or found.shape != (tree.size,) or found.dtype.kind != "f":
            shown = (
                f"{found.dtype} of shape {found.shape}"
                if isinstance(found, np.ndarray)
                else f"a {type(found).__name__}"
            )
            raise self._broken(f"{shown}; expected floats of shape ({tree.size},)")
        estimates = found.astype(np.float64)
        wrong = ~((estimates >= 0.0) & (estimates <= 1.0))  # also true for nan
        if wrong.any():
            node = int(wrong.argmax())
            raise self._broken(f"{estimates[node]} for node {node}; expected a probability from 0 to 1")
        if estimates[0] != 1.0:
            raise self._broken(f"{estimates[0]} for the root; expected 1, since it is certain")
        return estimates

    def _broken(self, what: str) -> EstimatorError:
        return EstimatorError(f"acceptance estimator {self.name!r}: estimate returned {what}")
