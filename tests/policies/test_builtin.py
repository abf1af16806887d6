"""The built-in policies against the paper's worked example and a transcription of its algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ecospec.errors import UserError
from ecospec.policies import (
    Confidence,
    DraftTree,
    ExpertNeed,
    ExpertSets,
    GlobalCost,
    MarginalCost,
    Oracle,
    Policy,
    SelectionRequest,
    run_policy,
    validate_selection,
)

EPSILON = 1e-6
POLICIES = [Confidence(), GlobalCost(), MarginalCost(), Oracle()]


def one_layer(*sets: set[int], num_experts: int = 16) -> ExpertSets:
    """Expert sets of a single-layer model, one per node."""
    mask = np.zeros((len(sets), 1, num_experts), dtype=bool)
    for node, experts in enumerate(sets):
        mask[node, 0, list(experts)] = True
    return ExpertSets.from_mask(mask)


# --- the twin: plain Python sets, nothing shared with the code under test ---------------------------


def brute_force(
    policy_name: str, request: SelectionRequest, epsilon: float = EPSILON, frontier_only: bool = False
) -> list[int]:
    """Algorithm 1 over *all* unselected nodes, as the paper has it (or over the frontier alone)."""
    tree, experts = request.tree, request.experts
    assert experts is not None
    sets = [{(int(layer), int(e)) for layer, e in np.argwhere(mask)} for mask in experts.to_mask()]
    covered: set[tuple[int, int]] = set()
    if request.covered is not None:
        mask = ExpertSets(request.covered[None], experts.num_layers, experts.num_experts).to_mask()[0]
        covered = {(int(layer), int(e)) for layer, e in np.argwhere(mask)}

    paths: list[list[int]] = []
    for node in range(tree.size):
        parent = int(tree.parents[node])
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    footprints = [set().union(*(sets[step] for step in path)) for path in paths]

    selected = [0]
    buffer = covered | footprints[0]
    while len(selected) < request.budget:
        best: tuple[float, int, int] | None = None
        for node in range(tree.size):
            if node in selected or (frontier_only and int(tree.parents[node]) not in selected):
                continue
            cost = {
                "confidence": None,
                "global-cost": len(footprints[node]),
                "marginal-cost": len(footprints[node] - buffer),
            }[policy_name]
            probability = float(request.node_scores[node])
            score = probability if cost is None else probability / (cost + epsilon)
            rank = (score, -len(paths[node]), -node)
            if best is None or rank > best:
                best = rank
        if best is None:
            break
        selected.append(-best[2])
        buffer |= footprints[-best[2]]
    return selected


# --- the paper's example ----------------------------------------------------------------------------


def test_the_worked_example_of_figure_3() -> None:
    """γ = 2: the first pick scores .25; then .17 loses to .20.

    The figure scores draft nodes alone, and two rounds of scores mean two picks: γ = 2 counts drafts
    here. A budget includes the root, so it is 3. The numbers are met by this tree over one layer:

        node  P     experts  path footprint   cost given {0}  cost given {0, 1, 2}
        0     1     {0}      {0}
        1     .50   {1, 2}   {0, 1, 2}        2: .50/2 = .25  picked
        2     .34   {3, 4}   {0, 3, 4}        2: .34/2 = .17  2: .34/2 = .17
        3     .20   {1, 5}   {0, 1, 2, 5}     3: .20/3 = .07  1: .20/1 = .20  picked

    Node 3 hangs below node 1 and shares an expert with it: less likely than node 2, but half as dear.
    """
    tree = DraftTree(np.arange(4), np.array([-1, 0, 0, 1]), np.array([1.0, 0.5, 0.34, 0.4]))
    experts = one_layer({0}, {1, 2}, {3, 4}, {1, 5})
    request = SelectionRequest(tree, budget=3, experts=experts)

    footprints = request.path_footprints().bits
    covered = footprints[0]
    first_scores = tree.path_probs[1:] / np.bitwise_count(footprints[1:] & ~covered).sum(axis=1)
    assert first_scores.round(2).tolist() == [0.25, 0.17, 0.07]
    covered = footprints[1]
    second_scores = tree.path_probs[2:] / np.bitwise_count(footprints[2:] & ~covered).sum(axis=1)
    assert second_scores.round(2).tolist() == [0.17, 0.2]

    assert MarginalCost().select(request) == [0, 1, 3]
    assert Confidence().select(request) == [0, 1, 2]
    assert GlobalCost().select(request) == [0, 1, 2]  # .50/3, then .34/3 against .20/4


# --- against the twin -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Confidence(), GlobalCost(), MarginalCost()], ids=lambda p: p.name)
def test_selections_equal_algorithm_1_over_all_nodes(policy: Policy, requests: list[SelectionRequest]) -> None:
    for request in requests:
        assert list(policy.select(request)) == brute_force(policy.name, request)


@pytest.mark.parametrize("epsilon", [1e-12, 0.5, 100.0])
def test_epsilon_is_added_to_every_cost(epsilon: float, requests: list[SelectionRequest]) -> None:
    for request in requests[:300]:
        for policy in (GlobalCost(epsilon), MarginalCost(epsilon)):
            assert policy.select(request) == brute_force(policy.name, request, epsilon)


def test_oracle_is_marginal_cost_on_the_true_routing(requests: list[SelectionRequest]) -> None:
    assert Oracle.needs is ExpertNeed.ORACLE
    for request in requests[:300]:
        assert Oracle().select(request) == MarginalCost().select(request)


@pytest.mark.parametrize("policy_name", ["confidence", "global-cost", "marginal-cost"])
def test_ranking_all_nodes_is_prefix_closed_as_section_4_2_claims(
    policy_name: str, requests: list[SelectionRequest]
) -> None:
    for request in requests:
        validate_selection(policy_name, request, brute_force(policy_name, request))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_estimates_that_rise_along_a_path_keep_the_selection_prefix_closed(
    policy: Policy, requests: list[SelectionRequest]
) -> None:
    rng = np.random.default_rng(1)
    unrestricted_differs = 0
    name = "marginal-cost" if policy.name == "oracle" else policy.name
    for request in requests[:1000]:
        rising = replace(request, acceptance=rng.random(request.tree.size))
        selection = list(policy.select(rising))
        assert selection == brute_force(name, rising, frontier_only=True)
        validate_selection(policy.name, rising, selection)
        unrestricted_differs += selection != brute_force(name, rising)
    assert unrestricted_differs > 100  # so the restriction is what holds it


# --- by hand ----------------------------------------------------------------------------------------


def test_ties_go_to_the_shallower_node_then_to_the_lower_index() -> None:
    # Every path probability is 1; node 1's child 2 has a lower index than node 3, but is deeper.
    tree = DraftTree(np.arange(5), np.array([-1, 0, 1, 0, 0]), np.ones(5))
    experts = one_layer(*[{0}] * 5)
    for policy in POLICIES:
        selections = [list(policy.select(SelectionRequest(tree, budget, experts))) for budget in range(1, 6)]
        assert selections == [[0], [0, 1], [0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 4, 2]]


def test_what_is_already_covered_changes_the_choice() -> None:
    tree = DraftTree(np.arange(3), np.array([-1, 0, 0]), np.array([1.0, 0.5, 0.4]))
    experts = one_layer({0}, {1, 2}, {3, 4})
    assert MarginalCost().select(SelectionRequest(tree, 2, experts)) == [0, 1]
    covered = one_layer({3}).bits[0]
    assert MarginalCost().select(SelectionRequest(tree, 2, experts, covered)) == [0, 2]
    assert GlobalCost().select(SelectionRequest(tree, 2, experts, covered)) == [0, 1]


def test_nodes_that_cost_nothing_are_ranked_by_probability_before_all_others() -> None:
    tree = DraftTree(np.arange(4), np.array([-1, 0, 0, 0]), np.array([1.0, 0.6, 0.1, 0.2]))
    experts = one_layer({0, 1}, {2}, {0}, {1})
    with np.errstate(all="raise"):
        assert MarginalCost().select(SelectionRequest(tree, 4, experts)) == [0, 3, 2, 1]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_budget_of_one_is_the_root_and_a_large_one_the_whole_tree(
    policy: Policy, requests: list[SelectionRequest]
) -> None:
    for request in requests[:100]:
        assert run_policy(policy, replace(request, budget=1)).tolist() == [0]
        whole = run_policy(policy, replace(request, budget=request.tree.size + 5))
        assert whole.tolist() == list(range(request.tree.size))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_tree_of_the_root_alone(policy: Policy) -> None:
    request = SelectionRequest(DraftTree.chain([7], [1.0]), budget=4, experts=one_layer({1}))
    assert run_policy(policy, request).tolist() == [0]


def test_selecting_leaves_the_request_as_it_was(requests: list[SelectionRequest]) -> None:
    for request in requests[:100]:
        assert MarginalCost().select(request) == MarginalCost().select(request)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("policy_class", [GlobalCost, MarginalCost, Oracle])
def test_an_epsilon_that_cannot_keep_scores_finite_is_refused(policy_class: type[MarginalCost], epsilon: float) -> None:
    with pytest.raises(UserError, match=f"{policy_class.name}.*finite number above 0, got {epsilon}"):
        policy_class(epsilon=epsilon)
