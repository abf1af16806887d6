"""What is written down of finished outputs: records, activations, and where an output was not plain decoding's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecospec.harness.activations import PromptActivations, as_counts
from ecospec.harness.decoding import Generation
from ecospec.harness.lossless import UNCHECKED, VIOLATED, LosslessCheck
from ecospec.harness.records import PromptRecord
from ecospec.harness.requests import Request


@dataclass(frozen=True)
class Violation:
    """Where a method's output left AR's without numeric noise to explain it."""

    prompt_id: str
    method: str
    position: int
    ar_token: int | None
    method_token: int | None
    gap: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id}, {self.method}, position {self.position}: AR emits token "
            f"{self.ar_token}, the method {self.method_token}; margin {self.gap:.3g}"
        )


def record_of(
    request: Request,
    label: str,
    generation: Generation,
    check: LosslessCheck | None,
    score: float | None,
    batch: str = "",
) -> PromptRecord:
    """What is written down of one output."""
    steps = generation.steps
    phases: dict[str, float] = {}
    for step in steps:
        for phase, seconds in step.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds / step.rows
    overlaps = [step.predicted_overlap for step in steps if step.predicted_overlap is not None]
    differences = check.differences if check else ()
    ties = [difference for difference in differences if difference.is_tie]
    return PromptRecord(
        prompt_id=request.id,
        method=label,
        prompt_tokens=len(request.ids),
        tokens=list(generation.tokens),
        text=generation.text,
        reason=generation.reason,
        prefill_seconds=generation.prefill_seconds,
        decode_seconds=generation.decode_seconds,
        steps=len(steps),
        emitted=sum(step.emitted for step in steps),
        selected=sum(step.selected for step in steps),
        expert_pairs=sum(step.expert_pairs / step.rows for step in steps),
        phase_seconds=phases,
        predicted_overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        verdict=check.verdict if check else UNCHECKED,
        ties=len(ties),
        largest_gap=max((tie.gap for tie in ties), default=0.0),
        score=score,
        batch=batch,
        step_share=sum(1 / step.rows for step in steps) if batch else None,
        reached_by_depth=by_depth([step.reached for step in steps]),
        accepted_by_depth=by_depth([step.accepted for step in steps]),
    )


def by_depth(depths: Sequence[int]) -> list[int]:
    """Entry d − 1: how many of some depths are at least d."""
    return [sum(depth >= least for depth in depths) for least in range(1, max(depths, default=0) + 1)]


def activations_of(request: Request, outputs: Mapping[str, Generation]) -> list[PromptActivations]:
    """What is written down of the experts that one prompt's steps read; nothing where no method took any."""
    known = {
        label: (output.activations, sum(1 / step.rows for step in output.steps))
        for label, output in outputs.items()
        if output.activations is not None and output.activations.size
    }
    if not known:
        return []
    counts = {label: as_counts(activations) for label, (activations, _) in known.items()}
    return [PromptActivations(request.id, {label: steps for label, (_, steps) in known.items()}, counts)]


def violations_of(record: PromptRecord, check: LosslessCheck | None) -> list[Violation]:
    """What to print of a violated output."""
    if check is None or check.verdict != VIOLATED:
        return []
    return [
        Violation(record.prompt_id, record.method, d.position, d.ar_token, d.method_token, d.gap)
        for d in check.differences
        if not d.is_tie
    ]
