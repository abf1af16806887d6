"""Times of two runs: how much slower a method has become, and whether that is more than the machine's noise.

A machine drifts between two runs, so that seconds alone say little. What is gated is a method's decode seconds over
those of plain decoding of the same prompt in the same run, which a drift moves both of: plain decoding and all methods
are interleaved prompt by prompt. Seconds themselves are reported, and gated only where that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecospec.harness.comparing.runs import Output, Run
from ecospec.harness.records import AR
from ecospec.harness.stats import CONFIDENCE, RESAMPLES, Ratio, paired_ratio, typical_ratio

FEWEST_UNITS = 16
"""Prompts, or batches, below which times are shown but not gated: a few outliers would decide."""
OK, SLOWER, NOT_GATED = "ok", "slower", "not gated"
RELATIVE, ABSOLUTE = "relative to AR", "absolute"
ALL_RUNS = "all runs"


@dataclass(frozen=True)
class Timing:
    """Seconds per decoded token of one method in two runs, NEW / BASE; above 1 is slower.

    Attributes:
        kind: `RELATIVE` or `ABSOLUTE`.
        sums: of the sums over prompts, with its 95 % interval.
        typical: of the middle half of the prompts, with the interval that is gated: all gated intervals of a
            comparison hold together with 95 %.
        units: prompts, or batches.
        verdict: `OK`, `SLOWER` or `NOT_GATED`.
        why: why it is not gated.
    """

    run: str
    method: str
    kind: str
    sums: Ratio
    typical: Ratio
    units: int
    verdict: str
    why: str | None = None


@dataclass(frozen=True)
class Unit:
    """Decode seconds of one prompt or batch, for the same number of tokens in both runs."""

    base: float
    new: float
    base_ar: float
    new_ar: float


@dataclass(frozen=True)
class Series:
    """What a timing is made of."""

    run: str
    method: str
    kind: str
    units: tuple[Unit, ...]
    why_not: str | None


def series_of(base: Run, new: Run, method: str, why_not: str | None, *, absolute: bool) -> list[Series]:
    """The relative times of a method and its seconds.

    Args:
        why_not: why no time of these runs can be gated; None where they can.
        absolute: whether seconds are to be gated.
    """
    units = tuple(timed_units(base, new, method))
    seconds = None if absolute else "without --absolute"
    found = [Series(base.name, method, ABSOLUTE, units, why_not or seconds)]
    return found if method == AR else [Series(base.name, method, RELATIVE, units, why_not), *found]


def timed_units(base: Run, new: Run, method: str) -> list[Unit]:
    """The prompts or batches that have a time by the method and by AR in both runs."""
    sides = [(run.outputs[method], run.outputs.get(AR, {})) for run in (base, new)]
    units: dict[str, list[float]] = {}
    for prompt, output in sides[0][0].items():
        four = [found.get(prompt) for side in sides for found in side]
        known = [each for each in four if each is not None and _is_timed(each)]
        if len(known) < 4:
            continue
        before, before_ar, now, now_ar = known
        tokens = before_ar.length - 1
        sums = units.setdefault(output.unit, [0.0] * 4)
        for i, each in enumerate((before, now, before_ar, now_ar)):
            # Outputs have one length but for numeric ties; their seconds are made those of as many tokens.
            sums[i] += (each.decode_seconds or 0.0) / (each.length - 1) * tokens
    return [Unit(*sums) for sums in units.values()]


def _is_timed(output: Output) -> bool:
    return output.steps > 0 and output.length > 1 and bool(output.decode_seconds)


def judge(all_series: Sequence[Series], slower: float, resamples: int = RESAMPLES) -> list[Timing]:
    """The timings, each with its verdict.

    A timing fails where its typical ratio is above 1 + ``slower`` *and* its interval lies above 1 + ``slower`` / 3: the
    first alone fails by chance with few prompts, and an interval that has to lie above 1 + ``slower`` as a whole would
    overlook what is a little above. A machine's load moves the ratio of a whole run by some percent, for which the
    prompts of that run are no sample; the third is for that. With g gated timings each interval holds with
    1 − 0.05 / g, so that one in twenty comparisons at most has any interval that misses the truth.

    Args:
        slower: the share by which a method may become slower.
        resamples: of each bootstrap.
    """
    reasons = [series.why_not or _too_few(series) for series in all_series]
    gated = sum(reason is None for reason in reasons)
    confidence = 1 - (1 - CONFIDENCE) / max(1, gated)
    return [_timing(*each, slower, confidence, resamples) for each in zip(all_series, reasons, strict=True)]


def _too_few(series: Series) -> str | None:
    n = len(series.units)
    return f"{n} prompts or batches, fewer than {FEWEST_UNITS}" if n < FEWEST_UNITS else None


def _timing(series: Series, reason: str | None, slower: float, confidence: float, resamples: int) -> Timing:
    units, relative = series.units, series.kind == RELATIVE
    new, base = [u.new for u in units], [u.base for u in units]
    if relative:
        new_ar, base_ar = [u.new_ar for u in units], [u.base_ar for u in units]
        sums = paired_ratio(new, base, numerator_per=new_ar, denominator_per=base_ar, resamples=resamples)
        ratios = [(u.new / u.new_ar) / (u.base / u.base_ar) for u in units]
    else:
        sums = paired_ratio(new, base, resamples=resamples)
        ratios = [u.new / u.base for u in units]
    typical = typical_ratio(ratios, confidence=confidence, resamples=resamples)
    if reason is not None:
        return Timing(series.run, series.method, series.kind, sums, typical, len(units), NOT_GATED, reason)
    verdict = SLOWER if is_slower(typical, slower) else OK
    return Timing(series.run, series.method, series.kind, sums, typical, len(units), verdict)


def is_slower(ratio: Ratio, slower: float) -> bool:
    """Whether NEW / BASE is beyond both bounds; without an interval, all prompts have the one ratio."""
    if ratio.value is None or ratio.value <= 1 + slower or math.isclose(ratio.value, 1 + slower):
        return False
    return ratio.interval is None or ratio.interval.low > 1 + slower / 3


def pooled(all_series: Sequence[Series]) -> list[Series]:
    """Of several runs, each method's prompts of all runs together."""
    if len({series.run for series in all_series}) < 2:
        return []
    found: dict[tuple[str, str], list[Series]] = {}
    for series in all_series:
        found.setdefault((series.method, series.kind), []).append(series)
    return [
        Series(
            ALL_RUNS,
            method,
            kind,
            tuple(unit for each in parts for unit in each.units),
            next((each.why_not for each in parts if each.why_not is not None), None),
        )
        for (method, kind), parts in found.items()
        if len(parts) > 1
    ]
