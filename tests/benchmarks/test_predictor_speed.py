"""The feature predictor against the learned one: on the embedded target it costs at most a quarter of it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch

from ecospec.harness.config import RunConfig
from ecospec.harness.drafters.builtin import Eagle3
from ecospec.harness.drafters.heads import BoundEagle3
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.loading import target_view
from ecospec.harness.plugins import load_plugins
from ecospec.harness.preparing import load_parts, with_drafter
from ecospec.predictors.asking import bind
from ecospec.predictors.contract import PredictionRequest

BOUND, STEPS = 0.25, 60


@pytest.fixture(autouse=True)
def _only_when_benchmarking(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("a benchmark: give --benchmark-enable")


def test_a_feature_prediction_costs_at_most_a_quarter_of_a_learned_one(benchmark: Any) -> None:
    """The ratio of the medians, asked in turn about one draft tree, each time after a verification pass as in a run:
    it leaves nothing of a predictor in the caches."""
    config = RunConfig(suite="", policy=("marginal-cost",))
    parts = load_parts(config, Eagle3(), "cpu", torch.float32)
    assert isinstance(parts.drafter, BoundEagle3)
    target, head = parts.loaded.target, parts.drafter.head
    view = target_view(target, parts.bundle and parts.bundle / "predictor")
    view = with_drafter(view, parts.drafter, parts.drafter_name)
    prompt = list(range(50, 450))
    verifying = target.new_session(500)
    features = verifying.prefill(prompt).features
    drafter = DrafterSession(head, target.embedding, 600)
    drafter.extend(prompt[1:], features[:-1])
    tree = drafter.draft(prompt[-1], 3, 2)
    plugins = load_plugins()
    request = PredictionRequest(prompt[:-1], 600, lambda tree: np.zeros(0, dtype=np.int64), drafter.node_states)
    sessions = {name: bind(plugins.create_predictor(name), view).start(request) for name in ("learned", "feature")}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(STEPS):
        for name, session in sessions.items():
            verifying.verify(tree, np.arange(4))
            began = time.perf_counter()
            session.predict(tree)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    benchmark.extra_info["milliseconds"] = {name: 1e3 * found for name, found in medians.items()}
    benchmark(lambda: sessions["feature"].predict(tree))
    print(f"milliseconds a step: {benchmark.extra_info['milliseconds']}")
    assert medians["feature"] <= BOUND * medians["learned"]
