"""The plots of one run's page: speed, the α–E plane, the time of a step, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ecospec.harness.plots import (
    INK,
    PAPER,
    Plot,
    drawn,
    marker,
    method_colour,
    method_entry,
    phase_colour,
    phase_entry,
    shortened,
)
from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow, Report
from ecospec.harness.stats import Ratio
from ecospec.harness.verdict import ratio_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_INCHES = 0.46
"""Height of one method's line, its label above it."""
LABEL: dict[str, Any] = {
    **{"va": "bottom", "ha": "left", "zorder": 4},
    "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},  # grid lines end before it
}


def report_plots(report: Report) -> list[Plot]:
    """Those that the report has figures for."""
    plots = (speed_plot(report), baseline_plot(report), plane_plot(report), time_plot(report), depth_plot(report))
    return [plot for plot in plots if plot is not None]


def speed_plot(report: Report) -> Plot | None:
    """Speed-up over plain decoding, decode only and end to end, with intervals."""
    rows = [(i, row) for i, row in enumerate(report.rows) if row.label != AR and _known(row.decode_speedup)]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = label_rows(figure, [(i, row.label) for i, row in rows], "speed-up over plain decoding")
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for place, (i, row) in enumerate(rows):
            interval(axes, place - 0.09, i, row.decode_speedup, filled=True)
            interval(axes, place + 0.14, i, row.speedup, filled=False)

    words = [
        f"{row.label}: {ratio_words(row.decode_speedup)} decode only, {ratio_words(row.speedup)} end to end"
        for _, row in rows
    ]
    return Plot(
        "speed",
        "Speed-up over plain decoding",
        "Filled: decode only; hollow: end to end, prefill included. Lines are 95 % intervals over prompts; an interval "
        "across the dashed line at 1 cannot be told from no change.",
        "; ".join(words),
        drawn("speed", _height(rows), draw),
    )


def baseline_plot(report: Report) -> Plot | None:
    """Decode-only speed-up over the baseline policy."""
    rows = [(i, row) for i, row in enumerate(report.rows) if _known(row.over_baseline)]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = label_rows(figure, [(i, row.label) for i, row in rows], f"speed-up over {shortened(report.baseline)}")
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for place, (i, row) in enumerate(rows):
            interval(axes, place, i, row.over_baseline, filled=True)

    return Plot(
        "baseline",
        f"Speed-up over {report.baseline}, decode only",
        "The paired comparison, which is sharper than comparing two intervals over plain decoding.",
        "; ".join(f"{row.label}: {ratio_words(row.over_baseline)}" for _, row in rows),
        drawn("baseline", _height(rows), draw),
    )


def plane_plot(report: Report) -> Plot | None:
    """Every method's acceptance length against its active experts."""
    points = [
        (i, row.label, row.active_experts, row.acceptance_length)
        for i, row in enumerate(report.rows)
        if row.active_experts is not None and row.acceptance_length is not None
    ]
    # Far from all others, it would leave them one corner.
    ar = [
        f" Plain decoding lies at E\u00a0{e:.2f}, α\u00a0{length:.2f}." for _, label, e, length in points if label == AR
    ]
    points = [point for point in points if point[1] != AR]
    if not points:
        return None

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.grid(True)
        for i, _, experts, length in points:
            axes.plot([experts], [length], **method_style(i, filled=True), markersize=8, linestyle="none")
        axes.margins(0.12)
        axes.set_xlabel("active experts E, per MoE layer and step")
        axes.set_ylabel("acceptance length α")

    return Plot(
        "plane",
        "Acceptance length against active experts",
        "Up is more tokens a step, left is fewer experts read: a selection that pays lies up and to the left of the "
        "baseline." + "".join(ar),
        "; ".join(f"{label}: E {experts:.2f}, α {length:.3f}" for _, label, experts, length in points),
        drawn("plane", 3.0, draw),
        tuple(method_entry(i, label) for i, label, _, _ in points),
    )


def time_plot(report: Report) -> Plot | None:
    """Milliseconds of a step by phase, stacked."""
    rows = [(i, row) for i, row in enumerate(report.rows) if any(_times(row))]
    if not rows:
        return None
    # By its place among all phases: one colour in every run, whatever else it lacks.
    names = list(dict.fromkeys(phase for row in report.rows for phase in row.phase_ms))
    phases = {name: number for number, name in enumerate(names) if any(row.phase_ms.get(name) for _, row in rows)}

    def draw(figure: Figure) -> None:
        axes = label_rows(figure, [(i, row.label) for i, row in rows], "milliseconds per step")
        for place, (_, row) in enumerate(rows):
            left = 0.0
            for phase, number in phases.items():
                ms = row.phase_ms.get(phase) or 0.0
                axes.barh(
                    place + 0.02, ms, left=left, height=0.42, color=phase_colour(number), edgecolor=PAPER, linewidth=0.6
                )
                left += ms
            axes.text(left, place + 0.02, f" {left:.2f}", va="center", ha="left")
        axes.set_xlim(0, 1.12 * max(sum(_times(row)) for _, row in rows))

    def words(row: MethodRow) -> str:
        parts = ", ".join(f"{phase} {ms:.2f}" for phase, ms in row.phase_ms.items() if ms)
        return f"{row.label}: {sum(_times(row)):.2f} ms ({parts})"

    return Plot(
        "time",
        "Where the time of a step goes",
        "Mean milliseconds of one step by phase; the number is their sum. A step of plain decoding emits one token, "
        "that of a method α of them.",
        "; ".join(words(row) for _, row in rows),
        drawn("time", _height(rows), draw),
        tuple(phase_entry(number, phase) for phase, number in phases.items()),
    )


