"""A comparison on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ecospec.harness.comparing.benchmarks import BenchmarkComparison
from ecospec.harness.comparing.comparison import Comparison, change_of, same_figures, shown
from ecospec.harness.comparing.figures import SAME, Compared
from ecospec.harness.comparing.timings import ALL_RUNS, SLOWER, Timing
from ecospec.harness.fitted_tables import Cell, Column, Kind, fitted_tables
from ecospec.harness.report_notes import NONE
from ecospec.harness.stats import Ratio

MOST_LINES = 40
"""Of more lines in a table, only those are shown that say something."""
WIDE = 110
"""Columns of a terminal below which a figure that differs takes several lines; then the others are not shown."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables, then what fails."""
    shown_figures = list(comparison.figures)
    differ = any(each.verdict != SAME for each in shown_figures)
    if len(shown_figures) > MOST_LINES or (differ and console.width < WIDE):
        shown_figures = [each for each in shown_figures if each.verdict != SAME]
    if shown_figures:
        _print_figures(shown_figures, console)
    console.print(
        f"{same_figures(comparison)} of {len(comparison.figures)} deterministic figures are the same", highlight=False
    )
    timings = list(comparison.timings)
    if len(timings) > MOST_LINES:
        timings = [each for each in timings if each.run == ALL_RUNS or each.verdict == SLOWER]
    if timings:
        _print_timings(timings, console)
    _print_end(comparison, console)


def print_benchmarks(comparison: BenchmarkComparison, console: Console) -> None:
    """The table of benchmarks, then what fails."""
    columns = [
        Column("benchmark", Kind.NAME),
        *(Column(head) for head in ("BASE", "NEW", "ratio of medians", "rounds")),
        Column("", Kind.WORDS),
    ]
    rows: list[list[Cell]] = []
    for each in comparison.timings:
        seconds = [f"{value:.3g} s" for value in (each.base_seconds, each.new_seconds)]
        rounds = (f"{each.rounds[0]},", str(each.rounds[1]))
        rows.append([each.name, *seconds, _ratio(each.ratio), rounds, _said(each.verdict, each.why)])
    _print("benchmarks, NEW / BASE", columns, rows, console)
    _print_end(comparison, console)


def _print_end(comparison: Comparison | BenchmarkComparison, console: Console) -> None:
    lines = [f"note: {note}" for note in comparison.notes]
    if comparison.added:
        lines.append(f"in NEW alone, not judged: {'; '.join(comparison.added)}")
    failed = comparison.regressions
    lines += [f"REGRESSION {each}" for each in failed]
    lines.append(f"compare: {len(failed)} regression{'s' if len(failed) != 1 else ''}" if failed else "compare: passes")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _print_figures(figures: Sequence[Compared], console: Console) -> None:
    columns = [
        *(Column(head, Kind.NAME) for head in ("run", "method", "figure")),
        *(Column(head) for head in ("BASE", "NEW", "NEW / BASE", "prompts that differ")),
        Column("", Kind.WORDS),
    ]
    rows: list[list[Cell]] = []
    for each in figures:
        differs = each.verdict != SAME
        new = (shown(each.new), change_of(each).strip() if differs else "")
        ratio: Cell = _ratio(each.change) if each.change is not None and differs else NONE
        prompts = f"{each.prompts} of {each.of}"
        rows.append([each.run, each.method, each.figure, shown(each.base), new, ratio, prompts, each.verdict])
    _print("deterministic figures", columns, rows, console)


def _print_timings(timings: Sequence[Timing], console: Console) -> None:
    columns = [
        *(Column(head, Kind.NAME) for head in ("run", "method", "")),
        *(Column(head) for head in ("sums [95\u00a0%]", "typical prompts [gated]", "prompts")),
        Column("", Kind.WORDS),
    ]
    rows: list[list[Cell]] = []
    for each in timings:
        ratios = (_ratio(each.sums), _ratio(each.typical))
        rows.append([each.run, each.method, each.kind, *ratios, str(each.units), _said(each.verdict, each.why)])
    _print("seconds per decoded token, NEW / BASE; above 1 is slower", columns, rows, console)


def _print(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], console: Console) -> None:
    for table in fitted_tables(title, columns, rows, console.width):
        console.print(table)


def _ratio(ratio: Ratio) -> tuple[str, ...]:
    if ratio.value is None:
        return (NONE,)
    value = f"{ratio.value:.3f}"
    return (value, f"[{ratio.interval.low:.3f}, {ratio.interval.high:.3f}]") if ratio.interval else (value,)


def _said(verdict: str, why: str | None) -> str:
    return f"{verdict}: {why}" if why else verdict
