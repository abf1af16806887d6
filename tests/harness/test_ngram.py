"""Prompt lookup against a brute-force twin, and in decoding."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tiny_models import path_to, random_tokens, rule_for, run_ar, run_speculative, tiny_predictor, tiny_target

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_speculative_batch
from ecospec.harness.drafters.ngram import LATEST, BoundNgram, NgramSession
from ecospec.harness.target import Target
from ecospec.policies import Confidence, DraftTree, GlobalCost, MarginalCost, Oracle, Policy


def session_of(text: list[int], longest: int = 3) -> NgramSession:
    session = NgramSession(longest)
    session.extend(text)
    return session


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    tokens = tree.tokens.tolist()
    return {tuple(tokens[n] for n in path_to(tree, node)[1:]): float(tree.probs[node]) for node in range(1, tree.size)}


def brute_force(text: list[int], longest: int, depth: int, top_k: int) -> dict[tuple[int, ...], float]:
    """Paths with the probabilities of their last tokens, by going through the whole text for everything."""
    for n in range(longest, 0, -1):
        if n >= len(text) or depth < 1:
            continue
        ends = [e for e in range(len(text) - 1, n - 1, -1) if text[e - n : e] == text[-n:]][:LATEST]
        if not ends:
            continue
        followed = [text[e : e + depth] for e in ends]
        chosen: list[list[int]] = []
        for each in followed:
            if each not in chosen and len(chosen) < top_k:
                chosen.append(each)
        found = {}
        for each in chosen:
            for length in range(1, len(each) + 1):
                of = sum(other[:length] == each[:length] for other in followed)
                under = sum(other[: length - 1] == each[: length - 1] for other in followed)
                found[tuple(each[:length])] = of / (under + 1)
        return found
    return {}


@pytest.mark.parametrize("vocab", [2, 4, 20])
def test_the_tree_is_that_of_a_search_through_the_whole_text(vocab: int) -> None:
    rng, sizes = np.random.default_rng(vocab), set()
    for _ in range(150):
        text = random_tokens(rng, int(rng.integers(1, 200)), vocab)
        longest, depth, top_k = (int(each) for each in rng.integers([1, 0, 1], [5, 6, 4]))
        cut = int(rng.integers(0, len(text)))
        session = session_of(text[:cut], longest)  # in two parts, as a prompt and what came
        session.extend(text[cut:])
        tree = session.draft(depth, top_k)
        expected = brute_force(text, longest, depth, top_k)
        assert paths_of(tree) == pytest.approx(expected)
        assert tree.size == len(expected) + 1
        assert tree.tokens[0] == text[-1]
        assert tree.size <= 1 + top_k * depth
        sizes.add(tree.size)
        for node in range(tree.size):
            of = [float(tree.probs[child]) for child in tree.children[node]]
            assert all(0 < p <= 1 for p in of)
            assert sum(of) <= 1
    assert len(sizes) > 4


def test_the_longest_match_wins_and_what_came_later_comes_first() -> None:
    tree = session_of([1, 2, 9, 5, 2, 7, 1, 2, 8, 1, 2]).draft(2, 2)
    # 1 2 stood twice before: then came 8 1, and before that 9 5; where 2 stood alone, 7 came
    assert paths_of(tree) == {(8,): 1 / 3, (8, 1): 1 / 2, (9,): 1 / 3, (9, 5): 1 / 2}
    assert tree.tokens.tolist() == [2, 8, 1, 9, 5]
    assert paths_of(session_of([1, 2, 9, 5, 2, 7, 1, 2, 8, 1, 2], longest=1).draft(1, 1)) == {(8,): 1 / 4}


def test_continuations_that_begin_alike_share_their_nodes() -> None:
    tree = session_of([3, 4, 5, 3, 4, 6, 3]).draft(2, 2)
    assert paths_of(tree) == {(4,): 2 / 3, (4, 6): 1 / 3, (4, 5): 1 / 3}


def test_without_a_match_or_depth_there_is_the_root_alone() -> None:
    for tree in (session_of([1, 2, 3]).draft(3, 2), session_of([1]).draft(3, 2), session_of([1, 1, 1]).draft(0, 2)):
        assert tree.size == 1
    assert session_of([1, 1]).draft(3, 2).tokens.tolist() == [1, 1]


# --- in decoding, where trees of one node are usual


@cache
def target_of(vocab: int) -> Target:
    return tiny_target(vocab_size=vocab, feature_layers=())


def method_of(policy: Policy, vocab: int = 8, predicting: bool = False, **sizes: int) -> Speculation:
    given = {"budget": 4, "draft_steps": 3, "draft_topk": 2, **sizes}
    predictor = tiny_predictor(target_of(vocab)) if predicting else None
    return Speculation(policy, BoundNgram(3), predictor=predictor, drafter_name="ngram", **given)


POLICIES = [(Confidence(), False), (GlobalCost(), True), (MarginalCost(), True), (Oracle(), False)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("policy", "predicting"), POLICIES, ids=lambda each: getattr(each, "name", ""))
def test_every_policy_emits_what_plain_decoding_emits(policy: Policy, predicting: bool, sampling: Sampling) -> None:
    alone = 0
    for i, n in enumerate((1, 5, 17)):
        prompt = random_tokens(np.random.default_rng(i), n, 8)
        plain = run_ar(target_of(8), prompt, sampling, n=64)
        ours = run_speculative(target_of(8), method_of(policy, predicting=predicting), prompt, sampling, n=64)
        assert ours.tokens == plain.tokens
        assert len(ours.tokens) == 64
        alone += sum(step.selected == 1 for step in ours.steps)
    assert alone > 0  # steps with nothing drafted


def test_a_text_that_repeats_itself_is_drafted_right() -> None:
    prompt = [1, 2, 3, 4] * 6
    plain = run_ar(target_of(8), prompt, n=60)
    ours = run_speculative(target_of(8), method_of(Confidence()), prompt, n=60)
    assert ours.tokens == plain.tokens
    repeats = len(set(plain.tokens[-20:])) < 8  # greedy decoding of a random model falls into a loop
    assert not repeats or len(ours.steps) < 0.7 * len(plain.steps)
    assert len(ours.steps) < len(plain.steps)


def test_requests_of_a_batch_are_drafted_for_as_alone() -> None:
    prompts = [random_tokens(np.random.default_rng(i), n, 8) for i, n in enumerate((3, 11, 6))]
    counts = (20, 50, 1)
    streams = [
        Stream(prompt, TokenChooser(Sampling(), "r"), rule_for(prompt, count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    for found, prompt, count in zip(
        decode_speculative_batch(target_of(8), method_of(Confidence()), streams), prompts, counts, strict=True
    ):
        alone = run_speculative(target_of(8), method_of(Confidence()), prompt, n=count)
        assert found.tokens == alone.tokens == run_ar(target_of(8), prompt, n=count).tokens
        assert [s.emitted for s in found.steps] == [s.emitted for s in alone.steps]
