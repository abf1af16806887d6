"""The decoding loops: plain autoregressive, and speculative in one straight line.

draft → predict experts → select → verify → accept → commit
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.choosing import TokenChooser
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Pass, Target, TargetSession
from ecospec.harness.timing import Stopwatch, stopwatch_for, wait_for
from ecospec.policies import DraftTree, ExpertNeed, ExpertSets, Policy, SelectionRequest, run_policy
from ecospec.policies.experts import count_pairs
from ecospec.predictors.contract import BoundPredictor, PredictorSession, Routing


@dataclass(frozen=True)
class StepRecord:
    """One verification (or AR) step.

    Attributes:
        emitted: tokens emitted: accepted draft tokens + 1, less what a stop cut off.
        selected: tokens verified, root included.
        expert_pairs: unique (layer, expert) pairs the pass read.
        seconds: time per phase.
        predicted_overlap: mean share of the true experts of the selected nodes that were predicted, or None.
    """

    emitted: int
    selected: int
    expert_pairs: int
    seconds: dict[str, float]
    predicted_overlap: float | None = None


@dataclass
class Generation:
    """One request's output and what it cost. ``prefill_seconds`` is up to the first emitted token."""

    tokens: list[int]
    text: str
    reason: str
    prefill_seconds: float
    decode_seconds: float
    steps: list[StepRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Speculation:
    """A speculative method: what drafts, what selects, and how large the tree is.

    Attributes:
        budget: γ, tokens verified a step, root included.
        predictor: needed by a policy that asks for predicted expert sets.
    """

    policy: Policy
    head: Eagle3Head
    budget: int
    draft_steps: int
    draft_topk: int
    predictor: BoundPredictor | None = None
    predictor_is_oracle: bool = False

    @property
    def tree_size(self) -> int:
        """Nodes of a full draft tree."""
        return 1 + self.draft_topk + max(0, self.draft_steps - 1) * self.draft_topk**2

    @property
    def sees_true_routing(self) -> bool:
        """Whether its selections use what only an extra pass can know; then it has no honest speed-up."""
        return self.policy.needs is ExpertNeed.ORACLE or (
            self.policy.needs is ExpertNeed.PREDICTED and self.predictor_is_oracle
        )


def unique_pairs(routing: Tensor, experts: int) -> int:
    """Unique (layer, expert) pairs of a routing [L, n, K]."""
    sets = ExpertSets.from_topk(routing.cpu().numpy(), experts)
    return int(count_pairs(sets.union()))


def accept(
    tree: DraftTree, nodes: npt.NDArray[np.int64], logits: Tensor, chooser: TokenChooser, position: int
) -> tuple[list[int], int]:
    """Walk the selected part of the tree along the target's own choices.

    Args:
        nodes: selected nodes, ascending, root first; row i of ``logits`` [n, V] belongs to ``nodes[i]``.
        position: output position that follows the root.

    Returns:
        The accepted rows (root first), and the target's choice after the last of them: the next bonus token.
    """
    row_of = {int(node): row for row, node in enumerate(nodes)}
    greedy = chooser.choose_greedy(logits)
    node, rows = 0, [0]
    while True:
        row = rows[-1]
        token = greedy[row] if greedy is not None else chooser.choose(logits[row], position + len(rows) - 1)
        for child in tree.children[node]:
            if child in row_of and int(tree.tokens[child]) == token:
                node = child
                rows.append(row_of[child])
                break
        else:
            return rows, token


def decode_ar(
    target: Target,
    prompt: Sequence[int],
    chooser: TokenChooser,
    rule: StopRule,
    *,
    forced: Sequence[int] = (),
) -> Generation:
    """Plain decoding: one token, one pass. ``forced`` tokens come first, whatever the target would choose."""
    watch = stopwatch_for(target.device)
    began = time.perf_counter()
    session = target.new_session(len(prompt) + rule.limit)
    logits = session.prefill(prompt).logits[-1]
    token = forced[0] if forced else chooser.choose(logits, 0)
    rule.take([token])
    prefill_seconds = time.perf_counter() - began
    began = time.perf_counter()
    steps = []
    uncounted = 0.0
    while rule.remaining > 0:
        watch.start()
        step = session.decode(token)
        watch.mark("verify")
        at = len(rule.tokens)
        token = forced[at] if at < len(forced) else chooser.choose(step.logits[0], at)
        rule.take([token])
        watch.mark("commit")
        seconds = watch.finish()
        noting = time.perf_counter()
        steps.append(StepRecord(1, 1, unique_pairs(step.routing, target.geometry.experts), seconds))
        uncounted += time.perf_counter() - noting
    decode_seconds = time.perf_counter() - began - uncounted
    return Generation(rule.tokens, rule.text(), rule.reason or "", prefill_seconds, decode_seconds, steps)


def decode_speculative(
    target: Target, method: Speculation, prompt: Sequence[int], chooser: TokenChooser, rule: StopRule
) -> Generation:
    """Speculative decoding by one method; emits what `decode_ar` emits.

    Raises:
        SelectionError: the policy raised or broke its contract.
    """
    watch = stopwatch_for(target.device)
    began = time.perf_counter()
    capacity = len(prompt) + rule.limit + method.tree_size
    session = target.new_session(capacity)
    prefill = session.prefill(prompt)
    bonus = chooser.choose(prefill.logits[-1], 0)
    rule.take([bonus])
    drafter = DrafterSession(method.head, target.embedding, capacity)
    predictor = _start_predictor(method, prompt, capacity, session)
    if rule.remaining > 0:
        drafter.extend([*prompt[1:], bonus], prefill.features)
    wait_for(target.device)
    prefill_seconds = time.perf_counter() - began
    began = time.perf_counter()
    steps = []
    uncounted = 0.0
    while rule.remaining > 0:
        watch.start()
        # A path of depth d emits d + 1 tokens; deeper nodes could only be thrown away.
        tree = drafter.draft(bonus, min(method.draft_steps, rule.remaining - 1), method.draft_topk)
        watch.mark("draft")
        experts = _expert_sets(method, tree, session, predictor, watch)
        if method.policy.needs is not ExpertNeed.NONE:
            watch.mark("predict")
        nodes = run_policy(method.policy, SelectionRequest(tree=tree, budget=method.budget, experts=experts))
        watch.mark("select")
        step = session.verify(tree, nodes)
        watch.mark("verify")
        rows, token = accept(tree, nodes, step.logits, chooser, len(rule.tokens))
        block = [*(int(tree.tokens[nodes[row]]) for row in rows[1:]), token]
        taken = rule.take(block)
        rows, block = rows[:taken], block[:taken]
        session.commit(rows)
        if predictor is not None:
            predictor.commit([int(nodes[row]) for row in rows])
        watch.mark("commit")
        if rule.remaining > 0:
            drafter.extend(block, step.features[rows])
        watch.mark("draft")
        bonus = token
        seconds = dict(watch.finish())
        noting = time.perf_counter()
        steps.append(
            StepRecord(
                emitted=taken,
                selected=len(nodes),
                expert_pairs=unique_pairs(step.routing, target.geometry.experts),
                seconds=seconds,
                predicted_overlap=_overlap(experts, nodes, step, target.geometry.experts),
            )
        )
        uncounted += time.perf_counter() - noting + watch.excluded_seconds
    decode_seconds = time.perf_counter() - began - uncounted
    return Generation(rule.tokens, rule.text(), rule.reason or "", prefill_seconds, decode_seconds, steps)


def true_routing(session: TargetSession, tree: DraftTree) -> Routing:
    """The target's routing of a whole tree [L, N, K], by an extra pass of which nothing is kept."""
    routing = session.verify(tree, np.arange(tree.size)).routing
    result: Routing = routing.cpu().numpy()
    return result


def _start_predictor(
    method: Speculation, prompt: Sequence[int], capacity: int, session: TargetSession
) -> PredictorSession | None:
    if method.policy.needs is not ExpertNeed.PREDICTED:
        return None
    if method.predictor is None:
        raise UserError(f"policy {method.policy.name!r} needs predicted expert sets, but no predictor is loaded")
    return method.predictor.start(prompt, capacity, lambda tree: true_routing(session, tree))


def _expert_sets(
    method: Speculation,
    tree: DraftTree,
    session: TargetSession,
    predictor: PredictorSession | None,
    watch: Stopwatch,
) -> ExpertSets | None:
    """The expert sets the policy asks for; true routing is obtained outside every timing."""
    experts = session.target.geometry.experts
    if method.policy.needs is ExpertNeed.NONE:
        return None
    if method.policy.needs is ExpertNeed.ORACLE:
        with watch.excluded():
            return ExpertSets.from_topk(true_routing(session, tree), experts)
    assert predictor is not None
    if method.predictor_is_oracle:
        with watch.excluded():
            return ExpertSets.from_topk(predictor.predict(tree), experts)
    return ExpertSets.from_topk(predictor.predict(tree), experts)


def _overlap(predicted: ExpertSets | None, nodes: npt.NDArray[np.int64], step: Pass, experts: int) -> float | None:
    """Mean share of the selected nodes' true experts that were predicted."""
    if predicted is None:
        return None
    true = ExpertSets.from_topk(step.routing.cpu().numpy(), experts)
    hits = np.bitwise_count(predicted.bits[nodes] & true.bits).sum()
    return float(hits / np.bitwise_count(true.bits).sum())
