"""What a run says in a sentence or two: does a policy pay here, is its output unchanged, how far to trust that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow, Report
from ecospec.harness.report_notes import EMBEDDED, FEW_PROMPTS, LOW_BANDWIDTH_SHARE, OVERHEAD_SHARE, percent
from ecospec.harness.stats import Ratio

GOOD, OPEN, BAD = "good", "open", "bad"
"""A claim holds, cannot be told, or does not hold."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a verdict; ``grade`` is `GOOD`, `OPEN` or `BAD`."""

    grade: str
    text: str


@dataclass(frozen=True)
class Doubt:
    """One thing that speaks against the figures: its kind, for several runs together, and the sentence of this one."""

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The three answers.

    Attributes:
        pays: of the method that is fastest, over plain decoding and over the baseline.
        lossless: of all methods, the worst.
        trust: what the figures must not be used for; `GOOD` where nothing speaks against them.
        method: the label of the method that ``pays`` is about; None where none has a speed-up.
        doubts: those of ``trust``.
    """

    pays: Claim
    lossless: Claim
    trust: Claim
    method: str | None
    doubts: tuple[Doubt, ...] = ()

    @property
    def claims(self) -> tuple[Claim, Claim, Claim]:
        """The three, as a page shows them."""
        return self.pays, self.lossless, self.trust


def verdict_of(report: Report, manifest: Mapping[str, Any], missing: int = 0) -> Verdict:
    """A report's verdict.

    The fastest method is the one with the highest decode-only speed-up, the baseline aside where there is another. It
    pays where the whole interval of that speed-up over the baseline is above 1; so it does over plain decoding.

    Args:
        missing: prompts that an interrupted run lacks.
    """
    best = _fastest(report)
    doubts = tuple(_doubts(report, manifest, best, missing))
    trust = (
        Claim(OPEN, f"How far to trust it: {'; '.join(doubt.text for doubt in doubts)}.")
        if doubts
        else Claim(GOOD, f"Over {_count(report.prompts, 'prompt')}; nothing in the run speaks against the figures.")
    )
    return Verdict(_pays(report, best), _lossless(report), trust, None if best is None else best.label, doubts)


def _fastest(report: Report) -> MethodRow | None:
    timed = [
        row
        for row in report.rows
        if row.label != AR and row.decode_speedup is not None and row.decode_speedup.value is not None
    ]
    others = [row for row in timed if row.label != report.baseline]
    return max(others or timed, key=lambda row: _value(row.decode_speedup), default=None)


def _value(ratio: Ratio | None) -> float:
    return 0.0 if ratio is None or ratio.value is None else ratio.value


def grade(ratio: Ratio | None) -> str:
    """Whether a ratio is above 1, below it, or cannot be told from it."""
    if ratio is None or ratio.interval is None or 1.0 in ratio.interval:
        return OPEN
    return GOOD if ratio.interval.low > 1.0 else BAD


def ratio_words(ratio: Ratio | None) -> str:
    """A ratio with its interval, as in a sentence."""
    if ratio is None or ratio.value is None:
        return "not known"
    if ratio.interval is None:
        return f"{ratio.value:.2f}× (no interval)"
    return f"{ratio.value:.2f}× ({ratio.interval.low:.2f}–{ratio.interval.high:.2f})"


def _pays(report: Report, best: MethodRow | None) -> Claim:
    if not report.prompts:
        return Claim(OPEN, "No prompt is finished by every method, so that nothing can be said yet.")
    if best is None:
        return Claim(OPEN, "No method here has a speed-up to speak of: there are verification metrics only.")
    words = {
        GOOD: "{} is faster than plain decoding",
        OPEN: "{} cannot be told from plain decoding in speed",
        BAD: "{} is slower than plain decoding",
    }
    over_ar = grade(best.decode_speedup)
    text = f"{words[over_ar].format(best.label)}: {ratio_words(best.decode_speedup)} decode only"
    text += f", {ratio_words(best.speedup)} end to end"
    if best.over_baseline is None or best.over_baseline.value is None:
        return Claim(over_ar, f"{text}.")
    against = grade(best.over_baseline)
    said = {
        GOOD: f"it also beats {report.baseline}",
        OPEN: f"against {report.baseline} no difference can be told",
        BAD: f"{'but' if over_ar == GOOD else 'and'} it loses to {report.baseline}",
    }
    worst = BAD if BAD in (over_ar, against) else OPEN if OPEN in (over_ar, against) else GOOD
    return Claim(worst, f"{text}; {said[against]}, {ratio_words(best.over_baseline)}.")


def _lossless(report: Report) -> Claim:
    rows = [row for row in report.rows if row.label != AR or report.in_batches]
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        by_verdict.setdefault(row.lossless.verdict, []).append(row.label)
    if "violated" in by_verdict:
        return Claim(
            BAD,
            f"Not lossless: {', '.join(by_verdict['violated'])} emitted tokens that plain decoding does not; "
            "such a speed is that of another output.",
        )
    if "ties" in by_verdict:
        return Claim(
            OPEN,
            f"Lossless but for numeric ties: {', '.join(by_verdict['ties'])} differ from plain decoding only where its "
            "two best choices are closer than rounding.",
        )
    if "unchecked" in by_verdict:
        names = by_verdict["unchecked"]
        who = "Nothing" if len(names) == len(rows) else f"Of {', '.join(names)} nothing"
        return Claim(OPEN, f"{who} was checked for losslessness.")
    checked = min((row.lossless.checked for row in rows), default=0)
    return Claim(GOOD, f"Lossless: every token equals plain decoding's, on {_count(checked, 'output')} a method.")


def _doubts(report: Report, manifest: Mapping[str, Any], best: MethodRow | None, missing: int) -> Iterator[Doubt]:
    if missing:
        yield Doubt("not finished", f"the run is not finished ({_count(missing, 'prompt')} to go)")
    if report.units < FEW_PROMPTS:
        units = _count(report.units, *(("batch", "es") if report.in_batches else ("prompt",)))
        yield Doubt("few prompts", f"{units} {'are' if report.units != 1 else 'is'} too few for more than a glance")
    if manifest.get("target") == EMBEDDED:
        yield Doubt(
            "the embedded model is test equipment",
            "the embedded model is test equipment and says nothing about a large model's speed",
        )
    if best is None:
        return
    if best.outside_target is not None and best.outside_target > OVERHEAD_SHARE:
        yield Doubt(
            "much of a step is outside the target's pass",
            f"{percent(best.outside_target)} of a step of {best.label} is outside the target's pass",
        )
    if best.bandwidth_share is not None and best.bandwidth_share < LOW_BANDWIDTH_SHARE:
        yield Doubt(
            "verification is not bound by reading experts",
            f"verification reaches {percent(best.bandwidth_share)} of the copy bandwidth, so that fewer experts save "
            "less time than where it is bound by reading them",
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
