"""The schemas themselves: edge cases by hand, and that they take nothing else. Real runs: test_report_command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from report_records import METHODS, record, records, summary
from schema_checks import check, errors, validator

from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.report import Lossless, MethodInfo, MethodRow, Report, report_json
from ecospec.harness.schemas import SCHEMAS, schema_path
from ecospec.harness.speedups import Spread
from ecospec.harness.stats import Interval, Ratio
from ecospec.harness.summary import summary_json


def batched() -> list[PromptRecord]:
    return [replace(each, batch="p1", step_share=max(each.steps, 1) / 2) for each in records()]


CASES: dict[str, Callable[[], Report]] = {
    "all": lambda: summary(records()),
    "no prompts": lambda: summary([]),
    "batches": lambda: summary(batched()),
    "dense": lambda: summary([replace(r, expert_pairs=0) for r in records()], moe_layers=0, expert_bytes=0, top_k=0),
    "yardsticks alone": lambda: summary(records(), [MethodInfo(AR), MethodInfo("oracle", true_routing=True)]),
    "scored, with bandwidth": lambda: summary(
        [replace(r, score=1.0) for r in records()], copy_bytes_per_second=1.0e9, check="sample"
    ),
    "violated": lambda: summary([replace(r, verdict="violated", ties=2, largest_gap=3.5) for r in records()]),
    "one method": lambda: summary(records(), METHODS[:1]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_report_fits(case: str) -> None:
    report = CASES[case]()
    check("report", report_json(report))
    check("summary", summary_json({"a": report, "b": report}))
    check("summary", summary_json({"a": report}, average=False))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_file_names_and_numbers_of_schemas(name: str) -> None:
    schema = json.loads(schema_path(name).read_text(encoding="utf-8"))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    validator(name)
    assert {path.name for path in schema_path(name).parent.glob("*.json")} == {f"{n}.schema.json" for n in SCHEMAS}


@pytest.mark.parametrize(
    ("schema", "where", "kind"),
    [
        ("report", ("row",), MethodRow),
        ("report", ("ratio",), Ratio),
        ("report", ("interval",), Interval),
        ("report", ("spread",), Spread),
        ("report", ("lossless",), Lossless),
        ("prompt-record", (), PromptRecord),
    ],
)
def test_a_schema_has_every_field_and_no_other(schema: str, where: tuple[str, ...], kind: type[Any]) -> None:
    found = json.loads(schema_path(schema).read_text(encoding="utf-8"))
    for key in where:
        found = found["$defs"][key]
    names = [field.name for field in fields(kind)]
    assert found["required"] == names == list(found["properties"])
    assert found["additionalProperties"] is False


def test_what_is_new_misspelt_or_of_another_kind_does_not_fit() -> None:
    plain = report_json(summary(records()))
    for change in (
        {"more": 1},
        {"schema": 2},
        {"prompts": -1},
        {"prompts": 1.5},
        {"rows": []},
        {"check": "some"},
        {"rows": [{**plain["rows"][0], "new": 1}]},
        {"rows": [{**plain["rows"][0], "speedup": 1.2}]},
        {"rows": [{**plain["rows"][0], "outside_target": 1.2}]},
        {"rows": [{**plain["rows"][0], "lossless": {**plain["rows"][0]["lossless"], "verdict": "fine"}}]},
        {"rows": [{key: value for key, value in plain["rows"][0].items() if key != "rho"}]},
    ):
        assert errors("report", {**plain, **change}), change
    line = asdict(record("p", AR, 3, 1.0, 2, 2, 8, (0, 0, 0, 1, 0)))
    check("prompt-record", line)
    for change in ({"steps": -1}, {"step_share": 0}, {"phase_seconds": {"verify": None}}, {"tokens": ["a"]}, {"x": 0}):
        assert errors("prompt-record", {**line, **change}), change
    counts = {"prompt_id": "p", "steps": {"AR": 2}, "counts": {"AR": [[1, 0.5]]}}
    check("activations", counts)
    assert errors("activations", {**counts, "counts": {"AR": []}})
    assert errors("activations", {**counts, "steps": {"AR": 0}})


def test_a_manifest_fits(bench: Callable[..., Any], tmp_path: Path) -> None:
    """The manifest of a real run, and what a reader may rely on in it."""
    assert bench("--output", "out").code == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    check("manifest", manifest)
    model = {"fixed_seconds": 1e-3, "pair_seconds": 0, "token_seconds": 0, "r_squared": None, "points": []}
    check("manifest", {**manifest, "cost_model": model, "something else": 1})
    for change in ({"methods": ["confidence", "AR"]}, {"cost_model": {}}, {"seed": "7"}, {"geometry": {}}):
        assert errors("manifest", {**manifest, **change}), change
