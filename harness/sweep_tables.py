"""A sweep in words: one line a cell, on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecospec.harness.grid import Cell, Grid
from ecospec.harness.report import MethodRow
from ecospec.harness.report_markdown import markdown_table
from ecospec.harness.report_notes import NONE, caution_notes, widening
from ecospec.harness.report_text import interval_text
from ecospec.harness.summary import Column, cell_text
from ecospec.harness.sweep_folder import FinishedRun
from ecospec.harness.sweep_report import (
    AVERAGE,
    COLUMNS,
    INTERVALS,
    VERIFICATION_COLUMNS,
    Average,
    CellResult,
    averages,
)

AXES: dict[str, Callable[[Cell], str]] = {
    "suite": lambda cell: cell.point.suite,
    "temperature": lambda cell: f"{cell.point.temperature:g}",
    "batch size": lambda cell: str(cell.point.batch_size),
    "γ": lambda cell: str(cell.point.budget),
    "policy": lambda cell: cell.policy,
    "predictor": lambda cell: cell.predictor or NONE,
}
SPEED, VERIFICATION = "speed-up over plain decoding", "verification metrics"
TRUE_ROUTING = (
    "what looks at the target's true routing (the oracles) has verification metrics only: an extra pass outside all "
    "timing gives it that, so that a speed-up would be false"
)


@dataclass(frozen=True)
class TableLine:
    """A line's cells from left to right; ``ends_group``: a gap follows."""

    cells: tuple[str, ...]
    ends_group: bool = False


@dataclass(frozen=True)
class SweepTable:
    """One of a sweep's tables; ``axes`` of its columns, the first ones, say which cell a line is."""

    title: str
    header: tuple[str, ...]
    axes: int
    lines: tuple[TableLine, ...]


def sweep_tables(results: Sequence[CellResult], intervals: bool = True, split: bool = False) -> list[SweepTable]:
    """Cells with a speed-up in one table; where some have none, the verification metrics of all in another.

    Args:
        intervals: whether speed-ups have theirs behind them.
        split: whether the verification metrics of all are in the other table only.
    """
    honest = [result for result in results if not result.cell.true_routing]
    axes = _varying([result.cell for result in results])
    columns = [column for column in COLUMNS if not (split and column in VERIFICATION_COLUMNS)]
    tables = [_table(SPEED, honest, axes, columns, intervals)] if honest else []
    if split or len(honest) < len(results):
        tables.append(_table(VERIFICATION, results, axes, VERIFICATION_COLUMNS, intervals))
    return tables


def _varying(cells: Sequence[Cell]) -> list[str]:
    """The axes along which cells differ, and the policy; not having a predictor is no difference."""
    return [
        name for name, value in AXES.items() if name == "policy" or len({value(cell) for cell in cells} - {NONE}) > 1
    ]


def _table(
    title: str, results: Sequence[CellResult], axes: Sequence[str], columns: Sequence[Column], intervals: bool
) -> SweepTable:
    texts = [
        (result.cell, _figures(result.row, columns, intervals), result.lossless, result.cell.point.suite)
        for result in results
    ]
    texts += [
        (mean.cell, [cell_text(column, mean.values[column.label]) for column in columns], "", _average_of(mean))
        for mean in averages(results)
    ]
    lines = []
    for index, (cell, figures, lossless, suite) in enumerate(texts):
        names = [suite if axis == "suite" else AXES[axis](cell) for axis in axes]
        following = texts[index + 1][0] if index + 1 < len(texts) else cell
        lines.append(TableLine((*names, *figures, lossless), _ends_group(cell, following, results)))
    return SweepTable(title, (*axes, *(column.label for column in columns), "lossless"), len(axes), tuple(lines))


def _ends_group(cell: Cell, following: Cell, results: Sequence[CellResult]) -> bool:
    """A group is a run's methods; where runs have one line each, it is a suite's runs."""
    single = len({result.cell.point for result in results}) == len(results)
    return cell.point.suite != following.point.suite if single else cell.point != following.point


def _average_of(average: Average) -> str:
    counted, missing = len(average.suites), len(average.missing)
    return f"{AVERAGE} of {counted} of {counted + missing}" if missing else AVERAGE


def _figures(row: MethodRow | None, columns: Sequence[Column], intervals: bool) -> list[str]:
    if row is None:
        return [NONE] * len(columns)
    return [f"{cell_text(column, column.value(row))}{_behind(row, column) if intervals else ''}" for column in columns]


def _behind(row: MethodRow, column: Column) -> str:
    ratio = INTERVALS[column.label](row) if column.label in INTERVALS else None
    return f" ({interval_text(ratio)})" if ratio is not None and ratio.interval is not None else ""


