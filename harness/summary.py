"""Several runs side by side, method by method: one line a suite and their average, or one line a batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from ecospec.harness.fitted_tables import Column as TableColumn
from ecospec.harness.fitted_tables import Kind, fitted_tables
from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow, Report, report_json
from ecospec.harness.report_markdown import markdown_table
from ecospec.harness.report_notes import NONE
from ecospec.harness.stats import Ratio

AVERAGE = "average"


@dataclass(frozen=True)
class Column:
    """A figure of one method on one suite; ``mean`` says whether the suites' values can be averaged."""

    label: str
    value: Callable[[MethodRow], float | None]
    digits: int = 3
    percent: bool = False


def ratio_value(ratio: Ratio | None) -> float | None:
    """The ratio itself, without its interval."""
    return None if ratio is None else ratio.value


COLUMNS = (
    Column("speed-up", lambda row: ratio_value(row.speedup)),
    Column("decode only", lambda row: ratio_value(row.decode_speedup)),
    Column("α", lambda row: row.acceptance_length, 2),
    Column("E", lambda row: row.active_experts, 2),
    Column("ρ", lambda row: row.rho),
    Column("tokens/s", lambda row: row.tokens_per_second, 1),
    Column("score", lambda row: row.score, 1, percent=True),
)


def summary_lines(reports: Mapping[str, Report], method: str, average: bool = True) -> list[list[str]]:
    """One method's cells: run, the columns, prompts, verdict; with ``average`` a last line is the mean.

    A column's mean is over the runs that have a value there, each with the same weight; "speed-up" is end to end,
    and α, E and ρ are each run's own.
    """
    rows = _rows(reports, method)
    lines = [
        [suite, *(cell_text(c, c.value(row)) for c in COLUMNS), str(reports[suite].prompts), _verdict(row)]
        for suite, row in rows.items()
    ]
    if not average:
        return lines
    means = []
    for column in COLUMNS:
        known = [value for row in rows.values() if (value := column.value(row)) is not None]
        means.append(cell_text(column, fmean(known) if known else None))
    return [*lines, [AVERAGE, *means, "", ""]]


def summary_header() -> list[str]:
    """The headings over `summary_lines`."""
    return ["run", *(column.label for column in COLUMNS), "prompts", "lossless"]


def summary_methods(reports: Mapping[str, Report]) -> list[str]:
    """The methods of all runs, plain decoding first; in a sweep not every run has each."""
    return list(dict.fromkeys(row.label for report in reports.values() for row in report.rows))


def summary_tables(reports: Mapping[str, Report], average: bool, width: int) -> list[Table]:
    """Tables for the terminal, method by method; over suites, AR's is left to the suites' own reports."""
    tables = []
    columns = [TableColumn(head, Kind.NAME if head == "run" else Kind.FIGURE) for head in summary_header()]
    for method in summary_methods(reports):
        if method == AR and average:
            continue
        lines = summary_lines(reports, method, average)
        tables += fitted_tables(method, columns, lines, width, ends=[len(lines) - 2] if average else [])
    return tables


def summary_markdown(reports: Mapping[str, Report], average: bool = True) -> str:
    """The same as a page."""
    blocks = ["# ecospec report: several runs"]
    for method in summary_methods(reports):
        blocks += [f"## {method}", markdown_table(summary_header(), summary_lines(reports, method, average))]
    return "\n\n".join(blocks) + "\n"


def summary_json(reports: Mapping[str, Report], average: bool = True) -> dict[str, Any]:
    """Every run's report, and with ``average`` the averages by method."""
    averages = {}
    for method in summary_methods(reports) if average else ():
        found = {}
        for column in COLUMNS:
            rows = _rows(reports, method).values()
            known = [value for row in rows if (value := column.value(row)) is not None]
            found[column.label] = fmean(known) if known else None
        averages[method] = found
    return {"schema": 2, "average": averages, "runs": {name: report_json(r) for name, r in reports.items()}}


def _rows(reports: Mapping[str, Report], method: str) -> dict[str, MethodRow]:
    """The rows of a method, of the runs that have it."""
    return {name: row for name, report in reports.items() for row in report.rows if row.label == method}


def _verdict(row: MethodRow) -> str:
    return "reference" if row.label == AR and (row.rows_per_step or 1.0) <= 1.0 else row.lossless.verdict


def cell_text(column: Column, value: float | None) -> str:
    """A figure as its column shows it, or a dash."""
    if value is None:
        return NONE
    return f"{value * 100:.{column.digits}f} %" if column.percent else f"{value:.{column.digits}f}"
