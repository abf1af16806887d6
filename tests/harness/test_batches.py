"""Requests that are decoded together: each row equals its single run, and a step's cost is the batch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CONTEXT,
    LAYERS,
    TOP_K,
    asked,
    random_selection,
    random_tokens,
    random_tree,
    rule_for,
    tiny_head,
    tiny_predictor,
    tiny_target,
)

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import (
    Generation,
    Speculation,
    Stream,
    decode_ar_batch,
    decode_speculative_batch,
)
from ecospec.harness.drafting import DrafterBatch, DrafterSession
from ecospec.harness.steps import select_rows
from ecospec.harness.target import Target
from ecospec.harness.target_batch import BatchPass, TargetBatch
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
)
from ecospec.predictors.packing import SlotPool

SMALL = 8
"""A vocabulary in which random drafts are often right, so that rows are ragged."""
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=3)
LENGTHS = (1, 5, 17, 3, 9)
PROMPTS = [random_tokens(np.random.default_rng(i), n, SMALL) for i, n in enumerate(LENGTHS)]
LIMITS = (40, 7, 25, 1, 33)
"""Rows end at different steps, one at its first token."""


@cache
def target_of(family: str = "qwen3_moe") -> Target:
    return tiny_target(family, vocab_size=SMALL)


def method_of(policy: Policy, family: str = "qwen3_moe", budget: int = 4) -> Speculation:
    predictor = tiny_predictor(target_of(family)) if policy.needs is ExpertNeed.PREDICTED else None
    return Speculation(policy, tiny_head(target_vocab=SMALL), budget, 3, 2, predictor)


def streams(sampling: Sampling, rows: Sequence[int] = range(len(PROMPTS)), **rule: Any) -> list[Stream]:
    return [Stream(PROMPTS[i], TokenChooser(sampling, f"r{i}"), rule_for(PROMPTS[i], LIMITS[i], **rule)) for i in rows]


def alone(method: Speculation | None, family: str, sampling: Sampling, **rule: Any) -> list[Generation]:
    """Every request in a batch of its own."""
    target, found = target_of(family), []
    for i in range(len(PROMPTS)):
        one = streams(sampling, [i], **rule)
        found += decode_ar_batch(target, one) if method is None else decode_speculative_batch(target, method, one)
    return found


def assert_same(together: Sequence[Generation], single: Sequence[Generation]) -> None:
    assert len(together) == len(single)
    for ours, theirs in zip(together, single, strict=True):
        assert (ours.tokens, ours.text, ours.reason) == (theirs.tokens, theirs.text, theirs.reason)
        assert sum(step.emitted for step in ours.steps) == len(ours.tokens) - 1


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [Confidence(), GlobalCost(), MarginalCost(), Oracle()], ids=lambda p: p.name)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_each_row_of_a_batch_equals_its_single_run(family: str, policy: Policy, sampling: Sampling) -> None:
    plain = alone(None, family, sampling)
    assert_same(decode_ar_batch(target_of(family), streams(sampling)), plain)
    method = method_of(policy, family)
    together = decode_speculative_batch(target_of(family), method, streams(sampling))
    assert_same(together, plain)
    assert_same(alone(method, family, sampling), plain)
    emitted = [step.emitted for generation in together for step in generation.steps]
    assert 1 in emitted
    assert max(emitted) > 1  # ragged acceptance


@pytest.mark.parametrize("rows", [[0], [0, 1], [4, 2, 0], [3], [3, 3], [0, 0, 0, 0, 0, 0, 0, 0]])
def test_any_batch_of_any_rows(rows: list[int]) -> None:
    plain = alone(None, "qwen3_moe", WARM)
    together = decode_speculative_batch(target_of(), method_of(MarginalCost()), streams(WARM, rows))
    assert_same(together, [plain[i] for i in rows])


def test_rows_that_end_inside_a_block_leave_the_others_alone() -> None:
    plain = alone(None, "qwen3_moe", WARM)
    eos = (plain[0].tokens[5],)
    cut = alone(None, "qwen3_moe", WARM, eos=eos)
    assert len({len(generation.tokens) for generation in cut}) > 2
    for policy in (Confidence(), MarginalCost()):
        together = decode_speculative_batch(target_of(), method_of(policy, budget=9), streams(WARM, eos=eos))
        assert_same(together, cut)


def test_a_row_at_the_end_of_its_context() -> None:
    target = target_of()
    long = random_tokens(np.random.default_rng(9), CONTEXT - 6, SMALL)

    def pair() -> list[Stream]:
        return [
            Stream(prompt, TokenChooser(WARM, name), rule_for(prompt, 30))
            for name, prompt in (("long", long), ("short", PROMPTS[0]))
        ]

    plain = [decode_ar_batch(target, [stream])[0] for stream in pair()]
    assert [len(generation.tokens) for generation in plain] == [6, 30]
    assert_same(decode_speculative_batch(target, method_of(MarginalCost()), pair()), plain)


def test_a_step_counts_the_experts_of_the_whole_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[BatchPass] = []
    for name in ("verify", "decode"):
        original = getattr(TargetBatch, name)
        monkeypatch.setattr(TargetBatch, name, lambda *args, f=original: passes.append(f(*args)) or passes[-1])
    for run in (
        lambda: decode_ar_batch(target_of(), streams(WARM)),
        lambda: decode_speculative_batch(target_of(), method_of(Confidence()), streams(WARM)),
    ):
        passes.clear()
        longest = max(run(), key=lambda generation: len(generation.steps))
        assert len(passes) == len(longest.steps)  # this row was there from the first step to the last
        for step, done in zip(longest.steps, passes, strict=True):
            routing = done.whole.routing
            assert step.expert_pairs == len({(at, int(e)) for at in range(LAYERS) for e in routing[at].flatten()})
            assert step.rows == len(done.counts)
        assert {step.rows for step in longest.steps} == {1, 2, 3, 4}
        assert max(step.expert_pairs for step in longest.steps) > LAYERS * TOP_K


def test_shares_of_seconds_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(100_000))
    monkeypatch.setattr("ecospec.harness.decoding.time.perf_counter", lambda: next(clock))
    found = decode_ar_batch(target_of(), streams(GREEDY, [0, 2]))
    # The clock is read when a step begins, by its watch three times, and when it ends.
    walls = [4.0 / step.rows for generation in found for step in generation.steps]
    assert sum(generation.decode_seconds for generation in found) == pytest.approx(sum(walls))
    assert [generation.decode_seconds for generation in found] == pytest.approx([24 * 2.0 + 15 * 4.0, 24 * 2.0])
    assert [generation.prefill_seconds for generation in found] == [0.5, 0.5]


@pytest.mark.parametrize("policy", [Confidence(), MarginalCost()], ids=lambda p: p.name)
def test_no_second_is_counted_twice(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    ticks = [0.0]

    def tick() -> float:
        ticks[0] += 1.0
        return ticks[0]

    monkeypatch.setattr("ecospec.harness.decoding.time.perf_counter", tick)
    found = decode_speculative_batch(target_of(), method_of(policy), streams(GREEDY))
    seconds = sum(generation.prefill_seconds + generation.decode_seconds for generation in found)
    assert 0.5 * ticks[0] < seconds < ticks[0]


def spread(tokens: Sequence[int], probs: Sequence[float]) -> DraftTree:
    """A root with leaves."""
    return DraftTree(np.array([0, *tokens]), np.array([-1, *[0] * len(tokens)]), np.array([1.0, *probs]))


def test_a_row_sees_what_the_rows_before_it_cover() -> None:
    """By hand. Row 0 takes expert 1 with its leaf; for row 1 expert 1 is then free, and its leaf 2 is taken."""
    experts = [
        ExpertSets.from_topk(np.array([[[0], [1], [2]]]), 8),
        ExpertSets.from_topk(np.array([[[0], [3], [1]]]), 8),
    ]
    trees = [spread([5, 6], [0.5, 0.4]), spread([5, 6], [0.5, 0.4])]
    selected = select_rows(MarginalCost(), trees, experts, budget=2)
    assert [nodes.tolist() for nodes in selected] == [[0, 1], [0, 2]]
    # The other way round nothing is shared: the first takes expert 3, and both leaves of the second cost one.
    assert [nodes.tolist() for nodes in select_rows(MarginalCost(), trees, experts[::-1], 2)] == [[0, 1], [0, 1]]
    assert [nodes.tolist() for nodes in select_rows(Confidence(), trees, None, 2)] == [[0, 1], [0, 1]]


class Noting(Policy):
    """Confidence that needs expert sets, and notes B₀."""

    name = "noting"
    needs = ExpertNeed.PREDICTED
    requests: list[SelectionRequest]

    def __init__(self) -> None:
        self.requests = []

    def select(self, request: SelectionRequest) -> list[int]:
        self.requests.append(request)
        return Confidence().select(request)


def test_b0_is_the_union_of_the_selections_before_a_row() -> None:
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 7) for _ in range(4)]
    experts = [ExpertSets.from_topk(rng.integers(0, 8, (3, 7, 2)), 8) for _ in trees]
    policy = Noting()
    selected = select_rows(policy, trees, experts, budget=3)
    assert policy.requests[0].covered is None
    unions = [sets.to_mask()[nodes].any(axis=0) for sets, nodes in zip(experts, selected, strict=True)]
    for request, before in zip(policy.requests[1:], accumulate(unions, np.logical_or), strict=False):
        covered = request.covered
        assert covered is not None
        assert (ExpertSets(covered[None], 3, 8).to_mask()[0] == before).all()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_a_verification_pass_over_a_batch_gives_each_row_its_own(family: str) -> None:
    target, rng = target_of(family), np.random.default_rng(1)
    batch = TargetBatch(target, [80] * len(PROMPTS))
    singles = [target.new_session(80) for _ in PROMPTS]
    for prompt, session, single in zip(PROMPTS, batch.sessions, singles, strict=True):
        session.prefill(prompt)
        single.prefill(prompt)
    for _ in range(6):
        trees = [random_tree(rng, int(rng.integers(1, 9)), SMALL) for _ in singles]
        selected = [random_selection(rng, tree, int(rng.integers(1, tree.size + 1))) for tree in trees]
        step = batch.verify(trees, selected)
        assert step.counts == tuple(map(len, selected))
        kept = []
        for part, single, tree, nodes in zip(step.parts(), singles, trees, selected, strict=True):
            own = single.verify(tree, nodes)
            torch.testing.assert_close(part.logits, own.logits, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(part.features, own.features, atol=1e-4, rtol=1e-4)
            assert torch.equal(part.routing.sort(-1).values, own.routing.sort(-1).values)
            path = [0]
            while (below := [row for row, node in enumerate(nodes) if tree.parents[node] == nodes[path[-1]]]) and (
                rng.random() < 0.7
            ):
                path.append(int(rng.choice(below)))
            kept.append(path)
            single.commit(path)
        batch.commit(kept)
    tokens = random_tokens(rng, len(singles), SMALL)
    step = batch.decode(tokens)
    for part, single, token in zip(step.parts(), singles, tokens, strict=True):
        torch.testing.assert_close(part.logits, single.decode(token).logits, atol=1e-4, rtol=1e-4)
    assert [session.length for session in batch.sessions] == [single.length for single in singles]


def same_tree(ours: DraftTree, theirs: DraftTree) -> bool:
    return (
        ours.tokens.tolist() == theirs.tokens.tolist()
        and ours.parents.tolist() == theirs.parents.tolist()
        and np.allclose(ours.probs, theirs.probs, atol=1e-5)
    )


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_a_batch_is_drafted_for_as_each_row_alone(topk: int) -> None:
    rng, head, target = np.random.default_rng(2), tiny_head(), tiny_target()
    batch = DrafterBatch(head, target.embedding, [60, 70, 80])
    singles = [DrafterSession(head, target.embedding, 80) for _ in range(3)]
    torch.manual_seed(0)
    for row, (single, length) in enumerate(zip(singles, (4, 1, 11), strict=True)):
        tokens, features = random_tokens(rng, length), torch.randn(length, 96)
        batch.start(row, tokens, features)
        single.extend(tokens, features)
    for depths in ([3, 3, 3], [3, 1, 2], [0, 4, 1], [0, 0, 0], [2, 2, 2]):
        bonuses = random_tokens(rng, 3)
        ours = batch.draft(bonuses, depths, topk)
        for tree, single, bonus, depth in zip(ours, singles, bonuses, depths, strict=True):
            assert same_tree(tree, single.draft(bonus, depth, topk))
        blocks = [random_tokens(rng, int(n)) for n in rng.integers(1, 5, 3)]
        features = [torch.randn(len(block), 96) for block in blocks]
        batch.extend(blocks, features)
        for single, block, states in zip(singles, blocks, features, strict=True):
            single.extend(block, states)
    batch.leave(0)
    ours = batch.draft([1, 2], [3, 3], topk)
    assert all(same_tree(tree, single.draft(b, 3, topk)) for tree, single, b in zip(ours, singles[1:], (1, 2)))  # noqa: B905
    batch.leave(1)
    assert same_tree(batch.draft([5], [3], topk)[0], singles[1].draft(5, 3, topk))


def test_a_batch_is_predicted_for_as_each_row_alone() -> None:
    rng, bound = np.random.default_rng(3), tiny_predictor(target_of())
    requests = [asked(prompt, 60) for prompt in PROMPTS[:4]]
    batch = bound.start_batch(requests)
    singles = [bound.start(request) for request in requests]
    for gone in (None, 1, 2, 0):
        if gone is not None:
            batch.leave(gone)
            del singles[gone]
        for _ in range(3):
            trees = [random_tree(rng, int(rng.integers(1, 8)), SMALL) for _ in singles]
            for ours, single, tree in zip(batch.predict(trees), singles, trees, strict=True):
                assert (np.sort(ours) == np.sort(single.predict(tree))).all()
            paths = [sorted({0, int(rng.integers(0, tree.size))}) for tree in trees]
            batch.commit(paths)
            for single, path in zip(singles, paths, strict=True):
                single.commit(path)


def test_a_row_whose_memory_is_lost_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a row that moves without its tokens emits something else."""

    def leave(self: SlotPool, index: int) -> None:
        gone = self.caches.pop(index)
        for each in self.caches:
            if each.row == len(self.caches):
                each.move(gone.row)  # without a copy of its tokens

    plain = alone(None, "qwen3_moe", WARM)
    monkeypatch.setattr(SlotPool, "leave", leave)
    together = decode_ar_batch(target_of(), streams(WARM))
    assert [g.tokens for g in together] != [g.tokens for g in plain]
