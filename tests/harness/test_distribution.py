"""The law of the output at temperature 1 is the target's own, enumerated over every sequence.

A vocabulary of 8 has 512 sequences of three tokens; plain forward passes of the library's model give each
its exact probability. Thousands of speculative requests, whose drafts are often accepted, must follow it. To
afford them, passes over a context that was seen before are remembered; the loop, the policy, the acceptance
and the choosing are the ones that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare
from tiny_models import plain_forward, rule_for, tiny_head, tiny_model, tiny_target

import ecospec.harness.decoding as decoding
import ecospec.harness.drafting as drafting
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, decode_speculative
from ecospec.harness.target import Pass, Target
from ecospec.policies import Confidence, DraftTree

VOCAB, LENGTH = 8, 3
PROMPT = (3, 1, 4, 1, 5)
Accept = Callable[..., tuple[list[int], int]]


@cache
def exact_law() -> npt.NDArray[np.float64]:
    """[8, 8, 8]: the probability of each continuation, from the library's model."""
    model = tiny_model(vocab_size=VOCAB)
    law = np.ones((VOCAB,) * LENGTH)
    for known in range(LENGTH):
        for path in product(range(VOCAB), repeat=known):
            probs = plain_forward(model, [*PROMPT, *path]).logits[0, -1].double().softmax(-1).numpy()
            law[path] *= probs.reshape(-1, *([1] * (LENGTH - known - 1)))
    assert law.sum() == pytest.approx(1.0)
    return law


class Remembering:
    """A target whose passes are remembered by context; a session of it knows its own tokens."""

    def __init__(self, target: Target) -> None:
        self.device, self.embedding, self.geometry = target.device, target.embedding, target.geometry
        self.target = target
        self.passes: dict[Any, Pass] = {}

    def new_session(self, capacity: int) -> RememberingSession:
        return RememberingSession(self)


@cache
def remembering() -> Any:
    return Remembering(tiny_target(vocab_size=VOCAB))


class RememberingSession:
    def __init__(self, owner: Remembering) -> None:
        self.owner, self.target, self.tokens = owner, owner, [0] * 0

    def prefill(self, tokens: Sequence[int]) -> Pass:
        self.tokens = list(tokens)
        return self._pass(None, np.arange(0))

    def verify(self, tree: DraftTree, nodes: npt.NDArray[np.int64]) -> Pass:
        self.verified = tree.tokens[nodes]
        return self._pass(tree, nodes)

    def commit(self, rows: Sequence[int]) -> None:
        self.tokens += [int(token) for token in self.verified[rows]]

    def _pass(self, tree: DraftTree | None, nodes: npt.NDArray[np.int64]) -> Pass:
        drafted = () if tree is None else (tuple(tree.tokens), tuple(tree.parents), tuple(nodes))
        key = (tuple(self.tokens), drafted)
        if key not in self.owner.passes:
            session = self.owner.target.new_session(40)
            result = session.prefill(self.tokens)
            self.owner.passes[key] = result if tree is None else session.verify(tree, nodes)
        return self.owner.passes[key]


class Guesses:
    """Drafts the three tokens that are likeliest at first, everywhere; often right, and always in one order."""

    def __init__(self, *args: object) -> None:
        pass

    def extend(self, tokens: Sequence[int], features: torch.Tensor) -> None:
        pass

    def draft(self, bonus: int, steps: int, top_k: int) -> DraftTree:
        return guessed_tree(bonus, steps)


@cache
def guessed_tree(bonus: int, steps: int) -> DraftTree:
    if steps < 1:
        return DraftTree([bonus], [-1], [1.0])
    likely = np.argsort(-exact_law().sum(axis=(1, 2)))[:3]
    tokens, parents, probs = [bonus, *likely], [-1, 0, 0, 0], [1.0, 0.5, 0.3, 0.2]
    if steps > 1:
        tokens, parents, probs = [*tokens, *likely], [*parents, 1, 1, 2], [*probs, 0.5, 0.3, 0.5]
    return DraftTree(tokens, parents, probs)


