"""Speculative decoding emits what plain decoding emits, and its records say what happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CONTEXT,
    LAYERS,
    TOP_K,
    VOCAB,
    Letters,
    plain_forward,
    random_tokens,
    rule_for,
    run_ar,
    run_speculative,
    tiny_head,
    tiny_model,
    tiny_predictor,
    tiny_target,
)

import ecospec.harness.drafting as drafting
import ecospec.harness.informing as informing
from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Generation, Speculation, decode_ar
from ecospec.harness.steps import accept, unique_pairs
from ecospec.harness.target import Pass, Target, TargetSession
from ecospec.policies import (
    Confidence,
    DraftTree,
    ExpertNeed,
    GlobalCost,
    MarginalCost,
    Oracle,
    Policy,
    SelectionError,
    SelectionRequest,
)
from ecospec.predictors.contract import BoundPredictor, PredictionRequest, PredictorSession
from ecospec.predictors.oracle import BoundOracle

POLICIES = [Confidence(), GlobalCost(), MarginalCost(), Oracle()]
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=3)
PROMPTS = [random_tokens(np.random.default_rng(i), n, 8) for i, n in enumerate((1, 5, 17))]


@cache
def target_of(vocab: int) -> Target:
    return tiny_target(vocab_size=vocab)


def method_of(
    policy: Policy, vocab: int = 8, *, budget: int = 4, steps: int = 3, topk: int = 2, **more: Any
) -> Speculation:
    predictor = tiny_predictor(target_of(vocab)) if policy.needs is ExpertNeed.PREDICTED else None
    given = {"predictor": predictor, **more}
    return Speculation(policy, tiny_head(target_vocab=vocab), budget, steps, topk, **given)


def assert_same(ours: Generation, plain: Generation) -> None:
    assert len(ours.tokens) == len(plain.tokens)
    assert ours.tokens == plain.tokens
    assert (ours.text, ours.reason) == (plain.text, plain.reason)
    for generation in (ours, plain):
        assert sum(step.emitted for step in generation.steps) == len(generation.tokens) - 1


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("vocab", [8, VOCAB])
def test_every_policy_emits_what_plain_decoding_emits(vocab: int, policy: Policy, sampling: Sampling) -> None:
    target = target_of(vocab)
    accepted = 0
    for prompt in PROMPTS:
        plain = run_ar(target, prompt, sampling)
        ours = run_speculative(target, method_of(policy, vocab), prompt, sampling)
        assert_same(ours, plain)
        assert len(ours.tokens) == 40
        assert all(step.selected <= 4 for step in ours.steps)
        accepted += len(plain.steps) - len(ours.steps)
    assert accepted > (10 if vocab == 8 else -1)  # in a vocabulary of 8 drafts are often right


@pytest.mark.parametrize("budget", [1, 2, 11, 50])
def test_any_budget_emits_the_same(budget: int) -> None:
    target = target_of(8)
    for sampling in (GREEDY, WARM):
        plain = run_ar(target, PROMPTS[1], sampling)
        ours = run_speculative(target, method_of(MarginalCost(), budget=budget), PROMPTS[1], sampling)
        assert_same(ours, plain)
        assert max(step.selected for step in ours.steps) == min(budget, 11)
        if budget == 1:
            assert len(ours.steps) == len(plain.steps)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_other_families_emit_the_same(family: str) -> None:
    target = tiny_target(family, vocab_size=8)
    for sampling in (GREEDY, WARM):
        plain = run_ar(target, PROMPTS[1], sampling)
        assert_same(run_speculative(target, method_of(Oracle()), PROMPTS[1], sampling), plain)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_plain_decoding_is_the_targets_own(sampling: Sampling) -> None:
    """A loop over the library's model that anyone would write, against `decode_ar`."""
    plain, chooser, tokens = tiny_model(), TokenChooser(sampling, "r"), list(PROMPTS[2])
    for position in range(12):
        tokens.append(chooser.choose(plain_forward(plain, tokens).logits[0, -1], position))
    assert run_ar(target_of(VOCAB), PROMPTS[2], sampling, n=12).tokens == tokens[len(PROMPTS[2]) :]


