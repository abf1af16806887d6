"""Accuracy on draft trees and the error of marginal costs: by hand, by brute force, and over a real decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import Checkpoints
from tiny_models import random_selection, random_tree

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_ar, decode_speculative_batch
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.informing import true_routing
from ecospec.harness.loading import LoadedTarget, load_target, target_view
from ecospec.harness.preparing import load_head
from ecospec.harness.stopping import StopRule
from ecospec.harness.tracing import traced
from ecospec.harness.tree_accuracy import (
    TreeAccuracy,
    answered,
    marginal_costs,
    states_of_text,
    tree_accuracy_json,
    tree_accuracy_of,
    tree_tables,
)
from ecospec.policies import DraftTree, ExpertSets, MarginalCost
from ecospec.predictors.builtin import NoisyOracle, Oracle, TokenFrequency
from ecospec.predictors.traces import TracedText


def sets_of(*rows: list[int]) -> ExpertSets:
    """One layer of eight experts, two a node."""
    return ExpertSets.from_topk(np.array([rows]), 8)


def test_a_step_by_hand() -> None:
    """Root and two children; the second is not selected. Costs are of the nodes after the root."""
    tree = DraftTree(np.array([1, 2, 3]), np.array([-1, 0, 0]), np.array([1.0, 0.6, 0.4]))
    predicted, true = sets_of([0, 1], [1, 2], [4, 5]), sets_of([0, 1], [2, 3], [6, 7])
    found = TreeAccuracy()
    found.add(tree, predicted, true, np.array([0, 1]))
    assert found.shares == {0: [1.0], 1: [0.5, 0.0]}
    assert found.costs == [(1, 2)]  # predicted {1, 2} adds 2; truly {2, 3} adds both
    found.add(tree, predicted, true, np.array([0, 1, 2]))
    assert found.costs == [(1, 2), (1, 2), (2, 2)]
    assert (found.predicted_cost, found.true_cost, found.cost_error) == (4 / 3, 2.0, 2 / 3)
    told = tree_accuracy_json(found)
    assert told["by_depth"] == {0: 1.0, 1: 0.25}
    assert told["nodes_by_depth"] == {0: 2, 1: 4}
    assert told["marginal_cost"] == {
        "nodes": 3,
        "predicted": 4 / 3,
        "true": 2.0,
        "mean_absolute_error": 2 / 3,
    }
    assert len(tree_tables({"mine": found})) == 2


def test_marginal_costs_are_what_each_node_adds_to_the_footprints_before_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = random_tree(rng, 9)
        nodes = random_selection(rng, tree, 5)
        routing = rng.random((3, tree.size, 8)).argsort(-1)[..., :2]
        sets = ExpertSets.from_topk(routing, 8)
        covered: set[tuple[int, int]] = set()
        expected = []
        for node in nodes.tolist():
            path = [n for n in range(tree.size) if tree.ancestors[node, n]]
            footprint = {(layer, int(e)) for n in path for layer in range(3) for e in routing[layer, n]}
            expected.append(len(footprint - covered))
            covered |= footprint
        assert marginal_costs(sets, nodes) == expected


@pytest.fixture(scope="module")
def loaded(checkpoints: Checkpoints) -> LoadedTarget:
    return load_target(str(checkpoints.target), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def head(checkpoints: Checkpoints, loaded: LoadedTarget) -> Eagle3Head:
    return load_head(checkpoints.drafter, loaded.target).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(loaded: LoadedTarget) -> list[TracedText]:
    rng, found = np.random.default_rng(0), []
    for i in range(3):
        prompt = rng.integers(0, 300, 6).tolist()
        rule = StopRule(loaded.tokenizer, 24, frozenset())
        answer = decode_ar(loaded.target, prompt, TokenChooser(Sampling(), "x"), rule).tokens
        found.append(traced(loaded.target, f"text-{i}", [*prompt, *answer], len(prompt)))
    return found


def method_of(loaded: LoadedTarget, head: Eagle3Head, predictor: Any) -> Speculation:
    bound = predictor.bind(target_view(loaded.target))
    return Speculation(MarginalCost(), head, 4, 3, 2, bound, predictor.oracle, predictor.name)


def test_an_oracle_is_right_at_every_depth_and_about_every_cost(
    loaded: LoadedTarget, head: Eagle3Head, texts: list[TracedText]
) -> None:
    found = tree_accuracy_of(loaded, method_of(loaded, head, Oracle()), texts, frozenset())
    assert {share for shares in found.shares.values() for share in shares} == {1.0}
    roots = len(found.shares[0])
    assert len(found.shares[1]) > roots
    assert found.cost_error == 0
    assert 0 < found.true_cost <= 3 * 2  # L · K pairs at most
    noisy = tree_accuracy_of(loaded, method_of(loaded, head, NoisyOracle(accuracy=0.5)), texts, frozenset())
    for shares in noisy.shares.values():
        assert np.mean(shares) == pytest.approx(0.5, abs=0.1)
    assert noisy.cost_error > 0


def test_a_predictor_is_judged_by_the_trees_of_its_own_decoding(
    loaded: LoadedTarget, head: Eagle3Head, texts: list[TracedText], checkpoints: Checkpoints
) -> None:
    """Against the same counted here from what is seen of each step, whose output stays plain decoding's."""
    method = method_of(loaded, head, TokenFrequency(path=checkpoints.token_frequency))
    found = tree_accuracy_of(loaded, method, texts[:1], frozenset())
    seen: list[tuple[DraftTree, Any, Any]] = []

    def observe(tree: DraftTree, predicted: Any, nodes: Any, session: Any) -> None:
        length = session.length
        routing = true_routing(session, tree)
        assert session.length == length
        seen.append((tree, predicted.to_mask(), routing))

    text = texts[0]
    rule = StopRule(loaded.tokenizer, 24, frozenset())
    stream = Stream(text.tokens[:6].tolist(), TokenChooser(Sampling(), "x"), rule)
    (generation,) = decode_speculative_batch(loaded.target, method, [stream], observe)
    assert generation.tokens == text.tokens[6:].tolist()
    assert len(seen) == len(generation.steps)
    for depth, shares in found.shares.items():
        expected = [
            np.mean([predicted[node, layer, e] for layer in range(3) for e in routing[layer, node]])
            for tree, predicted, routing in seen
            for node in range(tree.size)
            if tree.depths[node] == depth
        ]
        assert shares == pytest.approx(expected)


