"""Several suites in one run: names, averages by hand, and a run from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.report import MethodInfo, Report, summarise
from ecospec.harness.several import suites_asked
from ecospec.harness.summary import summary_header, summary_json, summary_lines, summary_markdown

KNOWN = ["a", "b", "c"]
LAST = ["score", "prompts", "lossless"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("b,a", ["b", "a"]),
        (" a , a ,b", ["a", "b"]),
        ("all", KNOWN),
        ("c,all", ["c", "a", "b"]),
        ("mine", ["mine"]),
        ("", [""]),
    ],
)
def test_suites_are_asked_for_one_by_one_or_all_at_once(text: str, names: list[str]) -> None:
    assert suites_asked(text, KNOWN) == names


def record(prompt: str, method: str, seconds: float, steps: int, pairs: int, score: float | None) -> PromptRecord:
    return PromptRecord(
        prompt_id=prompt,
        method=method,
        prompt_tokens=5,
        tokens=list(range(13)),
        text="",
        reason="length",
        prefill_seconds=1.0,
        decode_seconds=seconds,
        steps=steps,
        emitted=12,
        selected=steps,
        expert_pairs=pairs,
        phase_seconds={"verify": seconds},
        verdict="exact",
        score=score,
    )


def report(ar: float, policy: float, steps: int, pairs: int, score: float | None) -> Report:
    """Two prompts: plain decoding takes `ar` seconds for 12 steps, the policy `policy` for `steps`."""
    records = []
    for prompt in ("p0", "p1"):
        records.append(record(prompt, AR, ar, 12, 12 * 8, score))
        records.append(record(prompt, "mine", policy, steps, pairs, score))
    methods = [MethodInfo(AR), MethodInfo("mine")]
    return summarise(records, methods=methods, moe_layers=2, top_k=4, expert_bytes=10, always_read_bytes=0, check="all")


def test_every_suite_weighs_the_same_in_the_average() -> None:
    reports = {"x": report(12.0, 6.0, 4, 40, 1.0), "y": report(12.0, 12.0, 6, 72, 0.0)}
    lines = summary_lines(reports, "mine")
    assert summary_header() == ["run", "speed-up", "decode only", "α", "E", "ρ", "tokens/s", *LAST]
    # speed-up end to end: 13 / 7 and 13 / 13; decode only: 2 and 1; α: 12 / 4 and 12 / 6; E: 40 / 4 / 2 and 72 / 6 / 2;
    # tokens/s: 13 tokens in 7 and 13 seconds; ρ: (12 / 12) / (6 / 4) and (12 / 12) / (12 / 6)
    assert lines == [
        ["x", "1.857", "2.000", "3.00", "5.00", "0.667", "1.9", "100.0 %", "2", "exact"],
        ["y", "1.000", "1.000", "2.00", "6.00", "0.500", "1.0", "0.0 %", "2", "exact"],
        ["average", "1.429", "1.500", "2.50", "5.50", "0.583", "1.4", "50.0 %", "", ""],
    ]


def test_a_suite_without_a_score_is_left_out_of_that_average() -> None:
    reports = {"x": report(12.0, 6.0, 4, 40, 0.5), "y": report(12.0, 12.0, 6, 72, None)}
    assert [line[7] for line in summary_lines(reports, "mine")] == ["50.0 %", "–", "50.0 %"]
    plain = summary_json({"y": replace(reports["y"])})
    assert plain["average"]["mine"]["score"] is None
    assert plain["average"]["mine"]["decode only"] == pytest.approx(1.0)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    page = summary_markdown(reports)
    assert "## mine" in page
    assert "| x | 1.857 | 2.000 | 3.00 |" in page


def test_several_suites_run_with_one_model_into_one_folder(bench: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("--policy", "marginal", "--limit", 1, "--output", "out")
    ran = bench(*arguments, suite="amc,mtbench")
    assert ran.code == 0, ran.err
    names = {".lock", "amc", "mtbench", "options.json", "suites.json", "summary.json", "summary.md", "summary.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["runs"]) == ["amc", "mtbench"]
    assert summary["runs"]["mtbench"]["prompts"] == 2
    assert "average" in ran.out
    assert "run folder: out" in ran.out

    refused = bench(*arguments, suite="amc,mtbench")
    assert refused.code == 2
    assert "not an empty folder" in refused.err
    before = (tmp_path / "out" / "amc" / "prompts.jsonl").read_text(encoding="utf-8")
    for path in (tmp_path / "out" / "mtbench").iterdir():
        path.unlink()
    again = bench(*arguments, "--resume", suite="amc,mtbench")
    assert again.code == 0, again.err
    assert (tmp_path / "out" / "amc" / "prompts.jsonl").read_text(encoding="utf-8") == before


def test_a_run_of_several_is_gone_on_with_only_as_what_it_was(bench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for arguments, said in (
        (("--resume",), "--resume without --output"),
        (("--resume", "--output", "nowhere"), "nowhere holds no run of several suites"),
        (("--resume", "--output", "other"), "other holds no run of several suites"),
        (("--output", "other"), "not an empty folder"),
    ):
        ran = bench(*arguments, suite="amc,math500")
        assert ran.code == 2
        assert said in ran.err
    (tmp_path / "other" / "suites.json").write_text('["amc", "math500"]')
    ran = bench("--resume", "--output", "other", suite="amc,aime25")
    assert "other holds the runs amc, math500, now they are amc, aime25; expected the same command" in ran.err
    (tmp_path / "other" / "math500").mkdir()
    (tmp_path / "other" / "math500" / "file").write_text("x")
    ran = bench("--resume", "--output", "other", suite="amc,math500")
    assert "math500 is no run folder; start a new run" in ran.err
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["file", "math500", "suites.json"]


def test_a_mistake_in_one_of_several_suites_writes_nothing(bench: Callable[..., Any], tmp_path: Path) -> None:
    ran = bench("--output", "out", suite="amc,math50")
    assert ran.code == 2
    assert "did you mean 'math500'" in ran.err
    (tmp_path / "data.jsonl").write_text("{}\n", encoding="utf-8")
    ran = bench("--data", "data.jsonl", "--output", "out", suite="amc,math500")
    assert ran.code == 2
    assert "one data set with several suites" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
