"""Runs in batches from the command line: the same tokens at every size, and a report that counts steps once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report_records import GEOMETRY, METHODS, record, records, row, summary

from ecospec.errors import UserError
from ecospec.harness import runner, several
from ecospec.harness.config import RunConfig
from ecospec.harness.decoding import Generation, StepRecord
from ecospec.harness.outcomes import record_of
from ecospec.harness.records import AR, PromptRecord, read_records
from ecospec.harness.report import summarise
from ecospec.harness.report_notes import headline, notes
from ecospec.harness.report_text import table_lines
from ecospec.harness.target_batch import BatchPass, TargetBatch


def tokens_of(folder: Path) -> dict[tuple[str, str], list[int]]:
    return {(r.prompt_id, r.method): r.tokens for r in read_records(folder / "prompts.jsonl")}


@pytest.mark.parametrize("suite", ["gsm8k", "mtbench"])
def test_all_batch_sizes_emit_the_same_tokens(bench: Callable[..., Any], tmp_path: Path, suite: str) -> None:
    ran = bench(
        "--policy",
        "confidence,marginal,oracle",
        "--limit",
        3,
        "--batch-size",
        "1,2,3,8",
        "--output",
        "out",
        suite=suite,
    )
    assert ran.code == 0, ran.err
    assert "outputs at batch sizes 1, 2, 3, 8 are the same tokens" in ran.out
    names = [f"batch-{size}" for size in (1, 2, 3, 8)]
    found = [tokens_of(tmp_path / "out" / name) for name in names]
    assert len(found[0]) == (3 if suite == "gsm8k" else 6) * 4
    assert all(tokens == found[0] for tokens in found)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["runs"]) == names
    assert summary["average"] == {}
    for name, size in zip(names, (1, 2, 3, 8), strict=True):
        rows = summary["runs"][name]["rows"]
        assert {r["lossless"]["verdict"] for r in rows} == {"exact"}
        assert all((r["rows_per_step"] > 1) == (size > 1) for r in rows)
    lines = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "average" not in lines
    assert "| batch-8 |" in lines


def test_a_batch_reads_more_experts_a_step_and_fewer_a_token(bench: Callable[..., Any], tmp_path: Path) -> None:
    assert bench("--limit", 4, "--batch-size", "1,4", "--output", "out").code == 0
    reports = [
        json.loads((tmp_path / "out" / name / "report.json").read_text(encoding="utf-8"))["rows"]
        for name in ("batch-1", "batch-4")
    ]
    for one, four in zip(*reports, strict=True):
        assert one["active_experts"] < four["active_experts"] < 4 * one["active_experts"]
        assert four["acceptance_length"] == pytest.approx(one["acceptance_length"], rel=0.2)


def test_an_interrupted_batch_is_begun_anew(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("--limit", 5, "--batch-size", 2)
    assert bench(*arguments, "--output", "whole").code == 0
    real, calls = runner.append_records, []

    def stop_after_one(path: Path, fresh: Any) -> None:
        real(path, fresh)
        calls.append(len(fresh))
        if len([n for n in calls if n]) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_records", stop_after_one)
        assert bench(*arguments, "--output", "out").code == 130
    path = tmp_path / "out" / "prompts.jsonl"
    finished = path.read_text(encoding="utf-8")
    assert len(finished.splitlines()) == 2 * 3
    third = (tmp_path / "whole" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[6:9]
    path.write_text(finished + "".join(third), encoding="utf-8")  # one prompt of the second batch
    ran = bench(*arguments, "--output", "out", "--resume")
    assert ran.code == 0, ran.err
    assert path.read_text(encoding="utf-8").startswith(finished)
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "whole")
    batches = {r.prompt_id: r.batch for r in read_records(path)}
    assert batches == dict(zip([f"gsm8k-{i}" for i in range(5)], ["gsm8k-0"] * 2 + ["gsm8k-2"] * 2 + [""], strict=True))
    refused = bench("--limit", 5, "--batch-size", 3, "--output", "out", "--resume")
    assert refused.code == 2
    assert "was run with batch_size = 2, now it is 3" in refused.err


def test_a_batch_that_corrupts_a_row_is_found_by_each_prompts_own_run(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where plain decoding itself is wrong in a batch, so that all methods agree with each other."""
    real = TargetBatch.decode

    def wrong(self: TargetBatch, tokens: Any) -> Any:
        step = real(self, tokens)
        logits = step.whole.logits
        last = logits[-1:].flip(1) if len(tokens) > 1 else logits[-1:]
        return BatchPass(replace(step.whole, logits=torch.cat((logits[:-1], last))), step.counts)

    monkeypatch.setattr(TargetBatch, "decode", wrong)
    ran = bench("--batch-size", 2, "--output", "out")
    assert ran.code == 1
    assert "lossless check VIOLATED: prompt gsm8k-1, AR, position" in ran.err
    rows = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["rows"]
    assert [r["lossless"]["verdict"] for r in rows] == ["violated", "exact", "exact"]


