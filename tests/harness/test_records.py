"""The record file: what is appended is read, and a kill costs the line in flight."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ecospec.errors import UserError
from ecospec.harness.records import PromptRecord, append_records, read_records


def record(number: int, **changes: object) -> PromptRecord:
    facts: dict[str, object] = {
        "prompt_id": f"p{number}",
        "method": "AR",
        "prompt_tokens": 12,
        "tokens": [1, 2, number],
        "text": "ä \n \u2028",
        "reason": "eos",
        "prefill_seconds": 0.25,
        "decode_seconds": 1.5,
        "steps": 2,
        "emitted": 2,
        "selected": 2,
        "expert_pairs": 9,
        "phase_seconds": {"verify": 1.0},
    }
    return PromptRecord(**{**facts, **changes})  # type: ignore[arg-type]


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first, second = [record(1), record(2, predicted_overlap=0.5)], [record(3, verdict="ties", ties=1, largest_gap=0.1)]
    append_records(path, first)
    append_records(path, second)
    assert read_records(path) == [*first, *second]


def test_a_last_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [record(1), record(2)])
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for end in range(second, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_records(path) == [record(1)]


def test_a_broken_line_that_is_not_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [record(1), record(2)])
    text = path.read_text()
    for broken in (text[5:], text.replace('"method"', '"way"', 1), "[]\n" + text):
        path.write_text(broken)
        with pytest.raises(UserError, match=r"records\.jsonl, line 1: not a record of this version"):
            read_records(path)


@pytest.mark.parametrize("name", [field.name for field in fields(PromptRecord)])
def test_a_field_of_another_type_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [record(1, **{name: True}), record(2)])
    with pytest.raises(UserError, match=rf"line 1: not a record of this version \({name} is True\)"):
        read_records(path)


def test_every_field_has_a_place_in_the_file(tmp_path: Path) -> None:
    append_records(tmp_path / "r", [record(1)])
    text = (tmp_path / "r").read_text()
    assert all(f'"{field.name}"' in text for field in fields(PromptRecord))
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_share", 0.0),
        ("step_share", -1.0),
        ("step_share", float("nan")),
        ("expert_pairs", float("inf")),
        ("expert_pairs", 10**400),
        ("decode_seconds", float("nan")),
        ("decode_seconds", -0.5),
        ("steps", -1),
        ("emitted", 10**400),
        ("score", float("nan")),
        ("verdict", "fine"),
        ("tokens", ["a"]),
        ("tokens", [1.5]),
        ("phase_seconds", {"verify": "x"}),
        ("phase_seconds", {"verify": None}),
        ("phase_seconds", {"verify": float("nan")}),
    ],
)
def test_what_no_run_can_have_written_is_an_error(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [record(1, **{name: value}), record(2)])
    with pytest.raises(UserError, match=rf"line 1: not a record of this version \({name} is ") as refused:
        read_records(path)
    assert len(str(refused.value)) < 300


def test_what_is_no_file_of_lines_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.mkdir()
    with pytest.raises(UserError, match="not readable"):
        read_records(path)
    nested = tmp_path / "nested.jsonl"
    nested.write_text("[" * 100_000 + "\n{}\n")
    with pytest.raises(UserError, match="line 1: not a record"):
        read_records(nested)
