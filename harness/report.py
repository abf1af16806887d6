"""What a run's records amount to: one row per method, every number with its convention beside it.

Sums run over the prompts that *all* methods finished, so that no method is measured on easier ones.
"Pooled" divides a sum over all steps by their number; "mean over prompts" averages the prompts' own values.
A number that cannot be had (no step was taken, or the method must not have it) is None, never NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from ecospec.harness.records import AR, PHASES, VERDICTS, PromptRecord
from ecospec.harness.speedups import (
    Spread,
    decode_seconds,
    decode_tokens,
    speedup_of,
    spread_of,
    verify_seconds,
    whole_seconds,
    whole_tokens,
)
from ecospec.harness.stats import Ratio

YARDSTICKS = ("optimal", "clairvoyant")
"""Policies that nothing can do better than, in a sense of their own; the others are measured by them."""

LEAST_HEADROOM = 1.02
"""A yardstick that is not so far above the baseline leaves nothing to share out: a quotient of two noises."""

SCHEMA = 1
"""Version of what `report_json` gives; it changes when a key changes its name or meaning."""


@dataclass(frozen=True)
class MethodInfo:
    """A column of the report.

    Attributes:
        true_routing: it looks at what only an extra pass can know, true routing or true acceptance. It gets
            verification metrics alone: no speed-up, no tokens/s, no T_predict.
    """

    label: str
    true_routing: bool = False


@dataclass(frozen=True)
class Lossless:
    """The lossless check over *all* prompts of a method, also those that another method did not finish.

    Attributes:
        verdict: the worst of the prompts' verdicts; unchecked ones count only if there are no others.
        violated: prompts whose verdict is violated.
        ties: differences from AR that numeric noise explains.
        largest_gap: the largest gap, in logits, of a prompt whose verdict is ties.
    """

    verdict: str
    checked: int
    prompts: int
    violated: int
    ties: int
    largest_gap: float


@dataclass(frozen=True)
class MethodRow:
    """One method's numbers.

    Attributes:
        speedup: (Σ AR seconds / Σ AR tokens) / (Σ method seconds / Σ method tokens), prefill and the first
            token included.
        decode_speedup: the same over decode seconds and the tokens after the first.
        over_baseline: decode-only, with the baseline policy in AR's place; for the methods listed after it.
        decode_spread: decode-only speed-up per prompt.
        tokens_per_second: Σ tokens / Σ (prefill + decode seconds).
        decode_tokens_per_second: Σ tokens after the first / Σ decode seconds.
        acceptance_length: α = Σ emitted / Σ steps, tokens per step and prompt; AR's is 1.
        active_experts: E = Σ expert pairs / Σ steps / MoE layers; AR's is K, but for batches. None of a dense target.
        verified_tokens: Σ selected / Σ steps, root included; per prompt.
        rows_per_step: prompts in a step, on average; 1 without batches. In all but α and verified tokens, a step
            of a batch counts once.
        phase_ms: T of each phase, milliseconds per step: Σ phase seconds / Σ steps · 1000; None for a phase
            that the method does not have.
        outside_target: 1 − Σ verify seconds / Σ seconds of all phases.
        rho: ρ = T_AR / T_verify, the mean forward pass of AR against that of verification.
        verification_speedup: α · ρ, what the method would gain if all but the target's passes took no time. A
            yardstick has it too.
        headroom: by yardstick, how much of the way from the baseline's α · ρ to the yardstick's the method has come;
            for the methods listed after the baseline. None where the yardstick is not above the baseline.
        expert_bytes_per_step: Σ expert pairs / Σ steps · bytes of one expert.
        bytes_per_step: the same and the bytes that a step always reads.
        achieved_gb_per_second: bytes per step / T_verify, in 10⁹ bytes per second.
        bandwidth_share: that over the device's measured copy bandwidth.
        predicted_overlap: share of the verified nodes' true experts that were predicted, mean over steps.
        reached_by_depth: Σ steps in which a draft token of depth 1, 2, … was verified behind an accepted path; empty
            for AR. See `PromptRecord`.
        accepted_by_depth: of them, those in which it was accepted.
        score: mean score of the texts by the suite's metric; None where there is none.
        score_differs: prompts whose score is not that of AR's text.
    """

    label: str
    true_routing: bool
    steps: int
    speedup: Ratio | None
    decode_speedup: Ratio | None
    over_baseline: Ratio | None
    decode_spread: Spread | None
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    acceptance_length: float | None
    acceptance_length_prompt_mean: float | None
    active_experts: float | None
    active_experts_prompt_mean: float | None
    verified_tokens: float | None
    rows_per_step: float | None
    phase_ms: dict[str, float | None]
    outside_target: float | None
    rho: float | None
    verification_speedup: Ratio | None
    headroom: dict[str, float | None]
    expert_bytes_per_step: float | None
    bytes_per_step: float | None
    achieved_gb_per_second: float | None
    bandwidth_share: float | None
    predicted_overlap: float | None
    reached_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    score: float | None
    score_differs: int
    lossless: Lossless


@dataclass(frozen=True)
class Report:
    """All rows, and what they have in common.

    Attributes:
        prompts: finished by all methods; everything but the lossless check is over these.
        prompts_begun: finished by at least one method.
        prompts_without_step: of ``prompts``, those whose AR output is one token, from the prefill.
        baseline: label of the policy that the methods after it are compared with.
        check: what was to be checked for losslessness: all, sample or none.
        units: what the intervals resample: prompts, or batches where several prompts were decoded together.
    """

    prompts: int
    prompts_begun: int
    prompts_without_step: int
    baseline: str
    check: str
    moe_layers: int
    top_k: int
    expert_bytes: int
    always_read_bytes: int
    units: int
    rows: tuple[MethodRow, ...]

    @property
    def any_score(self) -> bool:
        """Whether anything was scored."""
        return any(row.score is not None for row in self.rows)

    @property
    def in_batches(self) -> bool:
        """Whether any step was over several prompts."""
        return any((row.rows_per_step or 1.0) > 1.0 for row in self.rows)


def summarise(
    records: Sequence[PromptRecord],
    *,
    methods: Sequence[MethodInfo],
    moe_layers: int,
    top_k: int,
    expert_bytes: int,
    always_read_bytes: int,
    check: str,
    baseline: str = "confidence",
    copy_bytes_per_second: float | None = None,
) -> Report:
    """Turn records into a report.

    Args:
        records: in any order; of two of the same prompt and method the later counts (a resumed run), and
            those of methods not named in ``methods`` do not.
        methods: in the order of the report, `AR` among them.
        moe_layers, top_k, expert_bytes, always_read_bytes: the target's geometry.
        baseline: the label that `MethodRow.over_baseline` compares with.
        copy_bytes_per_second: the device's measured copy bandwidth.
    """
    by_method: dict[str, dict[str, PromptRecord]] = {method.label: {} for method in methods}
    for record in records:
        if record.method in by_method:
            by_method[record.method][record.prompt_id] = record
    begun = dict.fromkeys(prompt for found in by_method.values() for prompt in found)
    finished = [prompt for prompt in begun if all(prompt in found for found in by_method.values())]
    counted = {label: [found[prompt] for prompt in finished] for label, found in by_method.items()}
    order = [method.label for method in methods]
    honest = {method.label for method in methods if not method.true_routing}

    def row(method: MethodInfo) -> MethodRow:
        after = baseline in order and order.index(method.label) > order.index(baseline)
        return _row(
            method,
            counted[method.label],
            ar=counted.get(AR, []),
            baseline=counted[baseline] if after and baseline in honest else None,
            moe_layers=moe_layers,
            expert_bytes=expert_bytes,
            always_read_bytes=always_read_bytes,
            copy_bytes_per_second=copy_bytes_per_second,
            lossless=_lossless(by_method[method.label].values()),
        )

    return Report(
        prompts=len(finished),
        prompts_begun=len(begun),
        prompts_without_step=sum(record.steps == 0 for record in counted.get(AR, [])),
        baseline=baseline,
        check=check,
        moe_layers=moe_layers,
        top_k=top_k,
        expert_bytes=expert_bytes,
        always_read_bytes=always_read_bytes,
        units=len({record.batch or record.prompt_id for record in counted.get(AR, [])}),
        rows=_with_headroom([row(method) for method in methods], baseline),
    )


def _with_headroom(rows: Sequence[MethodRow], baseline: str) -> tuple[MethodRow, ...]:
    """The rows, those after the baseline with their share of the way to each yardstick: (x - b) / (y - b) of α · ρ."""
    gains = {row.label: row.verification_speedup.value for row in rows if row.verification_speedup is not None}
    base, found, after = gains.get(baseline), [], False
    for row in rows:
        own = gains.get(row.label)
        if after and own is not None and base is not None and row.label not in YARDSTICKS:
            ends = {name: end for name in YARDSTICKS if (end := gains.get(name)) is not None}
            shares = {
                name: (own - base) / (end - base) if end > base * LEAST_HEADROOM else None for name, end in ends.items()
            }
            row = replace(row, headroom=shares)
        found.append(row)
        after = after or row.label == baseline
    return tuple(found)


def report_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, with its schema version."""
    plain: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **asdict(report)}, allow_nan=False))
    return plain