def test_plain_greedy_decoding_is_the_librarys_generate() -> None:
    plain = tiny_model()
    out = plain.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=30, do_sample=False)
    assert run_ar(target_of(VOCAB), PROMPTS[2], n=30).tokens == out[0, len(PROMPTS[2]) :].tolist()


def test_the_temperature_reaches_verification() -> None:
    target, method = target_of(8), method_of(Confidence())
    outputs = [
        tuple(run_speculative(target, method, PROMPTS[1], sampling).tokens)
        for sampling in (GREEDY, WARM, Sampling(temperature=1.0, seed=4), Sampling(temperature=0.2, seed=3))
    ]
    assert len(set(outputs)) == 4


def test_filtered_sampling_emits_the_same() -> None:
    target = target_of(8)
    for sampling in (Sampling(1.0, top_p=0.6, seed=1), Sampling(1.5, top_k=3, seed=2)):
        plain = run_ar(target, PROMPTS[1], sampling)
        assert_same(run_speculative(target, method_of(MarginalCost()), PROMPTS[1], sampling), plain)


# --- few tokens, and the context


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_few_tokens(n: int, policy: Policy) -> None:
    target = target_of(8)
    for sampling in (GREEDY, WARM):
        plain = run_ar(target, PROMPTS[1], sampling, n=n)
        ours = run_speculative(target, method_of(policy), PROMPTS[1], sampling, n=n)
        assert_same(ours, plain)
        assert (len(ours.tokens), ours.reason) == (n, "length")
        if n < 3:
            assert len(ours.steps) == n - 1  # the first token is the prefill's


