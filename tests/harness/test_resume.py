"""A run that was killed and resumed ends as the unbroken one: nothing but the prompt in flight is done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from killing import DyingOs, Killed
from tiny_checkpoints import Checkpoints

from ecospec.errors import UserError
from ecospec.harness import manifest, report_writing, runner, writing
from ecospec.harness.app import Outcome, execute
from ecospec.harness.config import RunConfig
from ecospec.harness.records import AR, PromptRecord, read_records
from ecospec.harness.run_folder import MANIFEST, RECORDS, finished_prompts
from ecospec.harness.runner import Bench
from ecospec.harness.writing import alone_in

TIMES = ("prefill_seconds", "decode_seconds", "phase_seconds")


def figures(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    """Everything but times, prompt by prompt; a prompt's methods in one order."""
    plain = [{k: v for k, v in asdict(record).items() if k not in TIMES} for record in records]
    return sorted(plain, key=lambda each: (each["prompt_id"], each["method"]))


def figures_of_report(folder: Path) -> list[dict[str, Any]]:
    kept = ("label", "steps", "acceptance_length", "active_experts", "verified_tokens", "score", "lossless")
    rows = json.loads((folder / "report.json").read_text(encoding="utf-8"))["rows"]
    return [{key: row[key] for key in kept} for row in rows]


@pytest.fixture(scope="module")
def ready(checkpoints: Checkpoints) -> Bench:
    config = RunConfig(
        suite="amc",
        policy=("confidence",),
        target=str(checkpoints.target),
        drafter=str(checkpoints.drafter),
        data="embedded",
        limit=2,
        max_new_tokens=6,
    )
    return Bench(config)


def test_a_kill_at_any_write_loses_no_more_than_the_prompt_in_flight(
    ready: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)
    monkeypatch.setattr(runner, "WARM_UP_TOKENS", 1)
    monkeypatch.setattr(manifest, "git_revision", lambda: None)
    monkeypatch.setattr(report_writing, "report_html", lambda run: "a page\n")  # which takes the longest
    labels = [method.label for method in ready.methods]

    def run(folder: Path, *, resume: bool = False) -> Outcome:
        outcome = execute(ready, replace(ready.config, output=folder, resume=resume), show=False)
        assert outcome is not None
        return outcome

    whole = run(tmp_path / "whole")
    finished_before, last = [], 0
    while True:
        last += 1
        folder = tmp_path / str(last)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "os", DyingOs(last))
            try:
                run(folder)
            except Killed:
                pass
            else:
                break
        path = folder / RECORDS
        records = read_records(path) if path.exists() else []
        done = finished_prompts(records, labels)
        kept = [record for record in records if record.prompt_id in done]
        resumed = run(folder, resume=(folder / MANIFEST).exists())
        assert figures(resumed.records) == figures(whole.records)
        assert figures_of_report(folder) == figures_of_report(tmp_path / "whole")
        assert resumed.records[: len(kept)] == kept  # times and all: they were not decoded again
        assert not [each.name for each in folder.iterdir() if each.name.endswith(".partial")]
        finished_before.append(len(done))
    # A prompt is whole once its write is, whether or not it was waited for.
    assert finished_before == sorted(finished_before)
    assert set(finished_before) == {0, 1, 2}