def _row(
    method: MethodInfo,
    records: Sequence[PromptRecord],
    *,
    ar: Sequence[PromptRecord],
    baseline: Sequence[PromptRecord] | None,
    moe_layers: int,
    expert_bytes: int,
    always_read_bytes: int,
    copy_bytes_per_second: float | None,
    lossless: Lossless,
) -> MethodRow:
    honest = not method.true_routing
    steps = sum(r.steps for r in records)
    whole_steps = sum(r.whole_steps for r in records)
    pairs_per_step = _divide(sum(r.expert_pairs for r in records), whole_steps)
    pass_seconds = _divide(_phase(records, "verify"), whole_steps)
    ar_seconds = _divide(_phase(ar, "verify"), sum(r.whole_steps for r in ar))
    phase_ms = {name: _scaled(_divide(_phase(records, name) or None, whole_steps), 1e3) for name in PHASES}
    outside = _divide(_phase(records, "verify"), sum(_phase(records, name) for name in PHASES))
    routed_bytes = _scaled(pairs_per_step, expert_bytes)
    all_bytes = None if routed_bytes is None else routed_bytes + always_read_bytes
    bytes_per_second = _divide(all_bytes, pass_seconds)
    if method.true_routing:
        phase_ms["predict"] = None
    return MethodRow(
        label=method.label,
        true_routing=method.true_routing,
        steps=steps,
        speedup=speedup_of(ar, records, whole_seconds, whole_tokens) if honest else None,
        decode_speedup=speedup_of(ar, records, decode_seconds, decode_tokens) if honest else None,
        over_baseline=(
            speedup_of(baseline, records, decode_seconds, decode_tokens) if honest and baseline is not None else None
        ),
        decode_spread=spread_of(ar, records) if honest else None,
        tokens_per_second=_rate(records, whole_tokens, whole_seconds) if honest else None,
        decode_tokens_per_second=_rate(records, decode_tokens, decode_seconds) if honest else None,
        acceptance_length=_divide(sum(r.emitted for r in records), steps),
        acceptance_length_prompt_mean=_mean(_divide(r.emitted, r.steps) for r in records),
        active_experts=_divide(pairs_per_step, moe_layers),
        active_experts_prompt_mean=_mean(_divide(r.expert_pairs, r.whole_steps * moe_layers) for r in records),
        verified_tokens=_divide(sum(r.selected for r in records), steps),
        rows_per_step=_divide(steps, whole_steps),
        phase_ms=phase_ms,
        outside_target=1 - outside if honest and outside is not None else None,
        rho=_divide(ar_seconds, pass_seconds),
        verification_speedup=speedup_of(ar, records, verify_seconds, decode_tokens),
        headroom={},
        expert_bytes_per_step=routed_bytes,
        bytes_per_step=all_bytes,
        achieved_gb_per_second=_scaled(bytes_per_second, 1e-9),
        bandwidth_share=_divide(bytes_per_second, copy_bytes_per_second),
        predicted_overlap=_overlap(records),
        reached_by_depth=_sums(r.reached_by_depth for r in records),
        accepted_by_depth=_sums(r.accepted_by_depth for r in records),
        score=_mean(r.score for r in records),
        score_differs=sum(a.score != b.score for a, b in zip(ar, records, strict=True)) if ar else 0,
        lossless=lossless,
    )