def test_only_answers_of_several_tokens_give_trees(
    loaded: LoadedTarget, head: Eagle3Head, texts: list[TracedText]
) -> None:
    read = TracedText("read", texts[0].tokens, len(texts[0].tokens), texts[0].routing)
    raw = TracedText("raw", texts[0].tokens, 0, texts[0].routing)
    assert answered([read, raw, *texts], 2) == texts[:2]
    short = TracedText("short", texts[0].tokens[:7], 6, texts[0].routing[:, :7])
    with pytest.raises(UserError, match="no draft trees"):
        tree_accuracy_of(loaded, method_of(loaded, head, Oracle()), [short], frozenset())


def test_a_text_has_the_states_of_a_drafter_that_was_given_it(
    loaded: LoadedTarget, head: Eagle3Head, texts: list[TracedText]
) -> None:
    from ecospec.harness.drafting import DrafterSession

    text, size = texts[0], 5
    tokens = text.tokens.tolist()
    tree = DraftTree.chain(np.array(tokens[-size:]), np.ones(size))
    found = states_of_text(loaded.target, head, text, tree)
    assert found.own.tolist() == [True] * size
    features = loaded.target.teach(torch.tensor([tokens]))[1][0]
    for node in range(size):
        end = len(tokens) - size + node
        session = DrafterSession(head, loaded.target.embedding, 60)
        session.extend(tokens[1 : end + 1], features[:end])
        assert session.root_state is not None
        assert torch.allclose(found.states[found.rows[node]], session.root_state[0], atol=1e-4)
