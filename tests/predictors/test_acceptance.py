"""Acceptance estimators: curves, the small model, their fitting, and what is asked of a third party's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.acceptance.asking import AskedEstimator, EstimatorError, bind_estimator
from ecospec.predictors.acceptance.builtin import Draft, Isotonic, Learned
from ecospec.predictors.acceptance.contract import (
    AcceptanceEstimator,
    AcceptanceRequest,
    BoundEstimator,
    along_paths,
    never_rising,
    sibling_ranks,
)
from ecospec.predictors.acceptance.fitting import Examples, fit_weights
from ecospec.predictors.acceptance.isotonic import (
    ALL,
    LEAST_NODES,
    MOST_KNOTS,
    BoundIsotonic,
    Curve,
    fit_curve,
    fit_curves,
    from_json,
    to_json,
)
from ecospec.predictors.acceptance.judging import judge
from ecospec.predictors.acceptance.learned import (
    DEPTHS,
    INPUTS,
    LOG_ODDS,
    RANKS,
    SCALARS,
    BoundLearned,
    Weights,
    conditional,
    features_of,
)
from ecospec.predictors.contract import NodeStates, TargetView

TREE = DraftTree(
    tokens=np.arange(6),
    parents=np.array([-1, 0, 0, 1, 1, 3]),
    probs=np.array([1.0, 0.3, 0.6, 0.5, 0.2, 0.9]),
)
VIEW = TargetView(moe_layers=2, experts=8, top_k=2, vocab_size=16, hidden_size=4, embedding=None, stateless="ngram")


def no_states(tree: DraftTree) -> NodeStates:
    raise AssertionError("not asked for")


# --- what is derived from a tree ---


def test_ranks_are_by_probability_among_siblings() -> None:
    assert sibling_ranks(TREE).tolist() == [0, 1, 0, 0, 1, 0]
    equal = DraftTree(np.arange(3), np.array([-1, 0, 0]), np.array([1.0, 0.5, 0.5]))
    assert sibling_ranks(equal).tolist() == [0, 0, 1]


def test_products_and_minima_along_paths() -> None:
    own = np.array([1.0, 0.5, 0.4, 0.5, 0.1, 1.0])
    assert along_paths(TREE.parents, own).tolist() == [1.0, 0.5, 0.4, 0.25, 0.05, 0.25]
    assert never_rising(TREE.parents, np.array([1.0, 0.5, 0.4, 0.7, 0.1, 0.6])).tolist() == [
        *(1.0, 0.5, 0.4, 0.5, 0.1),
        0.5,
    ]


# --- isotonic ---


def pool_adjacent_violators(values: list[float]) -> list[float]:
    """Isotonic regression by its textbook algorithm."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [float(np.mean(block)) for block in blocks for _ in block]


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_goes_through_the_blocks_of_isotonic_regression(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.random(60)
    accepted = rng.random(60) < x
    curve = fit_curve(x, accepted)
    order = np.argsort(x)
    expected = pool_adjacent_violators(accepted[order].astype(float).tolist())
    values, starts = np.unique(np.round(expected, 9), return_index=True)
    ends = [*starts[1:], 60]
    assert len(curve.path_probs) == len(values)
    for knot_x, knot_y, value, start, end in zip(curve.path_probs, curve.acceptance, values, starts, ends, strict=True):
        assert knot_y == pytest.approx(min(max(value, 0.5 / 60), 1 - 0.5 / 60))
        assert knot_x == pytest.approx(x[order][start:end].mean())


def test_a_curve_is_linear_between_its_knots_and_level_beyond() -> None:
    curve = Curve((0.2, 0.4), (0.1, 0.5))
    assert [curve(x) for x in (0.0, 0.2, 0.3, 0.4, 0.9)] == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.5])


