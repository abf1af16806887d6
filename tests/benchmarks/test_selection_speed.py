"""How long one selection may take: it is paid in every decode step, whatever the model saves.

The clock starts from a fresh request with packed expert sets, as in a decode step, and covers the
path footprints and every field of the tree that the policy derives. The size is that of the paper's
largest target: 94 MoE layers of 128 experts, 8 of them per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ecospec.policies import (
    Confidence,
    DraftTree,
    ExpertSets,
    GlobalCost,
    MarginalCost,
    Policy,
    SelectionRequest,
    run_policy,
)

LAYERS, EXPERTS, TOP_K = 94, 128, 8

# nodes, budget γ, bound on the median in seconds
PAPER = (11, 4, 100e-6)
LARGE = (64, 32, 2e-3)


def parts(nodes: int) -> tuple[np.ndarray, np.ndarray, ExpertSets]:
    """Parents and probabilities of a tree with two children per node, and its expert sets."""
    rng = np.random.default_rng(0)
    parents = np.array([-1, *((node - 1) // 2 for node in range(1, nodes))])
    probs = np.array([1.0, *rng.random(nodes - 1)])
    scores = rng.random((LAYERS, nodes, EXPERTS))
    indices = np.argpartition(scores, -TOP_K, axis=-1)[..., -TOP_K:]
    return parents, probs, ExpertSets.from_topk(indices, EXPERTS)


@pytest.mark.parametrize(("nodes", "budget", "bound_seconds"), [PAPER, LARGE], ids=["11-nodes", "64-nodes"])
@pytest.mark.parametrize("policy", [MarginalCost(), GlobalCost(), Confidence()], ids=lambda p: p.name)
def test_a_selection_is_fast(benchmark: Any, policy: Policy, nodes: int, budget: int, bound_seconds: float) -> None:
    parents, probs, experts = parts(nodes)

    def fresh_request() -> tuple[tuple[SelectionRequest], dict[str, Any]]:
        # A new tree each time: one that was used before has its derived fields at hand.
        tree = DraftTree(np.arange(nodes), parents, probs)
        return (SelectionRequest(tree, budget, experts),), {}

    selection = benchmark.pedantic(policy.select, setup=fresh_request, rounds=500, warmup_rounds=20)

    assert len(selection) == budget
    assert run_policy(policy, fresh_request()[0][0]).tolist() == sorted(selection)
    if benchmark.enabled:
        median_seconds = benchmark.stats.stats.median
        assert median_seconds <= bound_seconds, (
            f"{policy.name}, {nodes} nodes: median {median_seconds * 1e6:.0f} us, "
            f"expected at most {bound_seconds * 1e6:.0f} us"
        )
