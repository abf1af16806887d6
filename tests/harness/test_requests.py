"""Prompts and conversations: a turn is asked behind the model's own answer, exactly as emitted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecospec.errors import UserError
from ecospec.harness import runner
from ecospec.harness.records import AR, read_records
from ecospec.harness.requests import Renderer, Request, turn_ids
from ecospec.harness.target import Geometry
from ecospec.suites import Problem


class Words:
    """A tokenizer with one token a word."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


def renderer(max_new_tokens: int = 4, context: int = 100, vocab: int = 50) -> Renderer:
    geometry = Geometry(vocab, 8, 2, 2, 4, 2, context, 1, 1)
    return Renderer(Words(), geometry, "mine", max_new_tokens)


def problem(*follow_ups: str) -> Problem:
    return Problem("p-0", "User: hi\n\nAssistant:", (), "", {}, follow_ups)


def test_the_next_prompt_holds_the_answer_to_the_last_character() -> None:
    render = renderer()
    first = render.first(problem("\n\nUser: and then?\n\nAssistant:"))
    answer = "  Hello,\n\n world \t"
    second = render.follow(first, answer)
    assert second is not None
    assert second.prompt == f"User: hi\n\nAssistant:{answer}\n\nUser: and then?\n\nAssistant:"
    assert second.turn == 1
    assert len(second.ids) == len(second.prompt.split())
    assert render.follow(second, answer) is None
    assert render.follow(render.first(problem()), answer) is None


def test_turns_are_counted_in_a_conversation_only() -> None:
    assert renderer().first(problem()).id == "p-0"
    assert turn_ids(problem()) == ["p-0"]
    assert turn_ids(problem("a", "b")) == ["p-0.1", "p-0.2", "p-0.3"]
    first = renderer().first(problem("a", "b"))
    second = renderer().follow(first, "x")
    assert second is not None
    assert (first.id, second.id) == ("p-0.1", "p-0.2")


def test_a_conversation_that_may_outgrow_the_context_is_refused_before_it_begins() -> None:
    asked = problem(" one two three")
    renderer(context=11).first(asked)
    with pytest.raises(UserError, match=r"prompt 'p-0': its last turn may need 10 tokens, the target's context is 10"):
        renderer(context=10).first(asked)
    renderer(400, context=10).first(problem())  # one turn is cut where AR's is


def test_a_tokenizer_of_another_target_is_refused() -> None:
    with pytest.raises(UserError, match="its tokenizer gives token 2 for p-0, but it has embeddings for 2"):
        renderer(vocab=2).first(problem())


def test_a_two_turn_run_asks_the_second_question_after_the_first_answer(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, str] = {}
    real = runner.Bench.generate

    def generate(self: Any, requests: list[Request], method: Any, limit: int | None = None) -> Any:
        asked.update((request.id, request.prompt) for request in requests)
        return real(self, requests, method, limit)

    monkeypatch.setattr(runner.Bench, "generate", generate)
    ran = bench("--policy", "confidence,marginal", "--limit", 2, "--output", "out", suite="mtbench")
    assert ran.code == 0, ran.err
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    assert list(dict.fromkeys(r.prompt_id for r in records)) == [
        "mtbench-0.1",
        "mtbench-0.2",
        "mtbench-1.1",
        "mtbench-1.2",
    ]
    for first in ("mtbench-0", "mtbench-1"):
        by_method = {r.method: r.text for r in records if r.prompt_id == f"{first}.1"}
        assert set(by_method.values()) == {by_method[AR]}
        second = asked[f"{first}.2"]
        assert second.startswith(asked[f"{first}.1"] + by_method[AR] + "\n\nUser: ")
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["prompts"] == 4
    assert report["rows"][0]["score"] is None


def test_a_two_turn_run_cut_between_the_turns_begins_the_conversation_anew(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = ("--policy", "confidence", "--limit", 2)
    assert bench(*arguments, "--output", "whole", suite="mtbench").code == 0
    whole = (tmp_path / "whole" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert bench(*arguments, "--output", "out", suite="mtbench").code == 0
    path = tmp_path / "out" / "prompts.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:6]), encoding="utf-8")
    ran = bench(*arguments, "--output", "out", "--resume", suite="mtbench")
    assert ran.code == 0, ran.err
    tokens = [
        [(r["prompt_id"], r["method"], r["tokens"]) for r in map(json.loads, lines)]
        for lines in (whole, path.read_text(encoding="utf-8").splitlines())
    ]
    assert tokens[0] == tokens[1]
