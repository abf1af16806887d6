"""Recordings of several suites: made by one command, replayed as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def record(bench: Callable[..., Any], command: Callable[..., Any], checkpoints: Any) -> Callable[..., Any]:
    """Record two short answers a suite of the small random checkpoint."""

    def run(*arguments: object) -> Any:
        parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter, "--data", "embedded")
        given = ("--predictor", f"learned:path={checkpoints.learned}", "--acceptance", "draft")
        return command("record", *parts, *given, "--limit", 2, "--max-new-tokens", 6, *arguments)

    return run


REPLAYED = ("--policy", "confidence,marginal", "--budget", "3", "--output", "out.json")


def replayed(command: Callable[..., Any], folder: Path, *arguments: object) -> dict[str, Any]:
    ran = command("replay", *arguments, *REPLAYED)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


def test_several_suites_are_recorded_and_replayed_as_one(
    record: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    ran = record("--suite", "gsm8k,amc", "--output", "rec")
    assert ran.code == 0, ran.err
    assert "4 requests of 2 suites" in ran.out
    assert sorted(path.name for path in (tmp_path / "rec").iterdir()) == ["amc", "gsm8k"]
    both = replayed(command, tmp_path, "rec")
    assert replayed(command, tmp_path, "rec/gsm8k", "rec/amc")["rows"] != []
    alone = [replayed(command, tmp_path, f"rec/{name}") for name in ("amc", "gsm8k")]
    for index, row in enumerate(both["rows"]):
        parts = [each["rows"][index] for each in alone]
        steps = sum(part["steps"] for part in parts)
        assert row["steps"] == steps
        for figure in ("acceptance_length", "active_experts", "verified_tokens"):
            pooled = sum(part[figure] * part["steps"] for part in parts) / steps
            assert row[figure] == pytest.approx(pooled, rel=1e-12)
    assert len(both["recordings"]) == 2
    assert any("of amc, gsm8k" in note for note in both["notes"])


def test_a_recording_of_several_suites_is_gone_on_with(
    record: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    record("--suite", "gsm8k,amc,aime25", "--output", "whole")
    before = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*.*") if path.is_file()}
    # As a kill leaves it: one suite is finished, one has a request less, one was not begun.
    index = tmp_path / "whole/amc/index.jsonl"
    index.write_text(index.read_text(encoding="utf-8").split("\n")[0] + "\n", encoding="utf-8")
    shutil.rmtree(tmp_path / "whole/aime25")
    ran = record("--suite", "gsm8k,amc,aime25", "--output", "whole")
    assert ran.code == 2
    assert "--resume" in ran.err
    ran = record("--suite", "gsm8k,amc,aime25", "--output", "whole", "--resume")
    assert ran.code == 0, ran.err
    after = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*.*") if path.is_file()}
    assert after == before


def test_recordings_that_do_not_belong_together_are_refused(
    record: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    record("--suite", "gsm8k", "--output", "a")
    record("--suite", "amc", "--output", "b", "--temperature", "1")
    record("--suite", "gsm8k", "--output", "c")
    for others, expected in ((("a", "b"), "temperature = 1.0"), (("a", "c"), "request gsm8k-0 is in a and in c")):
        ran = command("replay", *others, "--policy", "confidence")
        assert ran.code == 2
        assert expected in ran.err
        assert "Traceback" not in ran.err
    record("--suite", "aime25", "--output", "d")
    path = tmp_path / "d" / "manifest.json"
    other = {**json.loads(path.read_text(encoding="utf-8")), "system_prompt": "You are a pirate."}
    path.write_text(json.dumps(other), encoding="utf-8")
    ran = command("replay", "a", "d", "--policy", "confidence")
    assert ran.code == 2
    assert "system_prompt = 'You are a pirate.'" in ran.err
    ran = record("--suite", "gsm8k,amc", "--output", "a")
    assert ran.code == 2
    assert "a recording of one suite" in ran.err


def test_what_a_kill_leaves_before_anything_is_recorded_is_no_obstacle(
    record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rec" / "amc").mkdir(parents=True)
    (tmp_path / "rec" / "amc" / ".lock").touch()
    ran = record("--suite", "amc,gsm8k", "--output", "rec", "--resume")
    assert ran.code == 2
    assert "no recording" in ran.err
    # Killed as its second suite begins: the manifest is what is written first.
    real = Path.mkdir

    def killed(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "requests" and path.parent.name == "gsm8k":
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", killed)
        ran = record("--suite", "amc,gsm8k", "--output", "rec")
    assert ran.code == 130
    assert (tmp_path / "rec" / "gsm8k" / "manifest.json").exists()
    assert not (tmp_path / "rec" / "gsm8k" / "requests").exists()
    ran = record("--suite", "amc,gsm8k", "--output", "rec", "--resume")
    assert ran.code == 0, ran.err
    (tmp_path / "used" / "amc").mkdir(parents=True)
    (tmp_path / "used" / "amc" / "mine.txt").touch()
    ran = record("--suite", "amc,gsm8k", "--output", "used")
    assert ran.code == 2
    assert "not an empty folder" in ran.err