def _lossless(records: Iterable[PromptRecord]) -> Lossless:
    found = list(records)
    verdicts = [r.verdict for r in found]
    return Lossless(
        verdict=max(verdicts, key=VERDICTS.index, default="unchecked"),
        checked=sum(v != "unchecked" for v in verdicts),
        prompts=len(found),
        violated=verdicts.count("violated"),
        ties=sum(r.ties for r in found),
        largest_gap=max((r.largest_gap for r in found if r.verdict == "ties"), default=0.0),
    )


def _overlap(records: Sequence[PromptRecord]) -> float | None:
    """Mean over steps; a record holds the mean over its own."""
    known = [(r.predicted_overlap, r.steps) for r in records if r.predicted_overlap is not None]
    return _divide(sum(share * steps for share, steps in known), sum(steps for _, steps in known))


def _sums(lists: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*lists, fillvalue=0)))


def _phase(records: Sequence[PromptRecord], name: str) -> float:
    return sum((r.phase_seconds.get(name, 0.0) for r in records), 0.0)


def _rate(
    records: Sequence[PromptRecord],
    tokens: Callable[[PromptRecord], int],
    seconds: Callable[[PromptRecord], float],
) -> float | None:
    return _divide(sum(map(tokens, records)), sum(map(seconds, records)))


def _divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
