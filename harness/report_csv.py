"""A report as comma-separated values: one line a run and method, one column a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ecospec.harness.report import report_json
from ecospec.harness.report_notes import cost_words
from ecospec.harness.run_reading import RunData

RUN_COLUMNS = (
    "suite",
    "target",
    "widened",
    "drafter",
    "draft_steps",
    "draft_topk",
    "temperature",
    "batch_size",
    "budget",
    "max_new_tokens",
    "limit",
    "dtype",
    "device",
)
"""Of the manifest, what tells runs apart."""


def run_columns(run: RunData) -> dict[str, Any]:
    """What a method's line says of its run; the estimator and the cost model are of the methods that look at them."""
    return {
        "run": run.name,
        **{key: run.manifest.get(key) for key in RUN_COLUMNS},
        "acceptance": run.manifest.get("acceptance") if run.manifest.get("estimated") else None,
        "cost_model": cost_words(run.manifest) or None,
        "cost_model_sha256": run.manifest.get("cost_model_sha256"),
        "prompts": run.report.prompts,
        "prompts_missing": run.missing,
    }


def method_columns(run: RunData, label: str) -> dict[str, Any]:
    """The policy and the predictor of a method; plain decoding has neither."""
    parts: Mapping[str, Mapping[str, Any]] = {each["label"]: each for each in run.manifest.get("method_parts", ())}
    found = parts.get(label, {})
    return {"policy": found.get("policy"), "predictor": found.get("predictor")}


def report_csv(runs: Sequence[RunData]) -> str:
    """All methods of some runs; a figure that cannot be had is an empty cell.

    The columns are the run's name and options, its prompts, the method's parts, and then the keys of a row of
    ``report.json`` in their order: a key inside another has both names (``phase_ms_verify``), an interval stands behind
    its ratio (``speedup``, ``speedup_low``, ``speedup_high``), and a list has a column an entry, from 1.
    """
    lines: list[dict[str, Any]] = []
    for run in runs:
        for row in report_json(run.report)["rows"]:
            lines.append({**run_columns(run), **method_columns(run, row["label"]), **row})
    # Not by line: what one method lacks stands where another has it.
    cells: list[dict[str, Any]] = [{} for _ in lines]
    columns: list[str] = []
    for key in dict.fromkeys(key for line in lines for key in line):
        flat = [{} if line.get(key) is None else _flat(key, line[key]) for line in lines]
        columns += dict.fromkeys(name for each in flat for name in each) or [key]
        for cell, each in zip(cells, flat, strict=True):
            cell |= each
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {f"{name}_{number}": each for number, each in enumerate(value, 1)}
    if not isinstance(value, dict):
        return {name: value}
    if "interval" in value:
        interval = value["interval"] or {"low": None, "high": None}
        return {name: value["value"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= _flat(f"{name}_{key}", each)
    return found