def highest_position(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the highest position of every pass of a target."""
    seen: list[int] = []
    forward = Target.forward

    def spy(self: Target, cache: Any, ids: Any, positions: Any, mask: Any, **options: Any) -> Pass:
        seen.append(cache.length + len(ids) - 1 if positions is None else int(positions.max()))
        return forward(self, cache, ids, positions, mask, **options)

    monkeypatch.setattr(Target, "forward", spy)
    return seen


@pytest.mark.parametrize("room", [1, 2, 3, 10])
def test_no_position_beyond_the_context_is_ever_processed(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(np.random.default_rng(5), CONTEXT - room, 8)
    target = target_of(8)
    seen = highest_position(monkeypatch)
    for policy in (Confidence(), Oracle()):
        ours = run_speculative(target, method_of(policy, budget=11), prompt, WARM)
        assert max(seen) <= CONTEXT - 2  # the last token is emitted, not processed
        assert_same(ours, run_ar(target, prompt, WARM))
        assert (len(ours.tokens), ours.reason) == (room, "length")


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(UserError, match=r"has 96 tokens; expected fewer"):
        run_ar(target_of(8), [1] * CONTEXT)


# --- drafts that are always right


class AlwaysRight:
    """Stands in for the drafter: drafts the answer that it was given, beside a wrong sibling each."""

    answer: Sequence[int] = ()

    def __init__(self, head: Any, embedding: Any, capacity: int) -> None:
        self.extended: list[int] = []

    def node_states(self, tree: DraftTree) -> Any:
        raise NotImplementedError

    def extend(self, tokens: Sequence[int], features: torch.Tensor) -> None:
        assert len(tokens) == len(features)
        self.extended += tokens

    def draft(self, bonus: int, steps: int, top_k: int) -> DraftTree:
        at = len(self.extended) - self.prompt_length + 1
        assert bonus == self.extended[-1] == self.answer[at - 1]
        tokens, parents, parent = [bonus], [-1], 0
        for token in self.answer[at : at + steps]:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return DraftTree(tokens, parents, [1.0] + [0.1, 0.8] * (len(tokens) // 2))

    prompt_length = 0


def always_right(monkeypatch: pytest.MonkeyPatch, prompt: Sequence[int], answer: Sequence[int]) -> None:
    monkeypatch.setattr(AlwaysRight, "answer", [*answer, 0, 0, 0, 0])
    monkeypatch.setattr(AlwaysRight, "prompt_length", len(prompt))
    monkeypatch.setattr(drafting, "DrafterSession", AlwaysRight)


@pytest.mark.parametrize("kind", ["eos", "stop", "length"])
def test_an_end_inside_an_accepted_block_cuts_where_plain_decoding_ends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = target_of(VOCAB), PROMPTS[2]
    answer = run_ar(target, prompt, WARM, n=22).tokens
    always_right(monkeypatch, prompt, answer)
    method = method_of(Confidence(), VOCAB, budget=9, steps=4)
    phases = set()
    for at in range(1, len(answer)):
        options: dict[str, Any]
        if kind == "eos":
            options = {"eos": (answer[at],)}
        elif kind == "stop":
            options = {"stop": (Letters().decode(answer[at - 1 : at + 1]), "never")}
        else:
            options = {"n": at + 1}
        plain = run_ar(target, prompt, WARM, **options)
        ours = run_speculative(target, method, prompt, WARM, **options)
        assert_same(ours, plain)
        assert plain.reason == kind
        if len(plain.tokens) == at + 1:  # not ended by an earlier occurrence
            phases.add((at - 1) % 5)
            assert len(ours.steps) == -(-at // 5)
            kept = {"eos": at, "stop": at - 1, "length": at + 1}[kind]
            assert ours.text == Letters().decode(answer[:kept])
    assert phases == {0, 1, 2, 3, 4}  # the end fell on every place of a block of five


def test_a_block_that_is_all_right_emits_one_more_than_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = target_of(VOCAB), PROMPTS[1]
    answer = run_ar(target, prompt, WARM, n=41).tokens
    always_right(monkeypatch, prompt, answer)
    ours = run_speculative(target, method_of(Confidence(), VOCAB, budget=9, steps=4), prompt, WARM, n=41)
    assert [step.emitted for step in ours.steps] == [5] * 8


def test_a_tree_that_holds_every_continuation_is_accepted_whole() -> None:
    """Two steps over the whole vocabulary of 8: whatever the target says is in the tree, so α = 3."""
    target = target_of(8)
    for sampling in (GREEDY, WARM):
        method = method_of(Confidence(), budget=1 + 8 + 64, steps=2, topk=8)
        assert method.tree_size == 73
        ours = run_speculative(target, method, PROMPTS[1], sampling, n=31)
        assert [step.emitted for step in ours.steps] == [3] * 10
        assert_same(ours, run_ar(target, PROMPTS[1], sampling, n=31))


# --- what is kept, and what is written down


class Spy(BoundPredictor):
    """A predictor that notes which tokens were committed to it."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def start(self, request: PredictionRequest) -> PredictorSession:
        bound = self

        class Session(PredictorSession):
            def predict(self, tree: DraftTree) -> Any:
                self.tree = tree
                return np.zeros((LAYERS, tree.size, TOP_K), dtype=np.int64) + np.arange(TOP_K)

            def commit(self, nodes: Sequence[int]) -> None:
                assert list(nodes) == sorted(set(nodes))
                bound.committed += [int(self.tree.tokens[node]) for node in nodes]

        return Session()


@pytest.mark.parametrize("n", [2, 7, 40])
def test_after_a_run_every_memory_holds_the_emitted_tokens_but_the_last(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_memories_hold_what_was_emitted(target_of(8), 8, 4, monkeypatch, n=n)


@pytest.mark.parametrize("at", [10, 11, 12, 13, 14])
def test_what_an_end_cut_off_a_block_is_in_no_memory(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = target_of(VOCAB), PROMPTS[1]
    answer = run_ar(target, prompt, WARM, n=30).tokens
    assert answer.index(answer[at]) == at
    always_right(monkeypatch, prompt, answer)
    ours = assert_memories_hold_what_was_emitted(target, VOCAB, 5, monkeypatch, eos=(answer[at],))
    assert ours.tokens == answer[: at + 1]


def assert_memories_hold_what_was_emitted(
    target: Target, vocab: int, budget: int, monkeypatch: pytest.MonkeyPatch, **rule: Any
) -> Generation:
    """Run once, with a predictor that notes what is committed, and compare the target's memory with a fresh one."""
    prompt, spy = PROMPTS[1], Spy()
    opened: list[TargetSession] = []
    new_session = Target.new_session
    monkeypatch.setattr(Target, "new_session", lambda *args: opened.append(new_session(*args)) or opened[-1])
    method = method_of(MarginalCost(), vocab, budget=budget, steps=4, predictor=spy)
    ours = run_speculative(target, method, prompt, WARM, **rule)
    assert spy.committed == ours.tokens[:-1]
    fresh = new_session(target, CONTEXT)
    fresh.prefill([*prompt, *ours.tokens[:-1]])
    assert opened[0].length == fresh.length
    for layer in range(LAYERS):
        for kept, expected in zip(opened[0].cache.kept(layer), fresh.cache.kept(layer), strict=True):
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)
    return ours


def brute_force_pairs(routing: torch.Tensor) -> int:
    return len({(layer, int(e)) for layer in range(routing.shape[0]) for e in routing[layer].flatten()})


def test_a_step_counts_each_expert_of_its_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(8)
    passes: list[Pass] = []
    for name in ("verify", "decode"):
        original = getattr(TargetSession, name)
        monkeypatch.setattr(TargetSession, name, lambda *args, f=original: passes.append(f(*args)) or passes[-1])
    ours = run_speculative(target, method_of(Confidence(), budget=6), PROMPTS[1], WARM)
    assert [step.expert_pairs for step in ours.steps] == [brute_force_pairs(p.routing) for p in passes]
    assert [step.selected for step in ours.steps] == [p.routing.shape[1] for p in passes]
    assert len({step.expert_pairs for step in ours.steps}) > 1
    passes.clear()
    plain = run_ar(target, PROMPTS[1], WARM)
    assert {step.expert_pairs for step in plain.steps} == {LAYERS * TOP_K}  # AR has E = K
    assert len(passes) == len(plain.steps) == 39


def test_unique_pairs_by_hand() -> None:
    routing = torch.tensor([[[0, 1], [1, 2]], [[3, 0], [3, 0]]])
    assert unique_pairs(routing, experts=4) == 3 + 2


def test_the_overlap_is_the_share_of_true_experts_that_were_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_of(8)
    passes: list[Pass] = []
    verify = TargetSession.verify
    monkeypatch.setattr(TargetSession, "verify", lambda *args: passes.append(verify(*args)) or passes[-1])
    ours = run_speculative(target, method_of(MarginalCost(), predictor=Spy()), PROMPTS[1], WARM)
    for step, done in zip(ours.steps, passes, strict=True):
        expected = (done.routing < TOP_K).float().mean()  # the spy predicts experts 0 and 1
        assert step.predicted_overlap == pytest.approx(float(expected))
    assert any(step.predicted_overlap for step in ours.steps)
    monkeypatch.undo()
    confident = run_speculative(target, method_of(Confidence()), PROMPTS[1], WARM)
    assert {step.predicted_overlap for step in confident.steps} == {None}


def test_the_oracle_knows_the_routing_that_verification_then_finds() -> None:
    target = target_of(8)
    policy = run_speculative(target, method_of(Oracle()), PROMPTS[1], WARM)
    assert {step.predicted_overlap for step in policy.steps} == {1.0}
    method = method_of(MarginalCost(), predictor=BoundOracle(), predictor_is_oracle=True)
    predictor = run_speculative(target, method, PROMPTS[1], WARM)
    for ours, theirs in zip(predictor.steps, policy.steps, strict=True):
        assert (ours.emitted, ours.selected, ours.expert_pairs) == (
            theirs.emitted,
            theirs.selected,
            theirs.expert_pairs,
        )


def test_only_what_looks_ahead_is_said_to_see_the_true_routing() -> None:
    assert method_of(Oracle()).sees_ahead
    assert method_of(MarginalCost(), predictor_is_oracle=True).sees_ahead
    assert not method_of(MarginalCost()).sees_ahead
    assert not method_of(Confidence(), predictor_is_oracle=True).sees_ahead


@pytest.mark.parametrize("as_predictor", [False, True])
def test_the_oracles_extra_pass_is_in_no_timing(as_predictor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, asked = 0.05, []
    original = informing.true_routing

    def slow(*args: Any) -> Any:
        asked.append(1)
        time.sleep(pause)
        return original(*args)

    monkeypatch.setattr(informing, "true_routing", slow)
    method = method_of(Oracle())
    if as_predictor:
        method = method_of(MarginalCost(), predictor=BoundOracle(), predictor_is_oracle=True)
    began = time.perf_counter()
    ours = run_speculative(target_of(8), method, PROMPTS[1], WARM, n=12)
    wall = time.perf_counter() - began
    assert len(asked) == len(ours.steps)
    counted = ours.prefill_seconds + ours.decode_seconds
    assert counted <= wall - pause * len(asked)
    assert sum(sum(step.seconds.values()) for step in ours.steps) <= ours.decode_seconds


def test_a_learned_predictors_time_is_counted() -> None:
    ours = run_speculative(target_of(8), method_of(MarginalCost()), PROMPTS[1], WARM)
    assert all(step.seconds["predict"] > 0 for step in ours.steps)
    assert all(
        set(step.seconds) == {"draft", "predict", "estimate", "select", "verify", "commit"} for step in ours.steps
    )


def test_forced_tokens_come_first() -> None:
    plain = run_ar(target_of(8), PROMPTS[1], GREEDY, n=9).tokens
    forced = [(plain[0] + 1) % 8, plain[1]]
    rule = rule_for(PROMPTS[1], 9)
    ours = decode_ar(target_of(8), PROMPTS[1], TokenChooser(GREEDY, "r"), rule, forced=forced)
    assert ours.tokens[:2] == forced
    assert ours.tokens[2:] == run_ar(target_of(8), [*PROMPTS[1], *forced], GREEDY, n=7).tokens


# --- what breaks the contract


def test_a_policy_that_needs_predictions_without_a_predictor_is_refused() -> None:
    method = method_of(MarginalCost(), predictor=None)
    with pytest.raises(UserError, match="'marginal-cost' needs predicted expert sets, but no predictor is loaded"):
        run_speculative(target_of(8), method, PROMPTS[1])


def test_a_selection_that_breaks_the_contract_stops_the_run() -> None:
    class Rootless(Policy):
        name = "rootless"

        def select(self, request: SelectionRequest) -> list[int]:
            return [1]

    with pytest.raises(SelectionError, match="rootless"):
        run_speculative(target_of(8), method_of(Rootless()), PROMPTS[1])


# --- accepting, by hand


def accepted(nodes: list[int], choices: list[int]) -> tuple[list[int], int]:
    """`accept` on the tree 0 → (1: token 5, 2: token 6), 1 → (3: token 7), 3 → (4: token 8)."""
    tree = DraftTree([4, 5, 6, 7, 8], [-1, 0, 0, 1, 3], np.ones(5))
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 10).float()
    return accept(tree, np.array(nodes), logits, TokenChooser(GREEDY, "r"), 3)


def test_acceptance_follows_the_targets_choices() -> None:
    assert accepted([0, 1, 2, 3, 4], [5, 7, 0, 8, 9]) == ([0, 1, 3, 4], 9)
    assert accepted([0, 1, 2, 3, 4], [6, 7, 1, 8, 9]) == ([0, 2], 1)
    assert accepted([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]) == ([0, 1], 6)  # 6 is drafted, but not there
    assert accepted([0, 1, 2, 3, 4], [9, 7, 7, 8, 9]) == ([0], 9)
    assert accepted([0], [5]) == ([0], 5)


def test_what_was_not_selected_cannot_be_accepted() -> None:
    assert accepted([0, 2], [5, 1]) == ([0], 5)
    assert accepted([0, 1, 3], [5, 7, 8]) == ([0, 1, 2], 8)  # rows, not nodes


def test_each_row_is_drawn_at_its_own_position() -> None:
    """Row r of a chain is output position 3 + r; its draw is the one plain decoding makes there."""
    torch.manual_seed(0)
    logits = torch.randn(4, 10)
    plain = [TokenChooser(WARM, "r").choose(logits[row], 3 + row) for row in range(4)]
    tree = DraftTree.chain([0, *plain[:3]], np.ones(4))
    assert accept(tree, np.arange(4), logits, TokenChooser(WARM, "r"), 3) == ([0, 1, 2, 3], plain[3])
