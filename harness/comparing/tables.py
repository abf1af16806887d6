"""A comparison on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecospec.harness.comparing.benchmarks import BenchmarkComparison
from ecospec.harness.comparing.comparison import Comparison, change_of, same_figures, shown
from ecospec.harness.comparing.figures import SAME, Compared
from ecospec.harness.comparing.timings import ALL_RUNS, SLOWER, Timing
from ecospec.harness.stats import Ratio

MOST_LINES = 40
"""Of more lines in a table, only those are shown that say something."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables, then what fails."""
    shown_figures = list(comparison.figures)
    if len(shown_figures) > MOST_LINES:
        shown_figures = [each for each in shown_figures if each.verdict != SAME]
    if shown_figures:
        console.print(_figures_table(shown_figures))
    console.print(
        f"{same_figures(comparison)} of {len(comparison.figures)} deterministic figures are the same", highlight=False
    )
    timings = list(comparison.timings)
    if len(timings) > MOST_LINES:
        timings = [each for each in timings if each.run == ALL_RUNS or each.verdict == SLOWER]
    if timings:
        console.print(_timings_table(timings))
    _print_end(comparison, console)


def print_benchmarks(comparison: BenchmarkComparison, console: Console) -> None:
    """The table of benchmarks, then what fails."""
    table = _table("benchmarks, NEW / BASE", ("benchmark", "BASE", "NEW", "ratio of medians", "rounds", ""))
    for each in comparison.timings:
        seconds = [f"{value:.3g} s" for value in (each.base_seconds, each.new_seconds)]
        rounds = f"{each.rounds[0]}, {each.rounds[1]}"
        table.add_row(*map(Text, (each.name, *seconds, _ratio(each.ratio), rounds, _said(each.verdict, each.why))))
    console.print(table)
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


def _figures_table(figures: list[Compared]) -> Table:
    columns = ("run", "method", "figure", "BASE", "NEW", "NEW / BASE", "prompts that differ", "")
    table = _table("deterministic figures", columns)
    for each in figures:
        new = shown(each.new) + (change_of(each) if each.verdict != SAME else "")
        ratio = _ratio(each.change) if each.change is not None and each.verdict != SAME else "–"
        prompts = f"{each.prompts} of {each.of}"
        table.add_row(
            *map(Text, (each.run, each.method, each.figure, shown(each.base), new, ratio, prompts, each.verdict))
        )
    return table


def _timings_table(timings: list[Timing]) -> Table:
    columns = ("run", "method", "", "sums [95 %]", "typical prompts [gated]", "prompts", "")
    table = _table("seconds per decoded token, NEW / BASE; above 1 is slower", columns)
    for each in timings:
        cells = (each.run, each.method, each.kind, _ratio(each.sums), _ratio(each.typical), str(each.units))
        table.add_row(*map(Text, (*cells, _said(each.verdict, each.why))))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None:
        return "–"
    between = f" [{ratio.interval.low:.3f}, {ratio.interval.high:.3f}]" if ratio.interval else ""
    return f"{ratio.value:.3f}{between}"


def _said(verdict: str, why: str | None) -> str:
    return f"{verdict}: {why}" if why else verdict
