"""The paper's tables from runs whose figures can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from report_records import MANIFEST, METHODS, records, summary

from ecospec.harness.paper_tables import paper_tables
from ecospec.harness.run_reading import RunData

PARTS = [{"label": m.label, "policy": m.label, "predictor": None} for m in METHODS[1:]]


def run(name: str, suite: str = "gsm8k", **facts: Any) -> RunData:
    manifest = {**MANIFEST, "suite": suite, "batch_size": 1, "method_parts": PARTS, **facts}
    return RunData(name, Path(name), manifest, summary(records()), {}, missing=facts.get("missing", 0))


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, header first."""
    after = page.split(f"## {title}")[1].split("\n\n")[1]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()]
    return [line for line in lines if not line[0].startswith("---")]


def test_table_1_has_three_lines_a_method_and_a_column_a_suite() -> None:
    page = paper_tables([run("a"), run("b", "amc")])
    lines = table(page, "Table 1: embedded, T = 0, γ = 4")
    assert lines[0] == ["", "", "gsm8k", "amc", "Avg."]
    # Spd of confidence: 15 seconds of AR (3 of prefill) over 9; Len: 12 / 6; Exp: 42 pairs / 6 steps / 2 layers
    assert lines[4:7] == [
        ["confidence", "Spd", "1.67", "1.67", "1.67"],
        ["", "Len", "2.00", "2.00", "2.00"],
        ["", "Exp", "3.50", "3.50", "3.50"],
    ]
    assert lines[10] == ["oracle", "Spd", "–", "–", "–"]
    assert [line[0] for line in lines[1::3]] == ["AR", "confidence", "marginal", "oracle"]


def test_a_mean_is_over_the_suites_that_have_a_value() -> None:
    other = run("b", "amc")
    page = paper_tables([run("a"), RunData("b", other.folder, other.manifest, summary([]), {}, 3)])
    lines = table(page, "Table 1: embedded, T = 0, γ = 4")
    assert lines[5] == ["", "Len", "2.00", "–", "2.00"]
    assert "- b: interrupted: 0 of 3 prompts are finished" in page


def test_temperatures_and_targets_have_tables_of_their_own() -> None:
    page = paper_tables([run("a"), run("b", temperature=1.0), run("c", target="other")])
    for title in ("embedded, T = 0, γ = 4", "embedded, T = 1, γ = 4", "other, T = 0, γ = 4"):
        assert table(page, f"Table 1: {title}")[0] == ["", "", "gsm8k", "Avg."]
    assert "Tables 6 to 8" not in page
    assert "Tables 11 and 12" not in page


def test_batch_sizes_and_budgets_are_columns() -> None:
    page = paper_tables([run("a", batch_size=8), run("b"), run("c", batch_size=2), run("d", budget=5)])
    sizes = table(page, "Tables 6 to 8, batch sizes: gsm8k, embedded, T = 0, γ = 4")
    assert sizes[0] == ["", "", "1", "2", "8"]
    # ρ of confidence: AR's 10.8 s / 12 steps over 3.6 s / 6 steps
    assert sizes[6] == ["", "ρ", "1.500", "1.500", "1.500"]
    budgets = table(page, "Tables 11 and 12, budgets γ: gsm8k, embedded, T = 0")
    assert budgets[0] == ["", "", "4", "5"]


def test_the_time_of_a_step() -> None:
    lines = table(paper_tables([run("a")]), "Time of a step in ms, mean over suites: embedded, T = 0, γ = 4")
    header, confidence = lines[0], lines[2]
    assert confidence[header.index("T_verify")] == "600.000"
    assert confidence[header.index("T_draft")] == "200.000"
    assert confidence[header.index("ρ")] == "1.500"
    assert confidence[header.index("Spd")] == "1.67"


def test_several_predictors_are_named_and_compared() -> None:
    parts = [
        {"label": "confidence", "policy": "confidence", "predictor": None},
        {"label": "marginal", "policy": "marginal-cost", "predictor": "learned"},
        {"label": "oracle", "policy": "marginal-cost", "predictor": "oracle"},
    ]
    page = paper_tables([run("a", method_parts=parts)])
    lines = table(page, "Tables 9 and 10, predictors: embedded, T = 0, γ = 4")
    # overlap: 0.5 in 4 steps and 0.8 in 2
    assert ["marginal-cost with learned", "overlap, %", "60.0", "60.0"] in lines


def test_of_two_runs_with_a_method_the_first_counts() -> None:
    slower = [replace(each, prefill_seconds=9.0) if each.method != "AR" else each for each in records()]
    second = replace(run("a-2"), report=summary(slower))
    assert paper_tables([second]) != paper_tables([run("a")])
    assert paper_tables([run("a"), second]) == paper_tables([run("a")])
