"""The embedded target spends most of a verification pass in its experts; else a run would measure Python."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch

from ecospec.harness import experts
from ecospec.harness.loading import embedded_facts, embedded_folder, load_target
from ecospec.policies import DraftTree
from ecospec.suites import load_suite

ROUNDS, WARM_UP = 40, 5
PARENTS, PROBS = np.array([-1, 0, 1, 0]), np.array([1.0, 0.6, 0.5, 0.3])


@pytest.fixture(autouse=True)
def _only_when_benchmarking(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("a benchmark: give --benchmark-enable")


def test_most_of_a_verification_pass_is_spent_in_the_experts(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    widen = int(embedded_facts()["widen"])
    loaded = load_target(str(embedded_folder() / "target"), dtype=torch.float32, device="cpu", widen=widen)
    ids = loaded.tokenizer(load_suite("gsm8k", limit=1).problems[0].prompt)["input_ids"]
    session = loaded.target.new_session(len(ids) + len(PARENTS))
    session.prefill(ids)
    inside = 0.0
    plain = experts.union_experts_forward

    def timed(*args: Any) -> Any:
        nonlocal inside
        began = time.perf_counter()
        result = plain(*args)
        inside += time.perf_counter() - began
        return result

    monkeypatch.setattr(experts, "union_experts_forward", timed)
    rng = np.random.default_rng(0)
    shares = []

    def verify() -> None:
        nonlocal inside
        tree = DraftTree(rng.choice(ids, len(PARENTS)), PARENTS, PROBS)
        inside = 0.0
        began = time.perf_counter()
        session.verify(tree, np.arange(len(PARENTS)))
        shares.append(inside / (time.perf_counter() - began))

    benchmark.pedantic(verify, rounds=ROUNDS, warmup_rounds=WARM_UP)
    share = statistics.median(shares)
    benchmark.extra_info["share_in_experts"] = share
    print(f"share of a verification pass in the experts, median of {len(shares)}: {share:.2f}")
    assert share > 0.5