def terminal_tables(tables: Sequence[SweepTable]) -> list[Table]:
    """The tables for the terminal, a heading's words below each other."""
    found = []
    for each in tables:
        table = Table(title=Text(each.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for index, label in enumerate(each.header):
            right = each.axes <= index < len(each.header) - 1
            table.add_column(label.replace(" ", "\n"), justify="right" if right else "left", overflow="fold")
        for line in each.lines:
            table.add_row(*map(Text, line.cells), end_section=line.ends_group)
        found.append(table)
    return found


def tables_width(tables: Sequence[Table]) -> int:
    """Columns that they need for nothing to fold."""
    measure = Console(width=10_000).measure
    return max((measure(table).maximum for table in tables), default=0)


def fitting_tables(results: Sequence[CellResult], width: int) -> list[Table]:
    """The tables with all that ``width`` has room for: intervals go first, then the columns are split."""
    layouts = ((True, False), (False, False), (False, True))
    found = [terminal_tables(sweep_tables(results, *layout)) for layout in layouts]
    return next((tables for tables in found if tables_width(tables) <= width), found[-1])


def print_sweep(results: Sequence[CellResult], done: Sequence[FinishedRun], console: Console) -> None:
    """Headline, tables and notes. Off a terminal (a file, a pipe) the console is made as wide as they need."""
    if not console.is_terminal:
        console.width = max(console.width, tables_width(terminal_tables(sweep_tables(results))))
    for text in (sweep_headline(results, done), ""):
        console.print(Text(text), soft_wrap=not console.is_terminal)
    for table in fitting_tables(results, console.width):
        console.print(table)
    for note in sweep_notes(results, done):
        console.print(Text(note), soft_wrap=not console.is_terminal)


def fixed_axes(results: Sequence[CellResult]) -> str:
    """The axes that no table has as a column, with their one value."""
    cells = [result.cell for result in results]
    values = {name: list(dict.fromkeys(value(cell) for cell in cells)) for name, value in AXES.items()}
    varying = _varying(cells)
    return ", ".join(
        f"{name} {', '.join(value for value in found if value != NONE)}"
        for name, found in values.items()
        if name not in varying and set(found) - {NONE}
    )


def sweep_headline(results: Sequence[CellResult], done: Sequence[FinishedRun]) -> str:
    """Where the data come from, and what was run on what; what differs between runs is given more than once."""
    if not done:
        return "no run is finished yet"

    def found(key: str, more: Callable[[Mapping[str, Any]], str] = lambda manifest: "") -> str:
        manifests = [run.found.manifest for run in done]
        return ", ".join(dict.fromkeys(f"{manifest[key]}{more(manifest)}" for manifest in manifests))

    return (
        f"{found('source')} · target {found('target', widening)} · at most {found('max_new_tokens')} new tokens · "
        f"{found('prompts')} prompts · {found('dtype')} · {found('device')} · threads {found('threads')} · "
        f"baseline {found('baseline')} · {fixed_axes(results)}"
    )


def sweep_notes(results: Sequence[CellResult], done: Sequence[FinishedRun]) -> list[str]:
    """One line for each thing that a reader of the tables must know, missing cells first."""
    sees_routing = any(result.cell.true_routing for result in results)
    return [*_missing_notes(results), *_caution_notes(done), *([TRUE_ROUTING] if sees_routing else [])]


def _caution_notes(done: Sequence[FinishedRun]) -> Iterator[str]:
    """The runs' own, once each, with the suites that they are about where they are not about all."""
    suites: dict[str, list[str]] = {}
    for run in done:
        for note in caution_notes(run.report, run.found.manifest):
            suites.setdefault(note, []).append(run.found.point.suite)
    for note, names in suites.items():
        yield note if len(names) == len(done) else f"{', '.join(dict.fromkeys(names))}: {note}"


def _missing_notes(results: Sequence[CellResult]) -> Iterator[str]:
    missing: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.row is None:
            missing.setdefault((result.cell.point.name, result.missing), []).append(result.cell.method)
    for (point, reason), methods in missing.items():
        yield f"missing: {point}, {', '.join(methods)} ({reason})"


def sweep_markdown(grid: Grid, results: Sequence[CellResult], done: Sequence[FinishedRun]) -> str:
    """The same as a page, with the run folder of each point."""
    blocks = [f"# ecospec sweep{f': {grid.name}' if grid.name else ''}", sweep_headline(results, done)]
    for table in sweep_tables(results):
        blocks += [f"## {table.title}", markdown_table(table.header, [line.cells for line in table.lines])]
    blocks += ["## Notes", "\n".join(f"- {note}" for note in sweep_notes(results, done))]
    runs = dict.fromkeys(result.run for result in results if result.run)
    blocks += ["## Runs", "\n".join(f"- {run}/report.md" for run in runs)]
    return "\n\n".join(block for block in blocks if block) + "\n"
