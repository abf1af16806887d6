"""Running the command line inside the test's process, on a small random checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_checkpoints import Checkpoints, write_checkpoints

from ecospec.harness import report_writing, runner
from ecospec.harness.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def real_pages() -> None:
    """Asked for by a test that looks at a run's page; for all others, drawing its plots would take most of the time."""


@pytest.fixture
def command(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., Ran]:
    """Run ``ecospec-bench`` with arguments, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    if "real_pages" not in request.fixturenames:
        monkeypatch.setattr(report_writing, "report_html", lambda run: "no page in this test")
        monkeypatch.setattr(report_writing, "summary_html", lambda *arguments: "no page in this test")

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ecospec-bench", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def bench(command: Callable[..., Ran], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the suite gsm8k on the small checkpoint, two prompts of at most twelve tokens."""
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)  # its own test measures it

    def run(*arguments: object, suite: str = "gsm8k") -> Ran:
        parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter)
        predictor = () if "--predictor" in arguments else ("--predictor", f"learned:path={checkpoints.learned}")
        limits = () if "--limit" in arguments else ("--limit", 2)
        tokens = () if "--max-new-tokens" in arguments else ("--max-new-tokens", 12)
        data = () if "--data" in arguments else ("--data", "embedded")
        return command("--suite", suite, *parts, *predictor, *limits, *tokens, *data, *arguments)

    return run
