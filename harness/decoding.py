"""The decoding loops: plain autoregressive, and speculative in one straight line.

draft → predict experts → select → verify → accept → commit

Both decode a batch of requests, often of one. A request leaves the batch when its output is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ecospec.harness.choosing import TokenChooser
from ecospec.harness.drafters.asking import AskedDrafts, note_positions
from ecospec.harness.drafters.contract import BoundDrafter
from ecospec.harness.drafters.heads import BoundEagle3
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.informing import acceptance_of, expert_sets_of, start_predictor
from ecospec.harness.steps import accept, active_pairs, check_numbers, depths_of, overlap_of, select_rows
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target, TargetSession
from ecospec.harness.target_batch import TargetBatch
from ecospec.harness.timing import stopwatch_for, wait_for
from ecospec.policies import AcceptanceNeed, CostModel, DraftTree, ExpertNeed, ExpertSets, Policy
from ecospec.predictors.acceptance.asking import AskedEstimator
from ecospec.predictors.asking import AskedBatch
from ecospec.predictors.contract import BoundPredictor


@dataclass(frozen=True)
class StepRecord:
    """One verification (or AR) step, as one request of the batch saw it.

    Attributes:
        emitted: tokens that the request emitted: accepted draft tokens + 1, less what a stop cut off.
        selected: tokens of it that were verified, root included.
        expert_pairs: unique (layer, expert) pairs that the pass read for the whole batch.
        seconds: time per phase, of the whole batch.
        predicted_overlap: mean share of the true experts of the selected nodes that were predicted, or None.
        rows: requests in the batch.
        reached, accepted: depths in the draft tree; see `depths_of`.
    """

    emitted: int
    selected: int
    expert_pairs: int
    seconds: dict[str, float]
    predicted_overlap: float | None = None
    rows: int = 1
    reached: int = 0
    accepted: int = 0


Observer: TypeAlias = Callable[[DraftTree, ExpertSets | None, npt.NDArray[np.int64], TargetSession], None]
"""Shown one request's step before it is verified: tree, expert sets, selected nodes; its time counts nowhere. It may
run the target over the tree, and must leave the session as it was."""


@dataclass(frozen=True)
class Stream:
    """One request to decode.

    Attributes:
        prompt: token ids.
        chooser, rule: fresh ones of this request; the rule takes its tokens.
        forced: tokens that come first, whatever the target would choose; plain decoding only.
    """

    prompt: Sequence[int]
    chooser: TokenChooser
    rule: StopRule
    forced: Sequence[int] = ()

    def choose(self, logits: Tensor) -> int:
        """The next token, given logits [V]."""
        at = len(self.rule.tokens)
        return self.forced[at] if at < len(self.forced) else self.chooser.choose(logits, at)


@dataclass
class Generation:
    """One request's output and what it cost.

    ``prefill_seconds`` is up to the first emitted token, ``decode_seconds`` from there. What was done for a batch
    at once counts in equal shares for the requests that were in it, so that shares add up to the time it took.
    ``activations`` [MoE layers, E] has the steps in which each expert was active, a batch's again in equal shares; None
    without a step.
    """

    tokens: list[int]
    text: str
    reason: str
    prefill_seconds: float
    decode_seconds: float
    steps: list[StepRecord] = field(default_factory=list)
    activations: npt.NDArray[np.float64] | None = field(default=None, compare=False)

    def count(self, active: npt.NDArray[np.bool_], rows: int) -> None:
        """Take in the active experts [MoE layers, E] of a step of so many requests."""
        share = active / rows
        self.activations = share if self.activations is None else self.activations + share


@dataclass(frozen=True)
class Speculation:
    """A speculative method: what drafts, what selects, and how large the tree is.

    Attributes:
        drafter: bound to the target; a bare EAGLE-3 head is bound when it is used. ``drafter_name`` is for messages.
        budget: γ, tokens verified a step, root included.
        predictor: needed by a policy that asks for predicted expert sets; ``predictor_name`` is for messages.
        estimator: asked where the policy wants estimates of acceptance; None for the draft's own probabilities.
        cost_model: needed by a policy that asks for one.
    """

    policy: Policy
    drafter: BoundDrafter | Eagle3Head
    budget: int
    draft_steps: int
    draft_topk: int
    predictor: BoundPredictor | None = None
    predictor_is_oracle: bool = False
    predictor_name: str = "unnamed"
    drafter_name: str = "eagle3"
    estimator: AskedEstimator | None = None
    cost_model: CostModel | None = None

    @property
    def tree_size(self) -> int:
        """Nodes of a full draft tree."""
        return 1 + self.draft_topk + max(0, self.draft_steps - 1) * self.draft_topk**2

    @property
    def sees_ahead(self) -> bool:
        """Whether its selections use what only an extra pass can know; then it has no honest speed-up."""
        return (
            self.policy.needs is ExpertNeed.ORACLE
            or self.policy.acceptance is AcceptanceNeed.TRUE
            or (self.policy.needs is ExpertNeed.PREDICTED and self.predictor_is_oracle)
        )


def decode_ar(
    target: Target,
    prompt: Sequence[int],
    chooser: TokenChooser,
    rule: StopRule,
    *,
    forced: Sequence[int] = (),
) -> Generation:
    """Plain decoding of one request: one token, one pass. ``forced`` is as in `Stream`."""
    return decode_ar_batch(target, [Stream(prompt, chooser, rule, forced)])[0]


def decode_ar_batch(target: Target, streams: Sequence[Stream]) -> list[Generation]:
    """Plain decoding: one token of every request, one pass."""
    watch = stopwatch_for(target.device)
    began = time.perf_counter()
    session = TargetBatch(target, [len(stream.prompt) + stream.rule.limit for stream in streams])
    for each, stream in zip(session.sessions, streams, strict=True):
        prefill = each.prefill(stream.prompt)
        check_numbers(prefill.logits)
        stream.rule.take([stream.choose(prefill.logits[-1])])
    generations = _begun(streams, time.perf_counter() - began)
    going = list(range(len(streams)))
    _leave(going, streams, session)
    while going:
        began = time.perf_counter()
        watch.start()
        step = session.decode([streams[i].rule.tokens[-1] for i in going])
        watch.mark("verify")
        greedy = streams[0].chooser.choose_greedy(step.whole.logits)
        for row, i in enumerate(going):
            stream = streams[i]
            forced = len(stream.rule.tokens) < len(stream.forced)
            token = stream.choose(step.whole.logits[row]) if greedy is None or forced else greedy[row]
            stream.rule.take([token])
        watch.mark("commit")
        seconds = watch.finish()
        wall = time.perf_counter() - began
        active = active_pairs(step.whole.routing, target.geometry.experts)
        pairs = int(active.sum())
        for i in going:
            generations[i].decode_seconds += wall / len(going)
            generations[i].steps.append(StepRecord(1, 1, pairs, seconds, rows=len(going)))
            generations[i].count(active, len(going))
        _leave(going, streams, session)
    return _ended(generations, streams)


def decode_speculative(
    target: Target, method: Speculation, prompt: Sequence[int], chooser: TokenChooser, rule: StopRule
) -> Generation:
    """Speculative decoding of one request by one method; emits what `decode_ar` emits.

    Raises:
        SelectionError: the policy raised or broke its contract.
        PredictorError: the predictor did.
        DrafterError: the drafter did.
    """
    return decode_speculative_batch(target, method, [Stream(prompt, chooser, rule)])[0]


def decode_speculative_batch(
    target: Target, method: Speculation, streams: Sequence[Stream], observe: Observer | None = None
) -> list[Generation]:
    """Speculative decoding by one method; emits for every request what `decode_ar` emits for it.

    Raises:
        SelectionError: the policy raised or broke its contract.
        PredictorError: the predictor did.
        DrafterError: the drafter did.
    """
    bound = method.drafter
    if isinstance(bound, Eagle3Head):
        bound = BoundEagle3(bound, target.embedding)
    for stream in streams:
        note_positions(method.drafter_name, bound, len(stream.prompt) + stream.rule.limit, stream.chooser.request)
    watch = stopwatch_for(target.device)
    began = time.perf_counter()
    capacities = [len(stream.prompt) + stream.rule.limit + method.tree_size for stream in streams]
    session = TargetBatch(target, capacities)
    features = []
    for each, stream in zip(session.sessions, streams, strict=True):
        prefill = each.prefill(stream.prompt)
        check_numbers(prefill.logits)
        stream.rule.take([stream.choose(prefill.logits[-1])])
        features.append(prefill.features)
    vocab = target.geometry.vocab_size
    drafter = AskedDrafts(method.drafter_name, bound, capacities, vocab=vocab, nodes=method.tree_size)
    predictor = start_predictor(method, streams, capacities, session, drafter)
    for i, stream in enumerate(streams):
        if stream.rule.remaining > 0:
            drafter.start(i, [*stream.prompt, stream.rule.tokens[-1]], features[i])
    wait_for(target.device)
    generations = _begun(streams, time.perf_counter() - began)
    going = list(range(len(streams)))
    _leave(going, streams, session, drafter, predictor)
    while going:
        began = time.perf_counter()
        watch.start()
        rules = [streams[i].rule for i in going]
        # A path of depth d emits d + 1 tokens; deeper nodes could only be thrown away.
        depths = [min(method.draft_steps, rule.remaining - 1) for rule in rules]
        trees = drafter.draft([rule.tokens[-1] for rule in rules], depths, method.draft_topk)
        watch.mark("draft")
        experts = expert_sets_of(method, trees, session, predictor, watch)
        if method.policy.needs is not ExpertNeed.NONE:
            watch.mark("predict")
        acceptance = acceptance_of(method, trees, session, drafter, [streams[i] for i in going], watch)
        selected = select_rows(
            method.policy, trees, experts, method.budget, cost_model=method.cost_model, acceptance=acceptance
        )
        watch.mark("select")
        if observe is not None:
            with watch.excluded():
                for row, (tree, nodes) in enumerate(zip(trees, selected, strict=True)):
                    observe(tree, None if experts is None else experts[row], nodes, session.sessions[row])
        step = session.verify(trees, selected)
        watch.mark("verify")
        parts, kept, blocks, paths = step.parts(), [], [], []
        greedy = streams[0].chooser.choose_greedy(step.whole.logits)
        ends = np.cumsum(step.counts)
        for row, (i, tree, nodes, end) in enumerate(zip(going, trees, selected, ends, strict=True)):
            known = None if greedy is None else greedy[end - len(nodes) : end]
            rule = streams[i].rule
            rows, token = accept(tree, nodes, parts[row].logits, streams[i].chooser, len(rule.tokens), known)
            block = [*(int(tree.tokens[nodes[r]]) for r in rows[1:]), token]
            taken = rule.take(block)
            kept.append(rows[:taken])
            paths.append((rows, taken))
            blocks.append(block[:taken])
        session.commit(kept)
        if predictor is not None:
            predictor.commit([[int(nodes[r]) for r in rows] for nodes, rows in zip(selected, kept, strict=True)])
        watch.mark("commit")
        before = list(going)
        _leave(going, streams, session, drafter, predictor)
        staying = [row for row, i in enumerate(before) if i in going]
        if staying:
            drafter.extend([blocks[r] for r in staying], [parts[r].features[kept[r]] for r in staying])
        watch.mark("draft")
        seconds = dict(watch.finish())
        wall = time.perf_counter() - began - watch.excluded_seconds
        active = active_pairs(step.whole.routing, target.geometry.experts)
        pairs = int(active.sum())
        for row, i in enumerate(before):
            sets = None if experts is None else experts[row]
            overlap = overlap_of(sets, selected[row], parts[row].routing, target.geometry.experts)
            generations[i].decode_seconds += wall / len(before)
            reached, accepted = depths_of(trees[row], selected[row], *paths[row])
            generations[i].steps.append(
                StepRecord(
                    emitted=len(blocks[row]),
                    selected=len(selected[row]),
                    expert_pairs=pairs,
                    seconds=seconds,
                    predicted_overlap=overlap,
                    rows=len(before),
                    reached=reached,
                    accepted=accepted,
                )
            )
            generations[i].count(active, len(before))
    return _ended(generations, streams)


def _begun(streams: Sequence[Stream], seconds: float) -> list[Generation]:
    return [Generation(stream.rule.tokens, "", "", seconds / len(streams), 0.0) for stream in streams]


def _ended(generations: list[Generation], streams: Sequence[Stream]) -> list[Generation]:
    for generation, stream in zip(generations, streams, strict=True):
        generation.text, generation.reason = stream.rule.text(), stream.rule.reason or ""
    return generations


def _leave(
    going: list[int],
    streams: Sequence[Stream],
    *memories: TargetBatch | AskedDrafts | AskedBatch | None,
) -> None:
    """Take the requests whose output is complete out of the batch, and out of all that remembers them."""
    for row in reversed(range(len(going))):
        if streams[going[row]].rule.remaining == 0:
            del going[row]
            for memory in memories:
                if memory is not None:
                    memory.leave(row)
