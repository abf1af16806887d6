"""All that a comparison of two runs, or two sets of runs, comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.comparing.comparable import machine_difference, rounding_difference, why_not_comparable
from ecospec.harness.comparing.figures import DIFFERS, SAME, Compared, compare_figures
from ecospec.harness.comparing.runs import Run
from ecospec.harness.comparing.timings import SLOWER, Timing, judge, pooled, series_of

SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """What differs between BASE and NEW.

    Attributes:
        missing: runs and methods of BASE that NEW has not; each is a regression, since nothing guards them any more.
        added: runs and methods of NEW alone; they are not judged.
        notes: what a reader must know of the two.
    """

    figures: tuple[Compared, ...]
    timings: tuple[Timing, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> list[str]:
        """What fails, in words, one a line."""
        figures = [describe_figure(each) for each in self.figures if each.verdict == DIFFERS]
        timings = [describe_timing(each) for each in self.timings if each.verdict == SLOWER]
        return [*(f"{each}: missing in NEW" for each in self.missing), *figures, *timings]


def describe_figure(compared: Compared) -> str:
    """One figure's change in words."""
    where = f"{compared.run}, {compared.method}, {compared.figure}"
    if compared.base == compared.new or not all(isinstance(v, int | float) for v in (compared.base, compared.new)):
        said = f"{shown(compared.base)} -> {shown(compared.new)}"
    else:
        said = f"{shown(compared.base)} -> {shown(compared.new)}{change_of(compared)}"
    prompts = f"{compared.prompts} of {compared.of} prompts differ, first {compared.first}"
    allowed = f"; tolerance {compared.tolerance:g}" if compared.tolerance else ""
    return f"{where}: {said} ({prompts}{allowed})"


def change_of(compared: Compared) -> str:
    """The relative change of a figure, or nothing where there is none."""
    base, new = compared.base, compared.new
    if isinstance(base, str) or isinstance(new, str) or not base or new is None:
        return ""
    return f" ({100 * (new / base - 1):+.2f} %)"


def shown(value: float | str | None) -> str:
    """A figure with the digits that a difference can be in."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.10g}" if float(value).is_integer() else f"{value:.5f}"


def describe_timing(timing: Timing) -> str:
    """One timing's change in words."""
    typical = timing.typical
    between = f" [{typical.interval.low:.3f}, {typical.interval.high:.3f}]" if typical.interval else ""
    return (
        f"{timing.run}, {timing.method}: seconds per token {timing.kind}, NEW / BASE of typical prompts = "
        f"{typical.value:.3f}{between} over {timing.units}"
    )


def compare_runs(
    base: Sequence[Run],
    new: Sequence[Run],
    tolerances: Mapping[str, float],
    *,
    slower: float,
    absolute: bool,
    elsewhere: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare the runs of one name, method by method.

    Args:
        elsewhere: tolerances in place of the others for a pair that may differ by rounding; None for the same.

    Raises:
        UserError: no run in common, or runs whose figures differ for another reason than the code.
    """
    before, now = ({run.name: run for run in side} for side in (base, new))
    common = [name for name in before if name in now]
    if not common:
        raise UserError(f"no run in common: BASE has {', '.join(before)}, NEW has {', '.join(now)}")
    missing = [f"run {name}" for name in before if name not in now]
    added = [f"run {name}" for name in now if name not in before]
    figures: list[Compared] = []
    series = []
    reasons: dict[str, None] = {}
    for name in common:
        pair = before[name], now[name]
        difference = why_not_comparable(*pair)
        if difference is not None:
            raise UserError(f"{name}: cannot be compared: {difference}")
        labels = [[method.label for method in run.methods] for run in pair]
        missing += [f"{name}, {label}" for label in labels[0] if label not in labels[1]]
        added += [f"{name}, {label}" for label in labels[1] if label not in labels[0]]
        rounding = rounding_difference(*pair)
        allowed = tolerances if elsewhere is None or rounding is None else elsewhere
        if rounding is not None:
            which = "" if elsewhere is None else "; the tolerances of --elsewhere apply"
            reasons[f"figures may differ by rounding: {rounding}{which}"] = None
        other = machine_difference(*pair)
        if other is not None:
            reasons[f"times are not gated: {other}"] = None
        for method in pair[0].methods:
            if method.label not in labels[1]:
                continue
            figures += compare_figures(*pair, method.label, allowed)
            if all(run.timed for run in pair) and not method.true_routing:
                why_not = None if other is None else "another machine or other versions"
                series += series_of(*pair, method.label, why_not, absolute=absolute)
    if not all(run.timed for run in (*base, *new)):
        reasons["no times on one side; only deterministic figures are compared"] = None
    timings = judge([*series, *pooled(series)], slower)
    return Comparison(tuple(figures), tuple(timings), tuple(missing), tuple(added), tuple(reasons))


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    return {
        "schema": SCHEMA,
        "passes": not comparison.regressions,
        "regressions": comparison.regressions,
        **asdict(comparison),
    }


def same_figures(comparison: Comparison) -> int:
    """How many figures are the same in both."""
    return sum(each.verdict == SAME for each in comparison.figures)