@pytest.mark.parametrize(
    ("x", "y"), [((), ()), ((0.2, 0.2), (0.1, 0.2)), ((0.1, 0.2), (0.2, 0.1)), ((0.1,), (1.2,)), ((math.nan,), (0.1,))]
)
def test_what_is_no_rising_function_is_refused(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(x, y)


def test_a_curve_keeps_a_bounded_number_of_knots() -> None:
    x = np.linspace(0, 1, 5000)
    accepted = np.random.default_rng(0).random(5000) < x
    curve = fit_curve(x, accepted)
    assert 10 < len(curve.path_probs) <= MOST_KNOTS
    assert np.abs([curve(each) - each for each in (0.2, 0.5, 0.8)]).max() < 0.08


def test_depths_and_ranks_have_curves_of_their_own_where_there_are_enough_nodes() -> None:
    rng = np.random.default_rng(1)
    depths = np.array([1] * 400 + [2] * 400 + [3] * (LEAST_NODES - 1))
    ranks = np.zeros(len(depths), dtype=np.int64)
    x = rng.random(len(depths))
    accepted = rng.random(len(depths)) < np.where(depths == 1, 0.9, 0.2)
    curves = fit_curves(depths, ranks, x, accepted)
    assert set(curves) == {ALL, "1,0", "2,0"}
    tree = DraftTree(np.arange(4), np.array([-1, 0, 1, 2]), np.array([1.0, 0.5, 1.0, 1.0]))
    found = BoundIsotonic(curves).estimate(AcceptanceRequest(tree, no_states))
    assert found[0] == 1.0
    assert found[1] == pytest.approx(0.9, abs=0.08)
    assert found[2] == pytest.approx(0.2, abs=0.1)
    assert found[3] <= found[2]  # the curve of all nodes lies higher, but no node is likelier than its parent
    assert from_json(to_json(curves), "here").keys() == curves.keys()


def test_damaged_curves_are_refused() -> None:
    with pytest.raises(UserError, match="here: its isotonic curves are damaged"):
        from_json({"1,0": {"path_probs": [0.1], "acceptance": [0.5]}}, "here")
    with pytest.raises(UserError, match="damaged"):
        from_json({ALL: {"path_probs": [0.1, 0.0], "acceptance": [0.5, 0.6]}}, "here")


# --- learned ---


def test_features_say_what_the_drafter_knows() -> None:
    found = features_of(TREE, np.array([0.0, 1.5, 1.5, 0.7, 0.7, 0.1]))
    assert found.shape == (6, INPUTS)
    # Node 3: probability .5 of path .15, over its sibling's .2, from a distribution of entropy .7, depth 2, rank 0.
    assert found[3, :SCALARS] == pytest.approx(
        [math.log(0.5), math.log(0.15), math.log(0.5 / 0.2), 0.7, 0.0], rel=1e-6, abs=1e-6
    )
    assert found[5, LOG_ODDS] == pytest.approx(math.log(9), rel=1e-5)
    assert found[1, 2] == pytest.approx(math.log(0.3 / 0.6), rel=1e-6)
    assert found[5, 2] == pytest.approx(math.log(0.9) + 12, rel=1e-6)  # no sibling
    depths, ranks = found[:, SCALARS : SCALARS + DEPTHS], found[:, SCALARS + DEPTHS :]
    assert depths.argmax(1).tolist()[1:] == [0, 0, 1, 1, 2]
    assert ranks.argmax(1).tolist()[1:] == [1, 0, 0, 1, 0]
    assert (depths.sum(1) == 1).all()
    assert (ranks.sum(1) == 1).all()
    assert ranks.shape[1] == RANKS


def some_weights(hidden: int = 4, rank: int = 3) -> Weights:
    rng = np.random.default_rng(0)
    shapes = {
        "inputs": (INPUTS, rank),
        "state": (hidden, rank),
        "hidden_bias": (rank,),
        "direct": (INPUTS,),
        "out": (rank,),
        "out_bias": (1,),
    }
    return Weights(**{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def test_the_small_model_is_what_it_says() -> None:
    weights, rng = some_weights(), np.random.default_rng(2)
    features, states = rng.normal(size=(3, INPUTS)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    rows = np.array([1, 0, 1])
    found = conditional(weights, features, states, rows)
    for node, row in enumerate(rows):
        scaled = states[row] / math.sqrt(float((states[row] ** 2).mean()) + 1e-6)
        inner = features[node] @ weights.inputs + scaled @ weights.state + weights.hidden_bias
        logit = float(features[node] @ weights.direct)
        logit += sum(float(z) / (1 + math.exp(-float(z))) * float(w) for z, w in zip(inner, weights.out, strict=True))
        assert found[node] == pytest.approx(1 / (1 + math.exp(-logit - float(weights.out_bias[0]))), rel=1e-4)


def test_a_node_is_judged_by_the_state_that_drafted_it() -> None:
    weights = some_weights()
    states = NodeStates(
        torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]]),
        np.array([0, 1, 0, 2, 1, 2]),
        np.array([True, True, False, True, False, False]),
        lambda: torch.tensor([1.0, 2.0, 3.0]),
    )
    found = BoundLearned(weights).estimate(AcceptanceRequest(TREE, lambda tree: states))
    # The root drafted nodes 1 and 2, node 1 (state 1) nodes 3 and 4, node 3 (state 2) node 5.
    rows = np.array([0, 0, 0, 1, 1, 2])
    features = features_of(TREE, np.array([1.0, 1.0, 1.0, 2.0, 2.0, 3.0]))
    own = conditional(weights, features, states.states.numpy(), rows)
    assert found == pytest.approx(along_paths(TREE.parents, own))
    assert found[0] == 1.0


def test_a_drafter_without_distributions_is_named_in_the_error() -> None:
    states = NodeStates(torch.zeros(1, 4), np.zeros(6, dtype=np.int64), np.ones(6, dtype=bool))
    asked = AskedEstimator("learned", BoundLearned(some_weights()))
    with pytest.raises(EstimatorError, match=r"learned.*keeps no distributions"):
        asked.estimate(TREE, lambda tree: states)


def planted(seed: int, count: int) -> Examples:
    """Nodes whose acceptance depends on one feature and one of eight state values."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, INPUTS)).astype(np.float32)
    states = rng.normal(size=(count, 8)).astype(np.float32)
    logits = 1.5 * features[:, 0] + 2.0 * states[:, 3] - 0.5
    return Examples(features, states, np.arange(count), rng.random(count) < 1 / (1 + np.exp(-logits)))


def test_fitting_finds_what_acceptance_depends_on() -> None:
    weights, epoch = fit_weights(planted(0, 16000), planted(1, 2000), seed=0)
    test = planted(2, 4000)
    found = conditional(weights, test.features, test.states, test.rows)
    logits = 1.5 * test.features[:, 0] + 2.0 * test.states[:, 3] - 0.5
    best = judge(1 / (1 + np.exp(-logits.astype(np.float64))), test.accepted)
    blind = judge(np.full(4000, test.accepted.mean()), test.accepted)
    ours = judge(found, test.accepted)
    assert epoch > 1
    assert best.log_loss < ours.log_loss < best.log_loss + 0.25 * (blind.log_loss - best.log_loss)
    again, _ = fit_weights(planted(0, 16000), planted(1, 2000), seed=0)
    assert np.array_equal(again.state, weights.state)


# --- judging ---


def test_scores_by_hand() -> None:
    found = judge(np.array([0.9, 0.2, 0.25, 0.0]), np.array([True, False, True, False]))
    assert found.brier == pytest.approx((0.01 + 0.04 + 0.5625 + 0.0) / 4)
    assert found.log_loss == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.25) + 0.0) / 4)
    assert [(each.nodes, each.estimated, each.accepted) for each in found.bins] == [
        (1, 0.0, 0.0),
        (2, pytest.approx(0.225), 0.5),
        (1, 0.9, 1.0),
    ]
    assert found.calibration_error == pytest.approx((0.275 * 2 + 0.1) / 4)


def test_a_certainty_that_was_wrong_costs_much_and_not_infinitely() -> None:
    assert judge(np.array([1.0]), np.array([False])).log_loss == pytest.approx(-math.log(1e-6))


# --- asking ---


class Broken(BoundEstimator):
    def __init__(self, found: Any) -> None:
        self.found = found

    def estimate(self, request: AcceptanceRequest) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (None, "a NoneType; expected floats"),
        (np.ones(5), r"float64 of shape \(5,\); expected floats of shape \(6,\)"),
        (np.ones(6, dtype=int), "int64"),
        (np.array([1.0, 0.5, 0.5, np.nan, 0.5, 0.5]), "nan for node 3"),
        (np.array([1.0, 0.5, 1.5, 0.5, 0.5, 0.5]), "1.5 for node 2"),
        (np.array([0.9, 0.5, 0.5, 0.5, 0.5, 0.5]), "0.9 for the root"),
        (RuntimeError("no luck"), "RuntimeError.*no luck"),
    ],
)
def test_a_broken_estimator_ends_in_one_line_with_its_name(found: Any, what: str) -> None:
    with pytest.raises(EstimatorError, match=f"(?s)acceptance estimator 'mine'.*{what}"):
        AskedEstimator("mine", Broken(found)).estimate(TREE, no_states)


def test_a_root_alone_is_not_asked_about() -> None:
    alone = DraftTree(np.array([3]), np.array([-1]), np.array([1.0]))
    assert AskedEstimator("mine", Broken(RuntimeError())).estimate(alone, no_states).tolist() == [1.0]


def test_binding_something_else_is_refused() -> None:
    class Odd(AcceptanceEstimator):
        """Odd."""

        name = "odd"

        def bind(self, target: TargetView, temperature: float) -> Any:
            return 3

    with pytest.raises(EstimatorError, match="bind returned a int"):
        bind_estimator(Odd(), VIEW, 0.0)


class Fitted(Broken):
    """An estimator that says what it was fitted on, or raises."""

    @property
    def fitted_on(self) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (5, "fitted_on is 5; expected a frozenset"),
        (None, "fitted_on is None; expected"),
        ("abc", "fitted_on is 'abc'; expected"),
        ({"a", 3}, "fitted_on is {.*}; expected"),
        (ZeroDivisionError("none"), "raised ZeroDivisionError"),
    ],
)
def test_what_an_estimator_was_fitted_on_is_a_set_of_texts(found: Any, what: str) -> None:
    class Own(AcceptanceEstimator):
        """Its own."""

        name = "own"

        def bind(self, target: TargetView, temperature: float) -> Any:
            return Fitted(found)

    with pytest.raises(EstimatorError, match=f"acceptance estimator 'own'.*{what}"):
        bind_estimator(Own(), VIEW, 0.0)


@pytest.mark.parametrize("found", [{"k"}, frozenset({"k"}), {"k": 1}.keys()], ids=["set", "frozenset", "keys"])
def test_a_prompt_that_an_estimator_was_fitted_on_is_refused(found: Any) -> None:
    class Own(AcceptanceEstimator):
        """Its own."""

        name = "own"

        def bind(self, target: TargetView, temperature: float) -> Any:
            return Fitted(found)

    asked = bind_estimator(Own(), VIEW, 0.0)
    asked.check_prompts({"other": "p0"})
    with pytest.raises(EstimatorError, match="fitted to 1 of these 2 prompts, such as p1"):
        asked.check_prompts({"other": "p0", "k": "p1"})


def test_draft_gives_the_path_probabilities_as_they_are() -> None:
    asked = bind_estimator(Draft(), VIEW, 0.3)
    assert np.array_equal(asked.estimate(TREE, no_states), TREE.path_probs)


def test_without_a_folder_the_error_says_how_to_make_one() -> None:
    with pytest.raises(UserError, match=r"nothing fitted belongs to this target.*isotonic:path=FOLDER"):
        Isotonic().bind(VIEW, 0.0)
    with pytest.raises(UserError, match="reads a drafter's states, which drafter 'ngram' has not"):
        Learned().bind(replace(VIEW, drafter=None), 0.0)
