"""Finished runs in the layout of the EcoSpec paper's tables (arXiv 2607.12696), as Markdown.

Three lines a method: Spd, the speed-up over plain decoding (end to end); Len, the acceptance length α; Exp, the active
experts E. Other tables have ρ in the place of one of them. Means are plain means over the suites that have a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow
from ecospec.harness.report_markdown import markdown_table
from ecospec.harness.report_notes import NONE
from ecospec.harness.run_reading import RunData
from ecospec.harness.summary import ratio_value

AVERAGE = "Avg."


@dataclass(frozen=True)
class Figure:
    """A line of a table: its name there and what it is of a method."""

    label: str
    value: Callable[[MethodRow], float | None]
    digits: int


SPD = Figure("Spd", lambda row: ratio_value(row.speedup), 2)
LEN = Figure("Len", lambda row: row.acceptance_length, 2)
EXP = Figure("Exp", lambda row: row.active_experts, 2)
RHO = Figure("ρ", lambda row: row.rho, 3)
OVERLAP = Figure("overlap, %", lambda row: None if row.predicted_overlap is None else 100 * row.predicted_overlap, 1)


@dataclass(frozen=True)
class Setting:
    """What the runs of one table share, but for the axis that is its columns."""

    target: str
    temperature: float
    batch_size: int
    budget: int
    max_new_tokens: int
    limit: int | None
    acceptance: str | None

    def words(self, *left_out: str) -> str:
        """As in a table's title."""
        parts = {
            "target": self.target,
            "temperature": f"T = {self.temperature:g}",
            "budget": f"γ = {self.budget}",
            "max_new_tokens": f"at most {self.max_new_tokens} tokens",
            "limit": "" if self.limit is None else f"{self.limit} problems",
            "acceptance": f"acceptance {self.acceptance}" if self.acceptance else "",
            "batch_size": f"batches of {self.batch_size}" if self.batch_size > 1 else "",
        }
        return ", ".join(text for key, text in parts.items() if text and key not in left_out)


@dataclass(frozen=True)
class PaperRow:
    """One method of one run, under its full name."""

    setting: Setting
    suite: str
    method: str
    predictor: str | None
    row: MethodRow


def paper_tables(runs: Sequence[RunData]) -> str:
    """All tables that the runs have figures for.

    Of two runs with the same method, suite and setting, the earlier one's figures stand.
    """
    rows = _rows(runs)
    blocks = ["# Tables in the paper's layout"]
    for setting in dict.fromkeys(each.setting for each in rows):
        chosen = [each for each in rows if each.setting == setting]
        blocks += [f"## Table 1: {setting.words()}", _table(chosen, (SPD, LEN, EXP), lambda each: each.suite, True)]
        blocks += [f"## Time of a step in ms, mean over suites: {setting.words()}", _time_table(chosen)]
        if len({each.predictor for each in chosen} - {None}) > 1:
            blocks += [
                f"## Tables 9 and 10, predictors: {setting.words()}",
                _table(chosen, (OVERLAP, SPD, LEN, EXP), lambda each: each.suite, True),
            ]
    blocks += _by_axis(rows, "batch_size", "Tables 6 to 8, batch sizes", (SPD, EXP, RHO))
    blocks += _by_axis(rows, "budget", "Tables 11 and 12, budgets γ", (SPD, LEN, EXP))
    blocks += [
        "Spd: speed-up over plain decoding, end to end. Len: acceptance length α. Exp: active experts E per MoE "
        "layer and step. ρ = T_AR / T_verify. A dash: not measured, or not to be had (what looks at the target's "
        "true routing has no speed-up)."
    ]
    blocks += [f"- {run.name}: {run.unfinished}" for run in runs if run.missing]
    return "\n\n".join(blocks) + "\n"


def _rows(runs: Sequence[RunData]) -> list[PaperRow]:
    parts = [{each["label"]: each for each in run.manifest["method_parts"]} for run in runs]
    several = len({each["predictor"] for found in parts for each in found.values()} - {None}) > 1
    rows: dict[tuple[Setting, str, str], PaperRow] = {}
    for run, found in zip(runs, parts, strict=True):
        manifest = run.manifest
        setting = Setting(
            target=str(manifest["target"]),
            temperature=manifest["temperature"],
            batch_size=manifest["batch_size"],
            budget=manifest["budget"],
            max_new_tokens=manifest["max_new_tokens"],
            limit=manifest.get("limit"),
            acceptance=manifest["acceptance"] if manifest.get("estimated") else None,
        )
        for row in run.report.rows:
            made_of: Mapping[str, Any] = found.get(row.label, {"policy": row.label, "predictor": None})
            predictor = made_of["predictor"]
            name = f"{made_of['policy']} with {predictor}" if predictor and several else made_of["policy"]
            rows.setdefault(
                (setting, manifest["suite"], name), PaperRow(setting, manifest["suite"], name, predictor, row)
            )
    return list(rows.values())


def _by_axis(rows: Sequence[PaperRow], axis: str, title: str, figures: Sequence[Figure]) -> list[str]:
    """For every suite that was run at several values of an axis, a table with these as columns."""
    groups: dict[tuple[str, str], list[PaperRow]] = {}
    for each in rows:
        groups.setdefault((each.suite, each.setting.words(axis)), []).append(each)
    blocks = []
    for (suite, words), group in groups.items():
        if len({getattr(each.setting, axis) for each in group}) > 1:
            chosen = sorted(group, key=lambda each: int(getattr(each.setting, axis)))
            table = _table(chosen, figures, lambda each: str(getattr(each.setting, axis)), False)
            blocks += [f"## {title}: {suite}, {words}", table]
    return blocks


def _table(
    rows: Sequence[PaperRow], figures: Sequence[Figure], column: Callable[[PaperRow], str], average: bool
) -> str:
    columns = list(dict.fromkeys(map(column, rows)))
    lines = []
    for method in _methods(rows):
        found = {column(each): each.row for each in rows if each.method == method}
        for number, figure in enumerate(figures):
            values = {name: figure.value(found[name]) if name in found else None for name in columns}
            cells = [_cell(values[name], figure) for name in columns]
            known = [value for value in values.values() if value is not None]
            mean = [_cell(fmean(known) if known else None, figure)] if average else []
            lines.append([method if number == 0 else "", figure.label, *cells, *mean])
    return markdown_table(["", "", *columns, *([AVERAGE] if average else [])], lines)


def _time_table(rows: Sequence[PaperRow]) -> str:
    phases = list(dict.fromkeys(phase for each in rows for phase in each.row.phase_ms))
    lines = []
    for method in _methods(rows):
        found = [each.row for each in rows if each.method == method]
        times = [[row.phase_ms.get(phase) for row in found] for phase in phases]
        cells = [_mean(each, 3) for each in times]
        lines.append(
            [method, *cells, _mean([row.rho for row in found], 3), _mean([SPD.value(row) for row in found], 2)]
        )
    return markdown_table(["", *(f"T_{phase}" for phase in phases), "ρ", "Spd"], lines)


def _mean(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}" if known else NONE


def _methods(rows: Sequence[PaperRow]) -> list[str]:
    """Plain decoding first, the others as they come."""
    return sorted(dict.fromkeys(each.method for each in rows), key=lambda name: name != AR)


def _cell(value: float | None, figure: Figure) -> str:
    return NONE if value is None else f"{value:.{figure.digits}f}"