def depth_plot(report: Report) -> Plot | None:
    """How often a draft token is accepted, and how often a step gets to it, by its depth in the tree."""
    rows = [(i, row) for i, row in enumerate(report.rows) if row.reached_by_depth and row.steps]
    if not rows:
        return None
    deepest = max(len(row.reached_by_depth) for _, row in rows)

    def draw(figure: Figure) -> None:
        above: Any
        below: Any
        above, below = figure.subplots(2, 1, sharex=True)
        width = 0.8 / len(rows)
        for place, (i, row) in enumerate(rows):
            at = [depth + (place - (len(rows) - 1) / 2) * width for depth in range(1, deepest + 1)]
            rates = acceptance_rates(row)
            accepted = [*row.accepted_by_depth, *[0] * deepest][:deepest]
            bar = {"width": width, "color": method_colour(i), "edgecolor": PAPER, "linewidth": 0.5}
            above.bar(at[: len(rates)], [100 * rate for rate in rates], **bar)
            below.bar(at, [100 * count / row.steps for count in accepted], **bar)
        for axes, title in (
            (above, "accepted, % of the steps that verified this depth"),
            (below, "accepted, % of all steps"),
        ):
            axes.grid(True, axis="y")
            axes.set_title(title)
            axes.set_ylim(0, 105)
        below.set_xticks(range(1, deepest + 1))
        below.set_xlabel("depth in the draft tree")

    def words(row: MethodRow) -> str:
        return f"{row.label}: {', '.join(f'{100 * rate:.0f} %' for rate in acceptance_rates(row))}"

    return Plot(
        "depth",
        "Acceptance by depth",
        "Above: where the tokens before it were accepted and a token of this depth was verified, how often one was "
        "accepted. Below: the same over all steps, which falls with every depth; its sum is what drafting adds to α. "
        "Bars are in the order of the legend.",
        f"accepted of those verified, from depth 1: {'; '.join(words(row) for _, row in rows)}",
        drawn("depth", 3.9, draw),
        tuple(method_entry(i, row.label) for i, row in rows),
    )


def acceptance_rates(row: MethodRow) -> list[float]:
    """By depth, from 1: accepted / reached."""
    accepted = [*row.accepted_by_depth, *[0] * len(row.reached_by_depth)]
    return [count / reached for reached, count in zip(row.reached_by_depth, accepted, strict=False) if reached]


def label_rows(figure: Figure, labels: Sequence[tuple[int, str]], title: str) -> Any:
    """Axes with a line for each label, which stands above it: there is room for a long one."""
    axes: Any = figure.add_subplot()
    axes.grid(True, axis="x")
    axes.set_ylim(len(labels) - 0.5, -0.62)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    for place, (_, label) in enumerate(labels):
        axes.text(0.0, place - 0.27, shortened(label), transform=axes.get_yaxis_transform(), **LABEL)
    return axes


def _height(rows: Sequence[object]) -> float:
    return 0.62 + ROW_INCHES * len(rows)


def interval(axes: Any, y: float, index: int, ratio: Ratio | None, *, filled: bool) -> None:
    """A ratio at a height, with its interval where it has one."""
    if ratio is None or ratio.value is None:
        return
    if ratio.interval is not None:
        axes.plot([ratio.interval.low, ratio.interval.high], [y, y], color=method_colour(index), linewidth=1.6)
    axes.plot(
        [ratio.value], [y], **method_style(index, filled=filled), markersize=7 if filled else 5.5, linestyle="none"
    )


def method_style(index: int, *, filled: bool) -> dict[str, Any]:
    """How a method's line and markers are drawn, everywhere the same."""
    colour = method_colour(index)
    return {
        "color": colour,
        "marker": marker(index),
        "markerfacecolor": colour if filled else PAPER,
        "markeredgecolor": colour if not filled else PAPER,
        "markeredgewidth": 1.3 if not filled else 0.6,
        "linewidth": 1.4,
    }


def _known(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.value is not None


def _times(row: MethodRow) -> list[float]:
    return [ms for ms in row.phase_ms.values() if ms]
