"""A report as comma-separated values: what its columns say of a run and of a method."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from report_records import MANIFEST, records, summary

from ecospec.harness.report_csv import method_columns, report_csv, run_columns
from ecospec.harness.run_reading import RunData

DOCS = Path(__file__).parents[2] / "docs" / "reports.md"
PARTS = [
    {"label": "confidence", "policy": "confidence", "predictor": None},
    {"label": "marginal", "policy": "marginal-cost:epsilon=2", "predictor": "learned:path=x"},
    {"label": "oracle", "policy": "oracle", "predictor": None},
]
USED: dict[str, Any] = {
    "estimated": True,
    "acceptance": "isotonic",
    "cost_model": {"measured": "2026-01-02T03:04:05+00:00", "r_squared": 0.98765},
    "cost_model_sha256": "c" * 64,
}


def run(name: str, **facts: Any) -> RunData:
    manifest = {**MANIFEST, "batch_size": 2, "limit": 7, "method_parts": PARTS, **facts}
    return RunData(name, Path(name), manifest, summary(records()), {}, missing=1)


def lines_of(*runs: RunData) -> list[dict[str, str]]:
    return list(csv.DictReader(report_csv(runs).splitlines()))


def test_a_line_says_what_was_run() -> None:
    lines = lines_of(run("a", **USED), run("b"))
    assert {key: lines[1][key] for key in run_columns(run("a"))} == {
        "run": "a",
        "suite": "gsm8k",
        "target": "embedded",
        "widened": "8",
        "drafter": "embedded",
        "draft_steps": "3",
        "draft_topk": "2",
        "temperature": "0.0",
        "batch_size": "2",
        "budget": "4",
        "max_new_tokens": "128",
        "limit": "7",
        "dtype": "float32",
        "device": "cpu",
        "acceptance": "isotonic",
        "cost_model": "measured 2026-01-02T03:04:05+00:00, R² 0.988",
        "cost_model_sha256": "c" * 64,
        "prompts": "3",
        "prompts_missing": "1",
    }


def test_what_no_method_of_a_run_looks_at_is_an_empty_cell() -> None:
    lines = lines_of(run("a", **USED), run("b", acceptance="learned", estimated=False, cost_model=None))
    for key in ("acceptance", "cost_model", "cost_model_sha256"):
        assert {line[key] for line in lines if line["run"] == "b"} == {""}


def test_a_line_has_the_policy_and_the_predictor_of_its_own_method() -> None:
    found = {line["label"]: (line["policy"], line["predictor"]) for line in lines_of(run("a"))}
    assert found == {
        "AR": ("", ""),
        "confidence": ("confidence", ""),
        "marginal": ("marginal-cost:epsilon=2", "learned:path=x"),
        "oracle": ("oracle", ""),
    }


def test_a_projection_is_named_as_one() -> None:
    (line, *_) = lines_of(run("a", cost_model={"projection": "a large model", "r_squared": None}))
    assert line["cost_model"] == "a projection, a large model"


def test_the_columns_before_the_figures_are_documented() -> None:
    lines = lines_of(run("a", **USED))
    before = list(lines[0])[: list(lines[0]).index("label")]
    assert before == [*run_columns(run("a")), *method_columns(run("a"), "marginal")]
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in before if f"`{name}`" not in text.split("**CSV**")[1].split("**paper**")[0]] == []
