"""A dense target: it runs like any other, and what goes by experts says that there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schema_checks import check
from tiny_families import VOCAB, write_family
from tiny_models import head_facts, tiny_head

from ecospec.harness import runner
from ecospec.harness.training.drafter import save_head

LONG = {"max_position_embeddings": 4096}


@pytest.fixture
def dense(command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command on a dense checkpoint with an EAGLE-3 head."""
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)
    target, drafter = write_family(tmp_path / "target", "llama", **LONG), tmp_path / "drafter"
    head = tiny_head(target_vocab=VOCAB, **LONG)
    save_head(head, head_facts(VOCAB, **LONG), np.arange(VOCAB), VOCAB, drafter)

    def run(*arguments: object) -> Any:
        parts = () if arguments[0] == "trace" else ("--drafter", drafter)
        return command(*arguments, "--target", target, *parts, "--data", "embedded")

    return run


def test_experts_are_not_applicable(dense: Callable[..., Any], tmp_path: Path) -> None:
    ran = dense("--suite", "gsm8k", "--policy", "confidence", "--limit", 2, "--max-new-tokens", 12, "--output", "run")
    assert ran.code == 0, ran.err
    lines = {line[:24].strip(): line for line in ran.out.splitlines()}
    for name in ("active experts E", "expert MB per step"):
        assert lines[name].split()[-2:] == ["n/a", "n/a"]
    assert "the target is dense: it has no experts" in ran.out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [row["active_experts"] for row in report["rows"]] == [None, None]
    assert all(row["bytes_per_step"] == report["always_read_bytes"] for row in report["rows"])
    assert report["rows"][1]["lossless"]["verdict"] == "exact"
    check("report", report)
    assert not (tmp_path / "run" / "activations.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "gsm8k", "--policy", "marginal"), "policy 'marginal-cost' needs a target with experts"),
        (("--suite", "gsm8k", "--policy", "oracle"), "policy 'oracle' needs a target with experts"),
        (("trace", "--suite", "gsm8k", "--output", "trace"), "a trace needs a target with experts"),
    ],
)
def test_what_goes_by_experts_is_refused(dense: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ran = dense(*arguments, "--limit", 1)
    assert ran.code == 2
    assert said in ran.err
    assert "LlamaForCausalLM is dense" in ran.err
    assert "Traceback" not in ran.err
