"""Unique experts on text: counted by hand, and the uniform formula against drawing."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import random_tree

from ecospec.harness.costs.text import PairCounts, add_text, tree_pairs, uniform_experts
from ecospec.policies import Confidence, ExpertSets, SelectionRequest


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (6, 5), (4, 4)])
def test_uniform_routing_is_what_drawing_gives(experts: int, top_k: int) -> None:
    rng, draws = np.random.default_rng(0), 4000
    for n in (1, 2, 5, 9):
        picks = rng.permuted(np.broadcast_to(np.arange(experts), (draws * n, experts)), axis=1)[:, :top_k]
        unique = np.array([len(np.unique(each)) for each in picks.reshape(draws, -1)])
        error = unique.std() / np.sqrt(draws)
        assert uniform_experts(n, experts, top_k) == pytest.approx(unique.mean(), abs=5 * error + 1e-5)


def test_consecutive_tokens_at_every_place_against_sets() -> None:
    rng = np.random.default_rng(1)
    routing = np.stack([[rng.permutation(9)[:3] for _ in range(20)] for _ in range(2)])
    counts = PairCounts(5)
    add_text(counts, routing, 9)
    assert counts.places == 16
    for n, mean in enumerate(counts.means(), start=1):
        unions = [
            sum(len(set(layer[place : place + n].reshape(-1).tolist())) for layer in routing) for place in range(16)
        ]
        assert mean == pytest.approx(np.mean(unions))


def test_a_text_that_is_too_short_is_not_counted() -> None:
    counts = PairCounts(5)
    add_text(counts, np.zeros((1, 4, 1), dtype=np.int64), 3)
    assert (counts.places, counts.means()) == (0, ())


def test_nodes_of_a_tree_are_taken_as_the_confidence_policy_takes_them() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        tree = random_tree(rng, 11)
        sets = ExpertSets.from_topk(np.stack([[rng.permutation(16)[:2] for _ in range(11)] for _ in range(3)]), 16)
        found = tree_pairs(tree, sets, 8)
        for n, pairs in enumerate(found, start=1):
            nodes = Confidence().select(SelectionRequest(tree, n))
            members = sets.to_mask()[list(nodes)].any(axis=0)
            assert pairs == members.sum()
        assert len(found) == 8


def test_places_with_few_tokens_do_not_bend_the_mean() -> None:
    counts = PairCounts(3)
    counts.add([10, 20, 30])
    counts.add([2])  # a tree of its root alone
    # one token 6 on average; a second adds 10 where there is one, and so does a third
    assert counts.means() == (6.0, 16.0, 26.0)