def test_a_real_kill_is_resumed_with_nothing_but_the_folder(
    command: Callable[..., Any], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)
    parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter, "--data", "embedded")
    options = ("--suite", "amc", "--policy", "confidence", "--limit", "4", "--max-new-tokens", "64", *parts)
    assert command(*options, "--output", "whole").code == 0
    child = subprocess.Popen(
        [sys.executable, "-m", "ecospec.harness", *map(str, options), "--output", "out"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    path = tmp_path / "out" / RECORDS
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    _, said = child.communicate()
    assert child.returncode == -signal.SIGKILL, said
    before = finished_prompts(read_records(path), [AR, "confidence"])
    assert 0 < len(before) < 4
    ran = command("--resume", "out")
    assert ran.code == 0, ran.err
    assert figures(read_records(path)) == figures(read_records(tmp_path / "whole" / RECORDS))
    assert figures_of_report(tmp_path / "out") == figures_of_report(tmp_path / "whole")


def test_a_second_process_in_the_folder_is_refused_in_one_line(bench: Callable[..., Any], tmp_path: Path) -> None:
    assert bench("--output", "out", suite="amc").code == 0
    with alone_in(tmp_path / "out"):
        for arguments in (("--output", "out", "--resume"), ("--resume", "out")):
            ran = bench(*arguments, suite="amc")
            assert (ran.code, len(ran.err.splitlines())) == (2, 1)
            assert "out: another process is running in it" in ran.err
    (tmp_path / "new").mkdir()
    with alone_in(tmp_path / "new"):
        assert "new: another process is running in it" in bench("--output", "new", suite="amc").err
        several = bench("--output", "new", "--batch-size", "1,2", suite="amc")
        assert "new: another process is running in it" in several.err
        assert [each.name for each in (tmp_path / "new").iterdir()] == [".lock"]


def test_a_folder_is_enough_to_resume_and_options_given_again_must_agree(
    bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("budget: 3\npolicy: [global-cost, marginal]\n", encoding="utf-8")
    assert (
        bench("--config", "run.yaml", "--output", "out", "--temperature", 0.5, "--check", "sample", suite="amc").code
        == 0
    )
    path = tmp_path / "out" / RECORDS
    whole = path.read_text(encoding="utf-8")
    for arguments in (
        ("--resume", "out"),
        ("--resume", "out", "--budget", 3, "--policy", "global-cost,marginal", "--output", "out"),
        ("--config", "run.yaml", "--resume", "out", "--check", "sample"),
    ):
        path.write_text("".join(whole.splitlines(keepends=True)[:4]), encoding="utf-8")
        ran = command(*arguments)
        assert ran.code == 0, ran.err
        assert path.read_text(encoding="utf-8").count("\n") == 8
        assert path.read_text(encoding="utf-8").startswith("".join(whole.splitlines(keepends=True)[:4]))
        assert "amc: 2 problems by AR, confidence, global-cost, marginal-cost" in ran.out
    for arguments, said in (
        (("--budget", 4), "was run with budget = 3, now it is 4"),
        (("--policy", "marginal"), "was run with policy = 'global-cost,marginal', now it is 'marginal'"),
        (("--suite", "gsm8k"), "was run with suite = 'amc', now it is 'gsm8k'"),
        (("--batch-size", "1,2"), "was run with batch_size = '1', now it is '1,2'"),
        (("--run-code",), "was run with run_code = False, now it is True"),
        (("--output", "other"), "--resume out with --output other: expected one folder"),
    ):
        ran = command("--resume", "out", *arguments)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert said in ran.err
    assert not (tmp_path / "other").exists()


def test_a_run_of_several_is_resumed_by_its_folder(
    bench: Callable[..., Any], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, calls = runner.append_records, []

    def stop_in_the_second(path: Path, records: Any) -> None:
        real(path, records)
        calls.append(path.parent.name)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_records", stop_in_the_second)
        ran = bench("--batch-size", "1,2", "--limit", 2, "--output", "out", suite="amc,math500")
    assert ran.code == 130
    assert "ecospec-bench --resume out goes on from there" in ran.err
    assert calls == ["amc-batch-1", "amc-batch-1", "amc-batch-2"]
    for arguments, said in (
        (("--limit", 3), "was run with limit = 2, now it is 3"),
        (("--suite", "amc"), "was run with suite = 'amc,math500', now it is 'amc'"),
        (("--batch-size", "2,1"), "was run with batch_size = '1,2', now it is '2,1'"),
    ):
        refused = command("--resume", "out", *arguments)
        assert (refused.code, said in refused.err) == (2, True), refused.err
    before = (tmp_path / "out" / "amc-batch-1" / RECORDS).read_bytes()
    ran = command("--resume", "out")
    assert ran.code == 0, ran.err
    assert (tmp_path / "out" / "amc-batch-1" / RECORDS).read_bytes() == before
    assert list(json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["runs"]) == [
        *("amc-batch-1", "amc-batch-2"),
        *("math500-batch-1", "math500-batch-2"),
    ]
    assert command("--resume", "out/math500-batch-2").code == 0  # each is a run of its own


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no run (no manifest.json)"),
        ({"manifest.json": {"suite": "gsm8k"}}, "does not hold its options, as runs of earlier versions"),
        ({"manifest.json": {"options": ["budget"]}}, "damaged or of another version (options is"),
        ({"manifest.json": {"options": {"colour": "red"}}}, "does not hold options of this version"),
        ({"manifest.json": {"options": {"budget": "four"}}}, "holds a damaged option (budget"),
        ({"manifest.json": {"options": {"batch_size": "many"}}}, "--batch-size many"),
        ({"manifest.json": {"options": {"check": "some"}}}, "holds a damaged option (check"),
        ({"suites.json": ["amc", "math500"]}, "does not hold its options, as runs of earlier versions"),
        ({"suites.json": ["amc", "math500"], "options.json": None}, "does not hold its options"),
    ],
)
def test_what_holds_no_options_is_one_line(
    command: Callable[..., Any], tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    (tmp_path / "out").mkdir()
    for name, content in files.items():
        (tmp_path / "out" / name).write_text(json.dumps(content), encoding="utf-8")
    ran = command("--resume", "out")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert said in ran.err
    assert {each.name for each in (tmp_path / "out").iterdir()} == set(files)


def test_what_a_kill_before_the_manifest_leaves_is_as_good_as_an_empty_folder(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    for folder in (tmp_path / "one", tmp_path / "several", tmp_path / "several" / "gsm8k"):
        folder.mkdir()
        (folder / ".manifest.json.partial").write_text('{"suite"', encoding="utf-8")
        (folder / ".lock").touch()
    assert "holds no run" in bench("--resume", "one", suite="amc").err
    assert bench("--output", "one", suite="amc").code == 0
    assert not os.path.lexists(tmp_path / "one" / ".manifest.json.partial")


def test_a_command_that_is_refused_leaves_no_folder(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise UserError("not today")

    monkeypatch.setattr(runner, "decode_ar_batch", refuse)
    for arguments in ((), ("--batch-size", "1,2")):
        assert bench("--output", "out", *arguments, suite="amc").code == 2
        assert list(tmp_path.iterdir()) == []