def sampled(
    monkeypatch: pytest.MonkeyPatch, requests: int, accept: Accept | None = None
) -> tuple[npt.NDArray[np.int64], float]:
    """Counts [8, 8, 8] of the outputs of this many requests, and their acceptance length α."""
    monkeypatch.setattr(drafting, "DrafterSession", Guesses)
    none = np.zeros((0, 0), dtype=np.bool_)
    monkeypatch.setattr(decoding, "active_pairs", lambda *args: none)  # only a record, and a third of the time
    if accept is not None:
        monkeypatch.setattr(decoding, "accept", accept)
    method = Speculation(Confidence(), tiny_head(), budget=6, draft_steps=2, draft_topk=3)
    counts = np.zeros((VOCAB,) * LENGTH, dtype=np.int64)
    steps = 0
    for request in range(requests):
        chooser = TokenChooser(Sampling(temperature=1.0, seed=11), str(request))
        done = decode_speculative(remembering(), method, PROMPT, chooser, rule_for(PROMPT, LENGTH + 1))
        counts[tuple(done.tokens[:LENGTH])] += 1  # one more is emitted, so that trees have their full depth
        steps += len(done.steps)
    return counts, requests * LENGTH / steps


def p_value(counts: npt.NDArray[np.int64]) -> float:
    """Chi-square of the counts under the exact law; sequences expected fewer than 4 times are pooled."""
    expected = (exact_law() * counts.sum()).flatten()
    rare = expected < 4
    seen = np.append(counts.flatten()[~rare], counts.flatten()[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert len(wanted) > 30
    return float(chisquare(seen, wanted * (seen.sum() / wanted.sum())).pvalue)


def test_the_law_of_the_output_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, alpha = sampled(monkeypatch, requests=2500)
    assert p_value(counts) > 1e-3
    assert alpha > 1.2  # drafts are accepted; without any, the law would hold trivially


def accept_any(
    tree: DraftTree,
    nodes: npt.NDArray[np.int64],
    logits: torch.Tensor,
    chooser: TokenChooser,
    position: int,
    greedy: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """Wrong: takes the first selected child, whatever the target says."""
    selected, node, rows = [int(n) for n in nodes], 0, [0]
    while children := [child for child in tree.children[node] if child in selected]:
        node = children[0]
        rows.append(selected.index(node))
    return rows, chooser.choose(logits[rows[-1]], position + len(rows) - 1)


def accept_each_by_its_probability(
    tree: DraftTree,
    nodes: npt.NDArray[np.int64],
    logits: torch.Tensor,
    chooser: TokenChooser,
    position: int,
    greedy: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """Wrong, and found in the field: tries each child with the target's p, and on rejecting all draws again
    from the whole distribution, so that a rejected token can come back."""
    selected, node, rows = [int(n) for n in nodes], 0, [0]
    while True:
        probs = logits[rows[-1]].softmax(-1)
        at = position + len(rows) - 1
        for child in (c for c in tree.children[node] if c in selected):
            if torch.rand(1).item() < probs[int(tree.tokens[child])]:
                node = child
                rows.append(selected.index(child))
                break
        else:
            return rows, chooser.choose(logits[rows[-1]], at)


def accept_at_one_position(
    tree: DraftTree,
    nodes: npt.NDArray[np.int64],
    logits: torch.Tensor,
    chooser: TokenChooser,
    position: int,
    greedy: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """Wrong: the right walk, with the same noise for every token."""
    return decoding_accept(tree, nodes, logits, _Stuck(chooser), 0)


class _Stuck:
    def __init__(self, chooser: TokenChooser) -> None:
        self._chooser = chooser

    def choose_greedy(self, logits: torch.Tensor) -> None:
        return None

    def choose(self, logits: torch.Tensor, position: int) -> int:
        return self._chooser.choose(logits, 0)


decoding_accept: Any = decoding.accept


@pytest.mark.parametrize("wrong", [accept_any, accept_each_by_its_probability, accept_at_one_position])
def test_a_wrong_acceptance_rule_is_seen(wrong: Accept, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert p_value(sampled(monkeypatch, 700, wrong)[0]) < 1e-6
