"""How long one selection may take: it is paid in every decode step, whatever the model saves.

The clock starts from a fresh request with packed expert sets, as in a decode step, and covers the
path footprints and every field of the tree that the policy derives. The size is that of the paper's
largest target: 94 MoE layers of 128 experts, 8 of them per token.

A shared machine has phases in which everything takes twice as long. The bound is on the code, so it is
put to the quietest of several bursts, spread over a second or two; the printed figures are of all rounds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import pytest

from ecospec.policies import (
    Adaptive,
    Confidence,
    CostModel,
    DraftTree,
    ExpertSets,
    GlobalCost,
    MarginalCost,
    Policy,
    SelectionRequest,
    Throughput,
    run_policy,
)

LAYERS, EXPERTS, TOP_K = 94, 128, 8

BURSTS, ROUNDS, PAUSE_SECONDS = 8, 200, 0.2

# nodes, budget γ, bound on the median in seconds
PAPER = (11, 4, 100e-6)
LARGE = (64, 32, 2e-3)
LARGE_IN_TIME = (64, 32, 500e-6)
ALL_IN_TIME = (64, 64, 500e-6)
WORTH_IT = CostModel(1.0, 1e-9, 1e-9, pairs_by_tokens=tuple(700.0 * n for n in range(1, 65)))
"""A step takes its time whatever it verifies, so that every node up to γ is worth adding: the longest search."""


def parts(nodes: int) -> tuple[np.ndarray, np.ndarray, ExpertSets]:
    """Parents and probabilities of a tree with two children per node, and its expert sets."""
    rng = np.random.default_rng(0)
    parents = np.array([-1, *((node - 1) // 2 for node in range(1, nodes))])
    probs = np.array([1.0, *rng.random(nodes - 1)])
    scores = rng.random((LAYERS, nodes, EXPERTS))
    indices = np.argpartition(scores, -TOP_K, axis=-1)[..., -TOP_K:]
    return parents, probs, ExpertSets.from_topk(indices, EXPERTS)


@pytest.mark.parametrize(
    ("policy", "nodes", "budget", "bound_seconds"),
    [
        pytest.param(policy, *size, id=f"{policy.name}-{size[0]}-nodes" + ("-all" if size[0] == size[1] else ""))
        for policy, sizes in (
            (MarginalCost(), (PAPER, LARGE)),
            (GlobalCost(), (PAPER, LARGE)),
            (Confidence(), (PAPER, LARGE)),
            (Adaptive(), (PAPER, LARGE_IN_TIME)),
            (Throughput(), (PAPER, LARGE_IN_TIME, ALL_IN_TIME)),
        )
        for size in sizes
    ],
)
def test_a_selection_is_fast(benchmark: Any, policy: Policy, nodes: int, budget: int, bound_seconds: float) -> None:
    parents, probs, experts = parts(nodes)
    calls = itertools.count()

    def fresh_request() -> tuple[tuple[SelectionRequest], dict[str, Any]]:
        if benchmark.enabled and next(calls) % ROUNDS == 0:
            time.sleep(PAUSE_SECONDS)
        # A new tree each time: one that was used before has its derived fields at hand.
        tree = DraftTree(np.arange(nodes), parents, probs)
        return (SelectionRequest(tree, budget, experts, cost_model=WORTH_IT),), {}

    selection = benchmark.pedantic(policy.select, setup=fresh_request, rounds=BURSTS * ROUNDS, warmup_rounds=20)

    assert len(selection) == budget
    assert run_policy(policy, fresh_request()[0][0]).tolist() == sorted(selection)
    if benchmark.enabled:
        seconds = benchmark.stats.stats.data
        medians = [statistics.median(seconds[start : start + ROUNDS]) for start in range(0, len(seconds), ROUNDS)]
        assert len(medians) == BURSTS
        assert min(medians) <= bound_seconds, (
            f"{policy.name}, {nodes} nodes: medians {[round(each * 1e6) for each in medians]} us, "
            f"expected one of at most {bound_seconds * 1e6:.0f} us"
        )
