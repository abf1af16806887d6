"""A sweep's combined report, worked out by hand from made-up records."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_records import MANIFEST, record
from rich.console import Console

from ecospec.harness.config import RunConfig
from ecospec.harness.grid import Cell, Grid, Point
from ecospec.harness.records import AR
from ecospec.harness.report import MethodInfo, Report, report_json, summarise
from ecospec.harness.report_reading import read_report
from ecospec.harness.sweep_folder import FinishedRun, FoundRun
from ecospec.harness.sweep_report import averages, cell_results, sweep_json
from ecospec.harness.sweep_tables import print_sweep, sweep_headline, sweep_markdown, sweep_notes, sweep_tables

METHODS = {("confidence", None): "confidence", ("marginal", "learned"): "marginal", ("marginal", "oracle"): "seeing"}


def point(suite: str, budget: int = 4) -> Point:
    return Point(suite, 0.0, 1, budget)


def cells(*points: Point) -> list[Cell]:
    return [
        Cell(each, policy, predictor, true_routing=predictor == "oracle", baseline=policy == "confidence")
        for each in points
        for policy, predictor in METHODS
    ]


def report(ar: float, seconds: float, steps: int, pairs: int, prompts: int = 1) -> Report:
    """Plain decoding takes `ar` seconds for 12 steps of 4 pairs, the policy `seconds` for `steps` of `pairs` in all."""
    found = []
    for prompt in map(str, range(prompts)):
        found += [
            record(prompt, AR, 13, ar, 12, 12, 48, (0, 0, 0, ar, 0)),
            record(prompt, "confidence", 13, ar, 6, 24, 48, (0, 0, 0, ar, 0)),
            record(prompt, "marginal", 13, seconds, steps, 20, pairs, (0, 0.5, 0, seconds, 0), predicted_overlap=0.5),
            record(prompt, "seeing", 13, seconds, steps, 20, pairs, (0, 0, 0, seconds, 0), predicted_overlap=1.0),
        ]
    methods = [MethodInfo(label, true_routing=label == "seeing") for label in (AR, *METHODS.values())]
    return summarise(found, methods=methods, moe_layers=2, top_k=2, expert_bytes=1, always_read_bytes=1, check="all")


def run(at: Point, of: Report, name: str = "") -> FinishedRun:
    manifest = {**MANIFEST, "suite": at.suite, "prompts": 1, "baseline": "confidence"}
    return FinishedRun(FoundRun(at, Path(name or at.name), manifest, METHODS, dict.fromkeys(METHODS)), of)


def lines(done: list[FinishedRun], asked: list[Cell], title: str) -> list[list[str]]:
    results = cell_results(asked, done, dict.fromkeys(asked, "interrupted"))
    (table,) = [table for table in sweep_tables(results) if table.title == title]
    return [list(table.header), *(list(line.cells) for line in table.lines)]


X, Y = run(point("x"), report(12.0, 6.0, 4, 40)), run(point("y"), report(12.0, 12.0, 6, 72))


def test_every_suite_weighs_the_same_in_the_means() -> None:
    """Speed-up of x is 13 tokens in 13 s over 13 in 7 s, decode only 12 / 6; of y both are 1. α: 12 / 4 and 12 / 6;
    E: 40 / 4 / 2 and 72 / 6 / 2; ρ: (12 / 12) / (6 / 4) and (12 / 12) / (12 / 6); T_predict: 0.5 s / 4 and / 6."""
    asked = cells(point("x"), point("y"))
    figures = ["speed-up", "decode only", "over baseline", "α", "E", "ρ", "predicted overlap", "T_predict, ms"]
    assert lines([X, Y], asked, "speed-up over plain decoding") == [
        ["suite", "policy", "predictor", *figures, "lossless"],
        ["x", "confidence", "–", "1.000", "1.000", "–", "2.000", "4.000", "0.500", "–", "–", "exact"],
        [
            "x",
            "marginal",
            "learned",
            "1.857",
            "2.000",
            "2.000",
            "3.000",
            "5.000",
            "0.667",
            "50.0 %",
            "125.000",
            "exact",
        ],
        ["y", "confidence", "–", "1.000", "1.000", "–", "2.000", "4.000", "0.500", "–", "–", "exact"],
        ["y", "marginal", "learned", "1.000", "1.000", "1.000", "2.000", "6.000", "0.500", "50.0 %", "83.333", "exact"],
        ["average", "confidence", "–", "1.000", "1.000", "–", "2.000", "4.000", "0.500", "–", "–", ""],
        [
            "average",
            "marginal",
            "learned",
            "1.429",
            "1.500",
            "1.500",
            "2.500",
            "5.500",
            "0.583",
            "50.0 %",
            "104.167",
            "",
        ],
    ]
    assert lines([X, Y], asked, "verification metrics")[-3:] == [
        ["average", "confidence", "–", "2.000", "4.000", "0.500", "–", ""],
        ["average", "marginal", "learned", "2.500", "5.500", "0.583", "50.0 %", ""],
        ["average", "marginal", "oracle", "2.500", "5.500", "0.583", "100.0 %", ""],
    ]


def test_means_are_taken_apart_along_every_other_axis() -> None:
    budgets = [point(suite, budget) for suite in ("x", "y") for budget in (3, 4)]
    seconds = dict(zip(budgets, (6.0, 12.0, 3.0, 4.0), strict=True))
    done = [run(at, report(12.0, seconds[at], 4, 40)) for at in budgets]
    asked = cells(*budgets)
    found = {
        (mean.cell.point.budget, mean.cell.policy): mean.values["decode only"]
        for mean in averages(cell_results(asked, done, {}))
        if mean.cell.predictor != "oracle"
    }
    assert found == {
        (3, "confidence"): 1.0,
        (3, "marginal"): pytest.approx((12 / 6 + 12 / 3) / 2),
        (4, "confidence"): 1.0,
        (4, "marginal"): pytest.approx((12 / 12 + 12 / 4) / 2),
    }


def test_a_missing_cell_is_a_line_a_note_and_named_in_the_mean() -> None:
    asked = cells(point("x"), point("y"))
    assert [line[:4] + line[-1:] for line in lines([X], asked, "speed-up over plain decoding")[1:]] == [
        ["x", "confidence", "–", "1.000", "exact"],
        ["x", "marginal", "learned", "1.857", "exact"],
        ["y", "confidence", "–", "–", "missing"],
        ["y", "marginal", "learned", "–", "missing"],
        ["average of 1 of 2", "confidence", "–", "1.000", ""],
        ["average of 1 of 2", "marginal", "learned", "1.857", ""],
    ]
    results = cell_results(asked, [X], dict.fromkeys(asked, "interrupted"))
    said = "missing: y-t0-b1-g4, confidence, marginal with learned, marginal with oracle (interrupted)"
    assert sweep_notes(results, [X])[0] == said
    plain = sweep_json(Grid("", RunConfig("", ()), ("x", "y"), (0.0,), (1,), (4,)), results, [X])
    assert [cell["missing"] for cell in plain["cells"]] == [None] * 3 + ["interrupted"] * 3
    assert [(mean["suites"], mean["missing_suites"]) for mean in plain["averages"]] == [(["x"], ["y"])] * 3
    assert sweep_headline([], []) == "no run is finished yet"


def test_of_two_runs_with_a_method_the_first_one_counts() -> None:
    again = run(point("x"), report(12.0, 3.0, 4, 40), name="x-t0-b1-g4-2")
    results = cell_results(cells(point("x")), [X, again], {})
    assert {result.run for result in results} == {"x-t0-b1-g4"}


def test_only_axes_that_vary_are_columns() -> None:
    alike = [cell for cell in cells(point("x")) if cell.predictor != "oracle"]
    assert lines([X], alike, "speed-up over plain decoding")[0][:2] == ["policy", "speed-up"]
    other = [replace(cell, point=Point("x", 0.5, 2, 4)) for cell in alike]
    done = [X, run(Point("x", 0.5, 2, 4), report(12.0, 6.0, 4, 40))]
    header, first, *_, last = lines(done, [*alike, *other], "speed-up over plain decoding")
    assert header[:3] == ["temperature", "batch size", "policy"]
    assert (first[:3], last[:3]) == (["0", "1", "confidence"], ["0.5", "2", "marginal"])


def printed(done: list[FinishedRun], width: int, terminal: bool) -> str:
    file = io.StringIO()
    asked = cells(*(each.found.point for each in done))
    print_sweep(
        cell_results(asked, done, {}), done, Console(file=file, width=width, force_terminal=terminal, color_system=None)
    )
    return file.getvalue()


def test_a_narrow_terminal_gets_no_intervals_and_then_fewer_columns_a_table() -> None:
    """Decode only: prompts of ratio 1 and 2, so that a resample can have either twice."""
    done = [run(point("x"), varied())]
    for width, terminal in ((140, True), (60, False)):
        assert "1.333 (1.000–2.000)" in printed(done, width, terminal)
    for width in (126, 80):
        narrow = printed(done, width, terminal=True)
        assert "1.333" in narrow
        assert "2.000)" not in narrow
        assert (narrow.count("lossless"), narrow.count("overlap")) == ((2, 2) if width == 126 else (2, 1))
        tables = narrow[narrow.index("speed-up over") : narrow.index("prompts are too few")]
        for word in ("confidence", "marginal", "learned", "T_predict,", "predicted", "1.333"):
            assert word in tables  # unbroken


def varied() -> Report:
    """Two prompts: marginal is as fast as plain decoding on one and twice as fast on the other."""
    found = []
    for prompt, seconds in (("a", 12.0), ("b", 6.0)):
        for label in (AR, *METHODS.values()):
            taken = seconds if label == "marginal" else 12.0
            found.append(record(prompt, label, 13, taken, 12, 12, 48, (0, 0, 0, taken, 0)))
    methods = [MethodInfo(label, true_routing=label == "seeing") for label in (AR, *METHODS.values())]
    return summarise(found, methods=methods, moe_layers=2, top_k=2, expert_bytes=1, always_read_bytes=1, check="all")


def test_a_note_about_some_suites_names_them() -> None:
    short = run(point("y"), report(12.0, 6.0, 4, 40, prompts=2))
    results = cell_results(cells(point("x"), point("y")), [X, short], {})
    found = sweep_notes(results, [X, short])
    assert found[0].startswith("x: 1 prompt is too few")
    assert found[1].startswith("the embedded model is test equipment")
    assert found[2].startswith("y: 2 prompts are too few")
    assert found[3].startswith("what looks at the target's true routing")


def test_the_page_and_the_json_hold_the_same_cells() -> None:
    grid = Grid("mine.yaml", RunConfig("", ("marginal",), limit=3), ("x", "y"), (0.0,), (1,), (4,))
    results = cell_results(cells(point("x"), point("y")), [X, Y], {})
    page = sweep_markdown(grid, results, [X, Y])
    assert page.startswith("# ecospec sweep: mine.yaml\n\nembedded sample · target embedded (experts widened ×8")
    assert "| x | marginal | learned | 1.857 | 2.000 |" in page
    assert "- y-t0-b1-g4/report.md" in page
    plain: dict[str, Any] = sweep_json(grid, results, [X, Y])
    assert (plain["schema"], plain["grid"], plain["options"]["limit"]) == (1, "mine.yaml", 3)
    assert plain["cells"][1]["row"] == report_json(X.report)["rows"][2]
    names = ("suite", "temperature", "batch_size", "budget", "policy", "predictor")
    assert [plain["cells"][1][name] for name in names] == ["x", 0.0, 1, 4, "marginal", "learned"]
    assert plain["averages"][1]["mean"]["speed-up"] == pytest.approx((13 / 7 + 1) / 2)
    assert [run["ar"]["acceptance_length"] for run in plain["runs"]] == [1.0, 1.0]


def test_a_report_is_read_back_as_it_was_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for whole in (X.report, varied()):
        path.write_text(json.dumps(report_json(whole)), encoding="utf-8")
        assert read_report(path) == whole
    plain = report_json(X.report)
    damaged: list[Any] = [
        {**plain, "schema": 2},
        {**plain, "more": 1},
        {**plain, "rows": [{"label": "AR"}]},
        {key: value for key, value in plain.items() if key != "rows"},
        [],
    ]
    for raw in (*map(json.dumps, damaged), "{", ""):
        path.write_text(raw, encoding="utf-8")
        assert read_report(path) is None
    assert read_report(tmp_path / "none.json") is None
