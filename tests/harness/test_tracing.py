"""Collecting a trace from the command line: what it holds is what the target did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import Checkpoints
from transformers import AutoModelForCausalLM

from ecospec.harness.loading import load_target, target_view
from ecospec.harness.records import AR, read_records
from ecospec.harness.tracing import Tracer
from ecospec.predictors.traces import TracedText, open_trace
from ecospec.suites.task_file import builtin_files


@pytest.fixture
def trace(command: Callable[..., Any], checkpoints: Checkpoints) -> Callable[..., Any]:
    """Trace the small checkpoint over embedded problems, at most twelve tokens an answer."""

    def run(*arguments: object, output: str = "trace") -> Any:
        common = ("--target", checkpoints.target, "--data", "embedded", "--max-new-tokens", 12)
        return command("trace", *common, "--output", output, *arguments)

    return run


def read(folder: Path, checkpoints: Checkpoints) -> dict[str, TracedText]:
    loaded = load_target(str(checkpoints.target), dtype=torch.float32, device="cpu")
    return {text.id: text for text in open_trace(folder, target_view(loaded.target))}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_trace_holds_prompt_and_answer_and_where_each_token_was_routed(
    trace: Callable[..., Any], bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ran = trace("--suite", "amc", "--limit", 3)
    assert ran.code == 0, ran.err
    found = read(tmp_path / "trace", checkpoints)
    assert list(found) == ["amc-0", "amc-1", "amc-2"]
    assert bench("--limit", 3, "--output", "out", suite="amc").code == 0
    answers = {r.prompt_id: r for r in read_records(tmp_path / "out" / "prompts.jsonl") if r.method == AR}
    model = AutoModelForCausalLM.from_pretrained(checkpoints.target, dtype=torch.float32)
    for name, text in found.items():
        assert text.prompt_tokens == answers[name].prompt_tokens
        assert text.tokens[text.prompt_tokens :].tolist() == answers[name].tokens
        with torch.no_grad():
            logits = model(torch.tensor(text.tokens[None].astype(np.int64)), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2, dim=-1).indices.sort(-1).values for layer in logits])
        assert np.array_equal(text.routing, expected.numpy())
    assert "3 texts" in ran.out


def test_a_conversation_is_traced_to_its_last_answer(
    trace: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    assert trace("--suite", "mtbench", "--limit", 2).code == 0
    for text in read(tmp_path / "trace", checkpoints).values():
        assert text.prompt_tokens == len(text.tokens) - 12
        assert text.prompt_tokens > 40


def test_texts_are_traced_in_pieces_of_the_context(
    trace: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecospec.harness.tracing.PIECE", 40)
    rows = [{"text": "Sam has 3 pens. " * 20}, {"text": "Short."}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert trace("--text", tmp_path / "texts.jsonl").code == 0
    found = read(tmp_path / "trace", checkpoints)
    pieces = [text for name, text in found.items() if name.startswith("text-0")]
    assert len(pieces) > 2
    assert {len(text.tokens) for text in pieces[:-1]} == {40}
    assert all(text.prompt_tokens == len(text.tokens) for text in found.values())
    assert list(found)[-1] == "text-1"


def test_several_sources_and_batches_give_one_trace(trace: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("--suite", "amc,math500", "--limit", 3)
    assert trace(*arguments).code == 0
    assert trace(*arguments, "--batch-size", 2, output="batched").code == 0
    assert files(tmp_path / "trace") == files(tmp_path / "batched")


def test_an_interrupted_trace_goes_on_to_the_same_files(
    trace: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ecospec.predictors.traces.SHARD_TOKENS", 150)
    arguments = ("--suite", "amc", "--limit", 6)
    assert trace(*arguments).code == 0
    whole = files(tmp_path / "trace")
    assert len([name for name in whole if name.startswith("shards")]) > 2
    real, seen = Tracer._texts, []

    def stop_after_four(self: Tracer, source: Any, done: set[str]) -> Any:
        for text in real(self, source, done):
            seen.append(text.id)
            if len(seen) == 5:
                raise KeyboardInterrupt
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(Tracer, "_texts", stop_after_four)
        ran = trace(*arguments, output="part")
        assert ran.code == 130
        assert len(ran.err.splitlines()) == 1
    assert len(files(tmp_path / "part")) < len(whole)
    ran = trace(*arguments, "--resume", output="part")
    assert ran.code == 0, ran.err
    assert files(tmp_path / "part") == whole
    assert trace(*arguments, "--resume", output="part").code == 0  # nothing is left to do
    assert files(tmp_path / "part") == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to trace; expected --suite, or --text with a file"),
        (("--suite", "amcc"), "no suite 'amcc'"),
        (("--suite", "amc", "--batch-size", "1,2"), "--batch-size 1,2: expected one size"),
        (("--text", "nowhere.jsonl"), "no data file 'nowhere.jsonl'"),
        (("--text", "empty.jsonl"), "data file 'empty.jsonl' has no rows"),
        (("--suite", "amc", "--resume"), "no manifest.json; expected a folder that ecospec-bench trace has written"),
        (("--suite", "amc", "--policy", "marginal"), "No such option"),
        (("--suite", "one.yaml,two.yaml"), "two suites are called mine"),
        (("--suite", "three.yaml", "--text", "texts.jsonl"), "--text texts.jsonl and a suite that is called text"),
        (("--suite", "amc", "--limit", 1, "--output", "empty.jsonl/trace"), "is a file; expected a folder"),
    ],
)
def test_a_mistake_is_one_line(
    trace: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text('{"text": "Sam has 3 pens"}\n', encoding="utf-8")
    for file, name in (("one", "mine"), ("two", "mine"), ("three", "text")):
        own = builtin_files()["amc"].read_text(encoding="utf-8").replace("task: amc", f"task: {name}")
        own = own.replace("process_results: !function score.math_results\n", "")
        (tmp_path / f"{file}.yaml").write_text(own, encoding="utf-8")
    ran = trace(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "trace").exists()


def test_a_trace_of_other_options_is_not_gone_on_with(trace: Callable[..., Any]) -> None:
    assert trace("--suite", "amc", "--limit", 1).code == 0
    again = trace("--suite", "amc", "--limit", 1)
    assert (again.code, "not an empty folder" in again.err) == (2, True)
    other = trace("--suite", "amc", "--limit", 2, "--resume")
    assert other.code == 2
    assert "was made with sources = " in other.err
