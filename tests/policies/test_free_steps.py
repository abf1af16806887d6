"""Steps that take no time at all: a rate of infinity, and then the most expected tokens. Against brute force."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from ecospec.policies import (
    Adaptive,
    CostModel,
    DraftTree,
    ExpertSets,
    Optimal,
    Policy,
    SelectionRequest,
    Throughput,
    run_policy,
)
from ecospec.policies.cost import LARGEST, rate_order

ONLY_PAIRS = CostModel(0.0, 1.0, 0.0, pairs_by_tokens=(0.0, 0.0, 0.0, 3.0))
"""One, two or three tokens cost nothing, and four do."""


def sets_of(*experts: set[int]) -> ExpertSets:
    mask = np.zeros((len(experts), 1, 8), dtype=bool)
    for node, each in enumerate(experts):
        mask[node, 0, list(each)] = True
    return ExpertSets.from_mask(mask)


def best_free(request: SelectionRequest, free: set[int]) -> float:
    """The most expected tokens of all prefix-closed selections of free nodes."""
    parents, best = request.tree.parents.tolist(), 0.0
    for size in range(request.budget):
        for others in combinations(sorted(free - {0}), size):
            if all(parents[node] in (0, *others) for node in others):
                best = max(best, sum(float(request.node_scores[node]) for node in (0, *others)))
    return best


def test_a_free_step_is_better_than_any_other_and_more_tokens_than_fewer() -> None:
    assert rate_order(1.0, 0.0) > rate_order(1e9, 1e-9)
    assert rate_order(2.0, 0.0) > rate_order(1.0, 0.0)
    assert rate_order(1.0, 2.0) == rate_order(2.0, 4.0)  # as everywhere else: the first of equals is kept
    assert rate_order(1.0, 2.0) < rate_order(1.1, 2.0)


def test_adaptive_takes_all_that_is_free() -> None:
    tree = DraftTree.chain([1, 2, 3, 4, 5], [1.0, 0.5, 0.5, 0.9, 0.9])
    assert Adaptive().select(SelectionRequest(tree, 5, cost_model=ONLY_PAIRS)) == [0, 1, 2]
    assert Adaptive().select(SelectionRequest(tree, 2, cost_model=ONLY_PAIRS)) == [0, 1]
    # A free node that is never accepted brings nothing: the smallest of equal selections.
    none = SelectionRequest(tree, 5, cost_model=ONLY_PAIRS, acceptance=np.array([1.0, 0.0, 0.0, 0.0, 0.0]))
    assert Adaptive().select(none) == [0]


@pytest.mark.parametrize("policy", [Throughput(), Optimal()], ids=lambda policy: str(policy.name))
@pytest.mark.parametrize("seed", range(80))
def test_what_reads_nothing_is_verified_and_what_does_is_not(policy: Policy, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 9))
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])
    tree = DraftTree(np.arange(nodes), parents, np.array([1.0, *rng.random(nodes - 1)]))
    reads = [set(), *(set() if rng.random() < 0.6 else {int(rng.integers(8))} for _ in range(nodes - 1))]
    free = {node for node in range(nodes) if not reads[node]}
    request = SelectionRequest(tree, int(rng.integers(1, 7)), sets_of(*reads), cost_model=ONLY_PAIRS)
    chosen = run_policy(policy, request).tolist()
    assert set(chosen) <= free
    assert sum(float(request.node_scores[node]) for node in chosen) == pytest.approx(best_free(request, free))


def test_a_cost_model_holds_no_number_that_a_sum_could_overflow_with() -> None:
    for value in (math.inf, math.nan, -1e-9, 1e300):
        with pytest.raises(ValueError, match="from 0 to 1e"):
            CostModel(value, 1.0, 1.0)
        with pytest.raises(ValueError, match="from 0 to 1e"):
            CostModel(1.0, 1.0, 1.0, pairs_by_tokens=(value,))
    most = CostModel(LARGEST, LARGEST, LARGEST, LARGEST, (LARGEST, LARGEST))
    assert math.isfinite(most.step_seconds(4096, LARGEST))
