"""The policies that weigh acceptance against time, against brute force and numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from ecospec.errors import UserError
from ecospec.policies import (
    Adaptive,
    Clairvoyant,
    CostModel,
    DraftTree,
    ExpertSets,
    Optimal,
    Policy,
    SelectionError,
    SelectionRequest,
    Throughput,
    run_policy,
    throughput,
)
from ecospec.policies.yardsticks import count_selections, selections

FREE_TOKENS = CostModel(1.0, 0.1, 0.0)


def one_layer(*sets: set[int], num_experts: int = 16) -> ExpertSets:
    """Expert sets of a single-layer model, one per node."""
    mask = np.zeros((len(sets), 1, num_experts), dtype=bool)
    for node, experts in enumerate(sets):
        mask[node, 0, list(experts)] = True
    return ExpertSets.from_mask(mask)


def random_request(seed: int, *, rising: bool = False, covered: bool = False) -> SelectionRequest:
    """A small tree of any shape, with expert sets, a cost model and estimates of acceptance."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 9))
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])
    tree = DraftTree(rng.integers(0, 50, nodes), parents, np.array([1.0, *rng.random(nodes - 1)]))
    indices = np.argsort(rng.random((2, nodes, 8)), axis=-1)[..., :2]
    experts = ExpertSets.from_topk(indices, 8)
    acceptance = np.array([1.0, *rng.random(nodes - 1)]) if rising else None
    cost = CostModel(
        float(rng.random()),
        float(rng.choice([0.0, 0.02, 0.2])),
        float(rng.choice([0.0, 0.1])) + 1e-3,
        float(rng.random()),
        tuple(np.cumsum(rng.random(4)).tolist()),
    )
    before = experts.bits[rng.integers(0, nodes)] if covered else None
    return SelectionRequest(tree, int(rng.integers(1, 7)), experts, before, cost, acceptance)


def rate_of(request: SelectionRequest, nodes: tuple[int, ...] | list[int]) -> float:
    """Expected tokens per second, by plain sets."""
    assert request.experts is not None
    assert request.cost_model is not None
    mask = request.experts.to_mask()
    pairs = {tuple(pair) for node in nodes for pair in np.argwhere(mask[node]).tolist()}
    if request.covered is not None:
        covered = ExpertSets(request.covered[None], request.experts.num_layers, request.experts.num_experts)
        pairs |= {tuple(pair) for pair in np.argwhere(covered.to_mask()[0]).tolist()}
    tokens = sum(float(request.node_scores[node]) for node in nodes)
    cost = request.cost_model
    return tokens / (
        cost.other_seconds + cost.fixed_seconds + cost.pair_seconds * len(pairs) + cost.token_seconds * len(nodes)
    )


def every_selection(request: SelectionRequest) -> list[tuple[int, ...]]:
    """All subsets that hold the root and every node's parent, within the budget."""
    parents = request.tree.parents.tolist()
    rest = range(1, request.tree.size)
    found = []
    for size in range(min(request.budget, request.tree.size)):
        for others in combinations(rest, size):
            nodes = (0, *others)
            if all(parents[node] in nodes for node in others):
                found.append(nodes)
    return found


def test_adaptive_stops_where_the_next_node_no_longer_pays() -> None:
    # A chain with P = 1, .8, .4, .1; a step takes 1 s and .1 s for each of the pairs that n tokens touch on average.
    tree = DraftTree.chain([1, 2, 3, 4], [1.0, 0.8, 0.5, 0.25])
    cost = CostModel(1.0, 0.1, 0.0, pairs_by_tokens=(2.0, 4.0, 6.0, 8.0))
    # 1/1.2 = .833, 1.8/1.4 = 1.286, 2.2/1.6 = 1.375, 2.3/1.8 = 1.278
    assert Adaptive().select(SelectionRequest(tree, 4, cost_model=cost)) == [0, 1, 2]
    # Estimates of acceptance decide, not the draft's own: 1, .8, .7, .6 gives 1.5625 for three and 1.722 for four.
    better = SelectionRequest(tree, 4, cost_model=cost, acceptance=np.array([1.0, 0.8, 0.7, 0.6]))
    assert Adaptive().select(better) == [0, 1, 2, 3]
    assert Adaptive().select(SelectionRequest(tree, 2, cost_model=cost)) == [0, 1]