def test_different_outputs_between_batch_sizes_are_named() -> None:
    runs = {name: RunConfig("x", ("marginal",), batch_size=size) for name, size in (("batch-1", 1), ("batch-2", 2))}
    same = records()
    other = [replace(r, tokens=[*r.tokens, 0]) if (r.prompt_id, r.method) == ("p2", "marginal") else r for r in same]
    assert several.different_outputs(runs, {"batch-1": same, "batch-2": same}) == []
    assert several.different_outputs(runs, {"batch-1": same, "batch-2": other}) == ["p2 by marginal"]
    assert several.sizes_of(runs) == [1, 2]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "--batch-size 0: expected an integer of at least 1"),
        ("2,-1", "--batch-size -1: expected an integer of at least 1"),
        ("two", "--batch-size two: expected an integer, or several separated by commas, such as 1,2,4"),
        ("", "--batch-size : expected an integer"),
        ("1.5", "--batch-size 1.5: expected an integer"),
    ],
)
def test_a_batch_size_that_cannot_be_is_refused(bench: Callable[..., Any], size: str, message: str) -> None:
    ran = bench("--batch-size", size)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_sizes_can_be_listed_in_a_file(bench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch-size: [1, 2, 2]\n", encoding="utf-8")
    ran = bench("--config", "run.yaml", "--output", "out")
    assert ran.code == 0, ran.err
    assert (tmp_path / "out" / "batch-2" / "report.json").is_file()


def test_several_suites_at_several_sizes(bench: Callable[..., Any], tmp_path: Path) -> None:
    ran = bench("--batch-size", "1,2", "--limit", 2, "--output", "out", suite="amc,math500")
    assert ran.code == 0, ran.err
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert folders == {"amc-batch-1", "amc-batch-2", "math500-batch-1", "math500-batch-2"}


# Shares


def step(rows: int, pairs: int, verify: float, emitted: int = 1) -> StepRecord:
    return StepRecord(emitted, 3, pairs, {"verify": verify, "draft": 0.0}, rows=rows)


def test_what_a_batch_cost_is_shared_by_its_rows() -> None:
    """By hand: two steps of two rows with 12 and 8 pairs, and one of the second row alone with 6."""
    steps = [step(2, 12, 0.4), step(2, 8, 0.6)]
    first = Generation([1, 2, 3], "", "eos", 0.5, 0.5, steps)
    second = Generation([1, 2, 3, 4], "", "length", 0.5, 0.8, [*steps, step(1, 6, 0.3)])

    class Asked:
        id, ids = "p", (1, 2)

    asked: Any = Asked()
    found = [record_of(asked, AR, generation, None, None, "p") for generation in (first, second)]
    assert [r.expert_pairs for r in found] == [10.0, 16.0]
    assert [r.whole_steps for r in found] == [1.0, 2.0]
    assert [r.steps for r in found] == [2, 3]
    assert [r.phase_seconds["verify"] for r in found] == pytest.approx([0.5, 0.8])
    alone = record_of(asked, AR, Generation([1, 2], "", "eos", 0.5, 0.3, [step(1, 6, 0.3)]), None, None)
    assert (alone.expert_pairs, alone.whole_steps, alone.step_share, alone.batch) == (6, 1, None, "")


def batched() -> list[PromptRecord]:
    """AR and confidence over eight prompts in two batches; every step counts half for a row."""
    found = []
    for batch, prompts, factor in (("a", "abcd", 1.0), ("e", "efgh", 2.0)):
        for prompt in prompts:
            shared: dict[str, Any] = {"batch": batch}
            found.append(
                record(prompt, AR, 5, 4.0 * factor, 4, 4, 12, (0, 0, 0, 3.6 * factor, 0.4), step_share=2.0, **shared)
            )
            found.append(
                record(prompt, "confidence", 5, 2.0, 2, 8, 10, (0.4, 0, 0.1, 1.2, 0.3), step_share=1.0, **shared)
            )
    return found


def test_a_report_counts_a_step_of_a_batch_once() -> None:
    report = summarise(batched(), methods=METHODS[:2], check="all", **GEOMETRY)
    ar, confidence = report.rows
    assert (ar.rows_per_step, confidence.rows_per_step) == (2.0, 2.0)
    assert ar.acceptance_length == 1.0
    assert confidence.acceptance_length == 2.0
    assert ar.active_experts == 12 / 2 / 2  # pairs over whole steps over layers
    assert confidence.active_experts == 10 / 1 / 2
    assert confidence.verified_tokens == 4.0
    assert confidence.phase_ms["verify"] == pytest.approx(1200.0)
    assert ar.phase_ms["verify"] == pytest.approx((3.6 + 7.2) / 4 * 1e3)
    assert confidence.rho == pytest.approx((3.6 + 7.2) / 4 / 1.2)
    assert confidence.decode_speedup is not None
    assert confidence.decode_speedup.value == pytest.approx((8 + 16) / 8)


def test_the_bootstrap_draws_whole_batches() -> None:
    """Two batches have three different resamples, and so an interval from the one's ratio to the other's."""
    report = summarise(batched(), methods=METHODS[:2], check="all", **GEOMETRY)
    found = report.rows[1].decode_speedup
    assert found is not None
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((2.0, 4.0))
    alone = [replace(r, batch="", step_share=None) for r in batched()]
    narrower = summarise(alone, methods=METHODS[:2], check="all", **GEOMETRY).rows[1].decode_speedup
    assert narrower is not None
    assert narrower.interval is not None
    assert 2.0 < narrower.interval.low < narrower.interval.high < 4.0  # eight units are seldom all of one kind
    assert math.isclose(narrower.value or 0.0, found.value or 0.0)


def test_a_report_says_what_a_batch_is() -> None:
    report = summarise(batched(), methods=METHODS[:2], check="all", **GEOMETRY)
    assert "batches of 2 · γ = 4" in headline(report, {"batch_size": 2, "budget": 4})
    (note,) = [n for n in notes(report, {"batch_size": 2}) if n.startswith("batches of 2: ")]
    assert "each prompt by itself" in note
    cells = {line.label: line.cell(report.rows[0]) for line in table_lines(report)}
    assert cells["prompts per step"] == "2.00"
    assert cells["lossless"] == "exact"
    assert cells["  prompts checked"] == "8 of 8"
    single = summary(records())
    cells = {line.label: line.cell(row(single, AR)) for line in table_lines(single)}
    assert cells["lossless"] == "reference"
    assert "prompts per step" not in cells


def test_few_batches_are_few_however_many_prompts_they_hold() -> None:
    report = summarise(batched(), methods=METHODS[:2], check="all", **GEOMETRY)
    assert report.units == 2
    assert "2 batches are too few to compare methods by; intervals over fewer than 20 are too narrow" in notes(
        report, {"batch_size": 2}
    )
    asked = notes(summary(records()), {"batch_size": 4})
    assert "batches of 4 were asked for, but no step had more than one prompt" in asked


def test_the_noise_is_measured_in_passes_no_larger_than_there_are(bench: Callable[..., Any], tmp_path: Path) -> None:
    """A budget or batch size beyond all bounds takes no memory of that size."""
    ran = bench("--limit", 2, "--batch-size", 10**9, "--budget", 10**9, "--dtype", "bfloat16", "--output", "out")
    assert ran.code == 0, ran.err
    assert "batches of 1000000000" in ran.out


def test_a_failure_at_the_first_prompt_of_several_runs_leaves_nothing(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> Any:
        raise UserError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "decode_ar_batch", fail)
        ran = bench("--batch-size", "1,2", "--output", "out")
        assert (ran.code, ran.err) == (2, "ecospec-bench: error: not today\n")
    assert not (tmp_path / "out").exists()
    assert bench("--batch-size", "1,2", "--output", "out").code == 0
    other = bench("--batch-size", 2, "--output", "out", "--resume")
    assert other.code == 2
    assert "out holds several runs; expected the same command as for these" in other.err
