"""The oracle predictor: ask the target itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecospec.policies import DraftTree
from ecospec.predictors.contract import BoundPredictor, PredictionRequest, PredictorSession, Routing


class BoundOracle(BoundPredictor):
    """No weights."""

    def start(self, request: PredictionRequest) -> PredictorSession:
        """Hand the target's routing through."""
        return OracleSession(request.true_routing)


class OracleSession(PredictorSession):
    """The harness rolls the extra pass back, so there is nothing to commit."""

    def __init__(self, true_routing: Callable[[DraftTree], Routing]) -> None:
        self._true_routing = true_routing

    def predict(self, tree: DraftTree) -> Routing:
        """The true routing, [L, N, K]."""
        return self._true_routing(tree)

    def commit(self, nodes: Sequence[int]) -> None:
        """Nothing is kept."""