def test_throughput_verifies_what_raises_the_rate_and_no_more() -> None:
    # Root {0,1}; node 1 (P .5) needs two experts more, node 2 (P .4) none.
    tree = DraftTree(np.arange(3), np.array([-1, 0, 0]), np.array([1.0, 0.5, 0.4]))
    experts = one_layer({0, 1}, {2, 3}, {0, 1})
    # Root alone: 1/1.2. Node 2 is free: 1.4/1.2 = 1.167. Node 1 brings .5 for .2 s, 2.5 a second: 1.9/1.4 = 1.357.
    assert Throughput().select(SelectionRequest(tree, 3, experts, cost_model=FREE_TOKENS)) == [0, 2, 1]
    # With P .2 it brings 1 a second, below 1.167: left out, whatever the budget.
    poor = SelectionRequest(tree, 3, experts, cost_model=FREE_TOKENS, acceptance=np.array([1.0, 0.2, 0.4]))
    assert Throughput().select(poor) == [0, 2]
    assert Throughput().select(SelectionRequest(tree, 2, experts, cost_model=FREE_TOKENS)) == [0, 2]


def test_throughput_drops_a_node_that_no_longer_pays() -> None:
    # A step takes 1.5 s and 1 s a pair. The root alone: 1/2.5 = .4. Nodes 2 and 3 share two experts of their own.
    tree = DraftTree(np.arange(4), np.array([-1, 0, 0, 0]), np.array([1.0, 0.46, 0.9, 0.9]))
    experts = one_layer({0}, {1}, {2, 3}, {2, 3})
    cost = CostModel(1.5, 1.0, 0.0)
    # In order of rate: node 1 (.46 a second), node 2 (.45), then node 3 for nothing: 3.26/5.5 = .593. Without node 1
    # it is 2.8/4.5 = .622.
    assert Throughput().select(SelectionRequest(tree, 4, experts, cost_model=cost)) == [0, 2, 3]


@pytest.mark.parametrize("seed", range(300))
def test_no_single_node_more_or_less_would_raise_the_rate(seed: int) -> None:
    request = random_request(seed, covered=seed % 2 == 1)
    nodes = Throughput().select(request)
    assert run_policy(Throughput(), request).tolist() == sorted(nodes)
    for other in every_selection(request):
        if len(set(other) ^ set(nodes)) == 1:
            assert rate_of(request, other) <= rate_of(request, nodes) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(300))
def test_every_move_of_the_search_raises_the_rate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = random_request(seed, covered=seed % 2 == 1)
    request = replace(request, budget=request.budget if seed % 3 else request.tree.size)  # also where all fit
    rates: list[float] = []
    add = throughput._Selected.add

    def adding(state: throughput._Selected, node: int, expected: float, seconds: float) -> None:
        rates.append(rate_of(request, state.nodes))
        add(state, node, expected, seconds)
        assert state.expected / state.seconds == pytest.approx(rate_of(request, state.nodes), rel=1e-9)
        rates.append(rate_of(request, state.nodes))

    monkeypatch.setattr(throughput._Selected, "add", adding)
    rates.append(rate_of(request, Throughput().select(request)))
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(rates))


@pytest.mark.parametrize("seed", range(200))
def test_optimal_is_the_best_of_all_selections(seed: int) -> None:
    request = random_request(seed, rising=seed % 3 == 0, covered=seed % 2 == 1)
    best = max(rate_of(request, nodes) for nodes in every_selection(request))
    assert rate_of(request, Optimal().select(request)) == pytest.approx(best, rel=1e-12)


def test_throughput_comes_close_to_the_optimum() -> None:
    ratios = []
    for seed in range(400):
        request = random_request(seed)
        ratios.append(rate_of(request, Throughput().select(request)) / rate_of(request, Optimal().select(request)))
    assert max(ratios) <= 1 + 1e-9
    assert np.mean(ratios) > 0.99
    assert np.mean(np.array(ratios) > 1 - 1e-9) > 0.75


