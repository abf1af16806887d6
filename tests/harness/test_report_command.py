"""``ecospec-bench report``: finished, interrupted and several runs anew, in every format, checked against schemas."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from html_pages import read_page
from schema_checks import check
from tiny_checkpoints import Checkpoints

from ecospec.harness import runner
from ecospec.harness.report import report_json
from ecospec.harness.report_reading import read_report

POLICIES = "confidence,marginal,oracle"


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def lines_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def check_run(folder: Path, *, experts: bool = True) -> None:
    """All files of a run folder against their schemas."""
    check("manifest", json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    check("report", figures(folder))
    for name, schema in (("prompts.jsonl", "prompt-record"), ("activations.jsonl", "activations")):
        if name != "activations.jsonl" or experts:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            assert lines
            for line in lines:
                check(schema, json.loads(line))


@pytest.mark.usefixtures("real_pages")
def test_a_finished_run_gives_the_same_reports_again(
    bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    ran = bench("--policy", POLICIES, "--output", "out")
    assert ran.code == 0, ran.err
    folder = tmp_path / "out"
    check_run(folder)
    for kind, name in (("json", "report.json"), ("markdown", "report.md"), ("csv", "report.csv")):
        again = command("report", "out", "--format", kind)
        assert again.code == 0, again.err
        assert again.out == (folder / name).read_text(encoding="utf-8")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert command("report", "out").out == "written to out/report.html\n"
    assert (folder / "report.html").read_text(encoding="utf-8") == page
    read = read_page(page)
    assert read.fetched == []
    assert {"speed", "plane", "time", "depth", "load", "experts-1"} <= set(read.ids)
    assert command("report", "out", "--format", "paper", "--output", "paper.md").code == 0
    assert "| oracle | Spd | – | – |" in (tmp_path / "paper.md").read_text(encoding="utf-8")


def test_the_csv_has_a_line_a_method_and_numbers_as_numbers(bench: Callable[..., Any], tmp_path: Path) -> None:
    assert bench("--policy", POLICIES, "--output", "out").code == 0
    lines = lines_of((tmp_path / "out" / "report.csv").read_text(encoding="utf-8"))
    rows = figures(tmp_path / "out")["rows"]
    assert [line["label"] for line in lines] == [row["label"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert (line["suite"], line["budget"], line["prompts"]) == ("gsm8k", "4", "2")
        assert float(line["acceptance_length"]) == row["acceptance_length"]
        assert float(line["phase_ms_verify"]) == row["phase_ms"]["verify"]
        assert line["lossless_verdict"] == row["lossless"]["verdict"]
        if row["speedup"] is None:
            assert {line["speedup"], line["speedup_low"], line["decode_spread_median"]} == {""}
        else:
            assert float(line["speedup"]) == row["speedup"]["value"]
            interval = row["speedup"]["interval"] or {"low": "", "high": ""}
            assert (line["speedup_low"], line["speedup_high"]) == (str(interval["low"]), str(interval["high"]))
    report = read_report(tmp_path / "out" / "report.json")
    assert report is not None
    assert report_json(report) == figures(tmp_path / "out")
    assert isinstance(report.rows[1].reached_by_depth, tuple)
    names = list(lines[0])
    assert names.index("speedup_low") == names.index("speedup") + 1
    assert len(set(names)) == len(names)
    assert "decode_spread" not in names


def test_what_was_not_begun_of_several_is_named(
    bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    assert bench("--limit", 1, "--output", "all", suite="gsm8k,amc").code == 0
    assert "not begun" not in command("report", "all", "--format", "csv").err
    shutil.rmtree(tmp_path / "all" / "amc")
    ran = command("report", "all", "--format", "csv")
    assert ran.code == 0
    assert "ecospec-bench: amc: not begun, so that nothing of it is counted" in ran.err
    assert "not begun" not in command("report", "all/gsm8k", "--format", "csv").err


@pytest.mark.usefixtures("real_pages")
def test_an_interrupted_run_says_so_in_every_format(
    bench: Callable[..., Any], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, calls = runner.append_records, []

    def stop_after_one(path: Path, records: Any) -> None:
        real(path, records)
        calls.extend([1] if records else [])
        if calls:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_records", stop_after_one)
        assert bench("--limit", 3, "--output", "out").code == 130
    assert not (tmp_path / "out" / "report.json").exists()
    said = "interrupted: 1 of 3 prompts are finished, and only these are counted"
    for kind in ("json", "markdown", "csv", "paper"):
        ran = command("report", "out", "--format", kind)
        assert ran.code == 0, ran.err
        assert said in ran.err
        if kind in ("markdown", "paper"):
            assert said in ran.out
        if kind == "csv":
            assert {(line["prompts"], line["prompts_missing"]) for line in lines_of(ran.out)} == {("1", "2")}
        if kind == "json":
            check("report", json.loads(ran.out))
    assert command("report", "out", "--output", "page.html").code == 0
    page = read_page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert said in page.text
    assert "the run is not finished (2 prompts to go)" in page.text
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("real_pages")
def test_several_runs_have_one_report(bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path) -> None:
    ran = bench("--policy", "marginal", "--limit", 1, "--output", "out", suite="mtbench,amc")
    assert ran.code == 0, ran.err
    folder = tmp_path / "out"
    check("summary", json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    check_run(folder / "mtbench")
    assert command("report", "out", "--format", "json").out == (folder / "summary.json").read_text()
    assert command("report", "out", "--format", "markdown").out == (folder / "summary.md").read_text()
    lines = lines_of(command("report", "out", "--format", "csv").out)
    assert [line["run"] for line in lines] == ["mtbench"] * 3 + ["amc"] * 3
    page = read_page((folder / "summary.html").read_text(encoding="utf-8"))
    assert page.links == ["mtbench/report.html", "amc/report.html"]
    assert all((folder / link).is_file() for link in page.links)
    (folder / "amc" / "report.html").unlink()
    assert command("report", "out").out == "written to out/summary.html\n"
    assert (folder / "amc" / "report.html").is_file()
    paper = command("report", "out", "--format", "paper").out
    assert "|  |  | mtbench | amc | Avg. |" in paper


def test_a_sweep_has_the_paper_s_tables(
    command: Callable[..., Any], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)
    parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter, "--data", "embedded")
    sizes = ("--budget", "3,4", "--limit", 1, "--max-new-tokens", 6)
    ran = command("sweep", "--suite", "gsm8k", "--policy", "confidence,oracle", *parts, *sizes, "--output", "out")
    assert ran.code == 0, ran.err
    paper = command("report", "out", "--format", "paper").out
    assert "## Table 1: " in paper
    assert "## Tables 11 and 12, budgets γ: gsm8k" in paper
    assert "|  |  | 3 | 4 |" in paper
    check("summary", json.loads(command("report", "out", "--format", "json").out))
    lines = lines_of(command("report", "out", "--format", "csv").out)
    assert {(line["run"], line["budget"]) for line in lines} == {("gsm8k-t0-b1-g3", "3"), ("gsm8k-t0-b1-g4", "4")}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "nowhere is no folder; expected that of a run, of several runs or of a sweep"),
        (".", "holds no run (no manifest.json in it or in a folder of it)"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(command: Callable[..., Any], path: str, said: str) -> None:
    ran = command("report", path)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_manifest_of_another_version_is_refused(
    bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    assert bench("--output", "out").code == 0
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["true_routing"]
    path.write_text(json.dumps(manifest))
    ran = command("report", "out", "--format", "csv")
    assert ran.code == 2
    assert "of another version (the file lacks true_routing)" in ran.err
    written = command("report", "out", "--output", "no/such/folder/page.html")
    assert written.code == 2
