"""Acceptance as a rising function of the draft's path probability, one for each depth and rank.

Of two nodes at one depth and rank the one with the larger path probability is at least as likely to be accepted; that
is all that is assumed. Isotonic regression (pool adjacent violators) gives the rising function closest to what was
recorded; between its steps it is interpolated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from ecospec.errors import UserError
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance.contract import AcceptanceRequest, BoundEstimator, never_rising, sibling_ranks

KIND = "isotonic"
LEAST_NODES = 200
"""Nodes of one depth and rank that a curve of their own needs; fewer share the curve of all."""
MOST_KNOTS = 64
"""Knots that a curve keeps, evenly spread over the nodes."""
ALL = "all"


@dataclass(frozen=True)
class Curve:
    """A rising function, linear between its knots and level beyond them.

    Attributes:
        path_probs: ascending. acceptance: never falling, each within 0 to 1.
    """

    path_probs: tuple[float, ...]
    acceptance: tuple[float, ...]

    def __post_init__(self) -> None:
        x, y = np.array(self.path_probs), np.array(self.acceptance)
        if not len(x) or x.shape != y.shape or not (np.isfinite(x).all() and (np.diff(x) > 0).all()):
            raise ValueError("a curve has ascending path probabilities, each with an acceptance")
        if not ((y >= 0) & (y <= 1)).all() or (np.diff(y) < 0).any():
            raise ValueError("a curve's acceptance rises from at least 0 to at most 1")

    def __call__(self, path_prob: float) -> float:
        """The acceptance of one node."""
        x, y = self.path_probs, self.acceptance
        after = bisect_right(x, path_prob)
        if after == 0:
            return y[0]
        if after == len(x):
            return y[-1]
        share = (path_prob - x[after - 1]) / (x[after] - x[after - 1])
        return y[after - 1] + share * (y[after] - y[after - 1])


def fit_curve(path_probs: FloatArray, accepted: npt.NDArray[np.bool_]) -> Curve:
    """The rising function of least squares through n nodes.

    Every block of equal values becomes a knot at the mean of its path probabilities. No estimate is nearer to 0 or 1
    than half a node in n.
    """
    order = np.argsort(path_probs, kind="stable")
    x, y = path_probs[order], accepted[order].astype(np.float64)
    fitted = isotonic_regression(y)
    starts = fitted.blocks[:-1]
    counts = np.diff(fitted.blocks)
    knots_x = np.add.reduceat(x, starts) / counts
    knots_y = np.clip(fitted.x[starts], 0.5 / len(x), 1 - 0.5 / len(x))
    distinct = np.concatenate(([True], np.diff(knots_x) > 0))
    knots_x, knots_y = knots_x[distinct], knots_y[distinct]
    if len(knots_x) > MOST_KNOTS:
        kept = np.unique(np.linspace(0, len(knots_x) - 1, MOST_KNOTS).round().astype(int))
        knots_x, knots_y = knots_x[kept], knots_y[kept]
    return Curve(tuple(knots_x.tolist()), tuple(knots_y.tolist()))


def curve_key(depth: int, rank: int) -> str:
    """How the curve of a depth and rank is written down."""
    return f"{depth},{rank}"


def fit_curves(
    depths: Sequence[int] | npt.NDArray[np.int64],
    ranks: Sequence[int] | npt.NDArray[np.int64],
    path_probs: FloatArray,
    accepted: npt.NDArray[np.bool_],
) -> dict[str, Curve]:
    """Curves of nodes of one temperature, by depth and rank, and one of all; each array [n], no roots.

    Raises:
        ValueError: there is no node.
    """
    if not len(path_probs):
        raise ValueError("no node to fit to")
    depths, ranks = np.asarray(depths), np.asarray(ranks)
    curves = {ALL: fit_curve(path_probs, accepted)}
    for depth, rank in sorted({*zip(depths.tolist(), ranks.tolist(), strict=True)}):
        own = (depths == depth) & (ranks == rank)
        if own.sum() >= LEAST_NODES:
            curves[curve_key(depth, rank)] = fit_curve(path_probs[own], accepted[own])
    return curves


class BoundIsotonic(BoundEstimator):
    """The curves of one temperature."""

    def __init__(self, curves: Mapping[str, Curve], fitted_on: frozenset[str] = frozenset()) -> None:
        self.fitted_on = fitted_on
        self._curves = curves
        self._all = curves[ALL]

    def estimate(self, request: AcceptanceRequest) -> FloatArray:
        """float64 [N], from each node's own curve, at most its parent's."""
        tree = request.tree
        nodes = zip(tree.depths.tolist(), sibling_ranks(tree).tolist(), tree.path_probs.tolist(), strict=True)
        found = [self._curves.get(curve_key(depth, rank), self._all)(prob) for depth, rank, prob in nodes]
        return never_rising(tree.parents, np.array(found))


def to_json(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """As it is written down, to seven digits."""
    return {
        key: {
            "path_probs": [float(f"{value:.7g}") for value in curve.path_probs],
            "acceptance": [float(f"{value:.7g}") for value in curve.acceptance],
        }
        for key, curve in curves.items()
    }


def from_json(found: Mapping[str, Any], what: str) -> dict[str, Curve]:
    """The curves as they were written down.

    Raises:
        UserError: they are damaged.
    """
    try:
        curves = {
            str(key): Curve(tuple(map(float, each["path_probs"])), tuple(map(float, each["acceptance"])))
            for key, each in found.items()
        }
        if ALL not in curves:
            raise ValueError("the curve of all nodes is missing")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{what}: its isotonic curves are damaged ({error}); fit them anew") from error
    return curves
