"""What a sweep amounts to: a row for every cell, means over suites, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ecospec.harness.grid import Cell, Grid, Point
from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow
from ecospec.harness.stats import Ratio
from ecospec.harness.summary import Column, ratio_value
from ecospec.harness.sweep_folder import FinishedRun

SCHEMA = 1
"""Version of what `sweep_json` gives; it changes when a key changes its name or meaning."""
AVERAGE = "average"
"""What stands in the place of a suite where a mean over suites is meant."""

SPEED_COLUMNS = (
    Column("speed-up", lambda row: ratio_value(row.speedup)),
    Column("decode only", lambda row: ratio_value(row.decode_speedup)),
    Column("over baseline", lambda row: ratio_value(row.over_baseline)),
)
INTERVALS: dict[str, Callable[[MethodRow], Ratio | None]] = {
    "speed-up": lambda row: row.speedup,
    "decode only": lambda row: row.decode_speedup,
}
"""Where a column has one, its ratio with the interval."""
VERIFICATION_COLUMNS = (
    Column("α", lambda row: row.acceptance_length),
    Column("E", lambda row: row.active_experts),
    Column("ρ", lambda row: row.rho),
    Column("predicted overlap", lambda row: row.predicted_overlap, 1, percent=True),
)
COLUMNS = (*SPEED_COLUMNS, *VERIFICATION_COLUMNS, Column("T_predict, ms", lambda row: row.phase_ms["predict"]))


@dataclass(frozen=True)
class CellResult:
    """A cell and its row of the report of the run that has it.

    Attributes:
        run: the name of that run's folder; empty where there is none yet.
        missing: why there is no row; empty where there is one.
    """

    cell: Cell
    row: MethodRow | None = None
    run: str = ""
    missing: str = ""

    @property
    def lossless(self) -> str:
        """The verdict, or that there is none."""
        return "missing" if self.row is None else self.row.lossless.verdict


@dataclass(frozen=True)
class Average:
    """The means over suites of cells that differ in nothing else.

    Attributes:
        cell: with `AVERAGE` as its suite.
        suites: those that are in the means.
        missing: those whose cell has no row.
        values: by column; None where no suite has a value.
    """

    cell: Cell
    suites: tuple[str, ...]
    missing: tuple[str, ...]
    values: dict[str, float | None]


def cell_results(
    cells: Sequence[Cell], done: Sequence[FinishedRun], reasons: Mapping[Cell, str]
) -> tuple[CellResult, ...]:
    """A result for every cell, in their order; of two runs that have it, the earlier one's.

    Args:
        reasons: why a cell has no run.
    """
    rows: dict[tuple[Point, tuple[str, str | None]], tuple[MethodRow, str]] = {}
    for run in done:
        by_label = {row.label: row for row in run.report.rows}
        for key, label in run.found.labels.items():
            rows.setdefault((run.found.point, key), (by_label[label], run.found.folder.name))
    return tuple(
        CellResult(cell, *rows[cell.point, cell.key])
        if (cell.point, cell.key) in rows
        else CellResult(cell, missing=reasons[cell])
        for cell in cells
    )


def averages(results: Sequence[CellResult]) -> tuple[Average, ...]:
    """For several suites, the mean over them at every combination of the other axes; for one, none.

    A column's mean is over the suites that have a value there, each with the same weight.
    """
    if len({result.cell.point.suite for result in results}) < 2:
        return ()
    groups: dict[Cell, list[CellResult]] = {}
    for result in results:
        point = dataclasses.replace(result.cell.point, suite=AVERAGE)
        groups.setdefault(dataclasses.replace(result.cell, point=point), []).append(result)
    return tuple(_average(cell, group) for cell, group in groups.items())


def _average(cell: Cell, group: Sequence[CellResult]) -> Average:
    rows = {result.cell.point.suite: result.row for result in group}
    values: dict[str, float | None] = {}
    for column in COLUMNS:
        known = [value for row in rows.values() if row is not None and (value := column.value(row)) is not None]
        values[column.label] = fmean(known) if known else None
    return Average(
        cell,
        suites=tuple(suite for suite, row in rows.items() if row is not None),
        missing=tuple(suite for suite, row in rows.items() if row is None),
        values=values,
    )


def sweep_json(grid: Grid, results: Sequence[CellResult], done: Sequence[FinishedRun]) -> dict[str, Any]:
    """The whole sweep as plain JSON values: its options, every run with AR's row, every cell, and the means."""
    axes = ("suite", "policy", "predictor", "temperature", "batch_size", "budget", "output", "resume")
    options = {key: value for key, value in dataclasses.asdict(grid.base).items() if key not in axes}
    found = {
        "schema": SCHEMA,
        "grid": grid.name or None,
        "options": options,
        "runs": [
            {
                "run": run.found.folder.name,
                **dataclasses.asdict(run.found.point),
                "prompts": run.report.prompts,
                "ar": next(dataclasses.asdict(row) for row in run.report.rows if row.label == AR),
            }
            for run in done
        ],
        "cells": [
            {
                **_axes(result.cell),
                "true_routing": result.cell.true_routing,
                "run": result.run or None,
                "missing": result.missing or None,
                "row": None if result.row is None else dataclasses.asdict(result.row),
            }
            for result in results
        ],
        "averages": [
            {
                **{key: value for key, value in _axes(average.cell).items() if key != "suite"},
                "suites": average.suites,
                "missing_suites": average.missing,
                "mean": average.values,
            }
            for average in averages(results)
        ],
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    return plain


def _axes(cell: Cell) -> dict[str, Any]:
    return {**dataclasses.asdict(cell.point), "policy": cell.policy, "predictor": cell.predictor}
