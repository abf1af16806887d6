"""Speed-ups from records: ratios of sums over the prompts that two methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ecospec.harness.records import PromptRecord
from ecospec.harness.stats import Ratio, paired_ratio


@dataclass(frozen=True)
class Spread:
    """Decode-only speed-up of single prompts: how far they lie apart, whatever their weight."""

    median: float
    low: float
    high: float
    prompts: int


def whole_seconds(record: PromptRecord) -> float:
    """Seconds from the request to the last token."""
    return record.prefill_seconds + record.decode_seconds


def whole_tokens(record: PromptRecord) -> int:
    """All emitted tokens."""
    return len(record.tokens)


def decode_seconds(record: PromptRecord) -> float:
    """Seconds after the first token."""
    # Without a step it is the time between two looks at the clock.
    return record.decode_seconds if record.steps else 0.0


def verify_seconds(record: PromptRecord) -> float:
    """Seconds of the target's passes after the first token."""
    return record.phase_seconds.get("verify", 0.0) if record.steps else 0.0


def decode_tokens(record: PromptRecord) -> int:
    """Tokens after the first."""
    return max(0, len(record.tokens) - 1)


def speedup_of(
    slow: Sequence[PromptRecord],
    fast: Sequence[PromptRecord],
    seconds: Callable[[PromptRecord], float],
    tokens: Callable[[PromptRecord], int],
) -> Ratio:
    """(Σ slow seconds / Σ slow tokens) / (Σ fast seconds / Σ fast tokens), over prompts that have both.

    Prompts that were decoded together share their steps, so they are one unit of the bootstrap.
    """
    units: dict[str, list[float]] = {}
    for a, b in _timed_pairs(slow, fast, seconds, tokens):
        sums = units.setdefault(b.batch or b.prompt_id, [0.0] * 4)
        for i, value in enumerate((seconds(a), seconds(b), tokens(a), tokens(b))):
            sums[i] += value
    over, under, over_per, under_per = zip(*units.values(), strict=True) if units else ((), (), (), ())
    return paired_ratio(over, under, numerator_per=over_per, denominator_per=under_per)


def _timed_pairs(
    slow: Sequence[PromptRecord],
    fast: Sequence[PromptRecord],
    seconds: Callable[[PromptRecord], float],
    tokens: Callable[[PromptRecord], int],
) -> list[tuple[PromptRecord, PromptRecord]]:
    pairs = zip(slow, fast, strict=True) if slow else ()
    return [pair for pair in pairs if all(seconds(record) > 0 and tokens(record) > 0 for record in pair)]


def spread_of(ar: Sequence[PromptRecord], records: Sequence[PromptRecord]) -> Spread | None:
    """Decode-only speed-ups of single prompts; None where there is none."""
    pairs = _timed_pairs(ar, records, decode_seconds, decode_tokens)
    if not pairs:
        return None
    ratios = [(a.decode_seconds / decode_tokens(a)) / (b.decode_seconds / decode_tokens(b)) for a, b in pairs]
    return Spread(median(ratios), min(ratios), max(ratios), len(ratios))
