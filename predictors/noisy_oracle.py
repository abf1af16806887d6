"""The noisy oracle: the target's true routing, spoilt to a chosen accuracy by a seeded rule.

It draws the curve of what accuracy is worth without training a predictor for each of its points.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ecospec.policies import DraftTree
from ecospec.predictors.contract import BoundPredictor, PredictionRequest, PredictorSession, Routing


def least_accuracy(experts: int, top_k: int) -> float:
    """The smallest overlap that K of E experts can have with K others: where 2K > E some are the same."""
    return max(0, 2 * top_k - experts) / top_k


def degrade(routing: Routing, experts: int, accuracy: float, rng: np.random.Generator) -> Routing:
    """Replace some of the true experts of every token and layer by wrong ones.

    Of K experts a · K stay, rounded up or down at random so that the mean overlap is a; which ones stay and what
    replaces the others is drawn uniformly.

    Args:
        routing: true experts [L, N, K].
        accuracy: a, the mean share to keep; at least `least_accuracy`.

    Returns:
        [L, N, K], different experts in each token and layer.
    """
    layers, nodes, top_k = routing.shape
    whole, part = divmod(accuracy * top_k, 1.0)
    keep = int(whole) + (rng.random((layers, nodes, 1)) < part)
    ranks = rng.random(routing.shape).argsort(-1).argsort(-1)
    order = rng.random((layers, nodes, experts))
    np.put_along_axis(order, routing, np.inf, axis=-1)  # the true ones come last
    wrong = order.argsort(-1)[..., :top_k]
    return np.where(ranks < keep, routing, np.take_along_axis(wrong, ranks - np.minimum(keep, ranks), axis=-1))


class BoundNoisyOracle(BoundPredictor):
    """No weights."""

    def __init__(self, experts: int, accuracy: float, seed: int) -> None:
        self.experts, self.accuracy, self.seed = experts, accuracy, seed

    def start(self, request: PredictionRequest) -> PredictorSession:
        """The noise is a function of the seed, the prompt and how much of the answer there is."""
        prompt = zlib.crc32(np.asarray(request.prompt, dtype=np.int64).tobytes())
        return NoisyOracleSession(self, prompt, request.true_routing)


class NoisyOracleSession(PredictorSession):
    """Asks the target, and spoils the answer."""

    def __init__(self, bound: BoundNoisyOracle, request: int, true_routing: Callable[[DraftTree], Routing]) -> None:
        self._bound, self._request, self._true_routing = bound, request, true_routing
        self._committed = 0

    def predict(self, tree: DraftTree) -> Routing:
        """Spoilt routing [L, N, K]."""
        rng = np.random.default_rng((self._bound.seed, self._request, self._committed))
        return degrade(self._true_routing(tree), self._bound.experts, self._bound.accuracy, rng)

    def commit(self, nodes: Sequence[int]) -> None:
        """Count the accepted tokens."""
        self._committed += len(nodes)