def test_together_two_nodes_can_pay_where_neither_does_alone() -> None:
    # What a greedy search loses: nodes 1 and 2 share two experts that cost 1 s each.
    tree = DraftTree(np.arange(3), np.array([-1, 0, 0]), np.array([1.0, 0.6, 0.6]))
    request = SelectionRequest(tree, 3, one_layer({0}, {1, 2}, {1, 2}), cost_model=CostModel(1.0, 1.0, 0.0))
    # 1/2 = .5; one of them: 1.6/4 = .4; both: 2.2/4 = .55
    assert Throughput().select(request) == [0]
    assert Optimal().select(request) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_selections_are_all_of_them_and_each_once(seed: int) -> None:
    request = random_request(seed)
    found = [tuple(sorted(nodes)) for nodes in selections(request.tree, request.budget)]
    assert sorted(found) == sorted(every_selection(request))
    assert count_selections(request.tree, request.budget) == len(found)


def test_optimal_refuses_a_tree_with_too_many_selections() -> None:
    nodes = 40
    tree = DraftTree(np.arange(nodes), np.array([-1] + [0] * (nodes - 1)), np.ones(nodes))
    request = SelectionRequest(tree, 20, one_layer(*[{0}] * nodes), cost_model=FREE_TOKENS)
    with pytest.raises(UserError, match=r"optimal.*40 nodes has .* selections of at most 20"):
        run_policy(Optimal(), request)


def test_clairvoyant_takes_the_accepted_path_up_to_the_budget() -> None:
    tree = DraftTree(np.arange(5), np.array([-1, 0, 0, 2, 3]), np.array([1.0, 0.9, 0.1, 0.1, 0.1]))
    accepted = np.array([1.0, 0.0, 1.0, 1.0, 1.0])
    assert Clairvoyant().select(SelectionRequest(tree, 8, acceptance=accepted)) == [0, 2, 3, 4]
    assert Clairvoyant().select(SelectionRequest(tree, 3, acceptance=accepted)) == [0, 2, 3]


@pytest.mark.parametrize("policy", [Adaptive(), Throughput(), Optimal()], ids=lambda policy: str(policy.name))
def test_without_a_cost_model_there_is_a_clear_error(policy: Policy) -> None:
    tree = DraftTree.chain([1, 2], [1.0, 0.5])
    with pytest.raises(SelectionError, match="no cost model"):
        run_policy(policy, SelectionRequest(tree, 2, one_layer({0}, {1})))


def test_what_costs_nothing_is_taken_and_what_brings_nothing_is_not() -> None:
    tree = DraftTree(np.arange(3), np.array([-1, 0, 0]), np.array([1.0, 0.3, 0.0]))
    request = SelectionRequest(tree, 3, one_layer({0}, {0}, {0}), cost_model=CostModel(1.0, 0.0, 0.0))
    assert Throughput().select(request) == [0, 1]


def test_what_costs_and_brings_nothing_is_left() -> None:
    # Estimates may rise along a path: node 2 is not looked at before node 1 is taken.
    tree = DraftTree(np.arange(3), np.array([-1, 0, 1]), np.ones(3))
    free = CostModel(2.0, 0.0, 0.0)
    request = SelectionRequest(tree, 2, one_layer({0}, {0}, {0}), None, free, np.array([1.0, 0.0, 0.9]))
    assert Throughput().select(request) == [0]


def test_a_node_worth_exactly_its_time_does_not_come_and_go_for_ever() -> None:
    # 0.0385 · T and 1 · ΔT are the same to the last digit but one: by rounding it pays to add and pays to drop.
    tree = DraftTree(np.arange(2), np.array([-1, 0]), np.array([1.0, 0.03854816337047686]))
    experts = ExpertSets.from_topk(np.zeros((1, 2, 1), dtype=np.uint8), 4)
    cost = CostModel(0.0027793866313366405, 0.0, 0.00011143589918146735)
    request = SelectionRequest(tree=tree, budget=2, experts=experts, cost_model=cost)
    assert len(run_policy(Throughput(), request)) in (1, 2)


def test_a_budget_beyond_the_tree_costs_nothing_more() -> None:
    tree = DraftTree(np.arange(4), np.array([-1, 0, 0, 1]), np.array([1.0, 0.5, 0.5, 0.5]))
    assert count_selections(tree, 10**12) == count_selections(tree, 4) == len(list(selections(tree, 4))) == 6
