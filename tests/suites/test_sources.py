"""Where rows come from: files, folders, parquet, and the hub, which tests never reach."""

from __future__ import annotations

import json
import os
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from ecospec.errors import UserError
from ecospec.suites import HUB, load_suite
from ecospec.suites.sources import rows_hash, rows_of_path

COLUMNS = {"question": "string", "answer": "string"}
ROWS = [{"question": "What is 2 + 3?", "answer": "#### 5"}, {"question": "Why?\n", "answer": "So.\n#### 1"}]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_gives_the_rows_that_jsonl_gives(tmp_path: Path) -> None:
    plain = rows_of_path(write_jsonl(tmp_path / "a.jsonl", ROWS), COLUMNS)
    packed = rows_of_path(write_parquet(tmp_path / "a.parquet", ROWS), COLUMNS)
    assert plain.rows == packed.rows == ROWS
    assert packed.source == str(tmp_path / "a.parquet")
    assert packed.sha256 == rows_hash(ROWS) != plain.sha256


def test_a_folder_of_shards_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "test-00001.parquet", ROWS[1:])
    write_parquet(tmp_path / "data" / "test-00000.parquet", ROWS[:1])
    assert rows_of_path(tmp_path, COLUMNS).rows == ROWS
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "test.jsonl", ROWS)
    assert rows_of_path(tmp_path / "other", COLUMNS).rows == ROWS
    with pytest.raises(UserError, match=r"holds 1 JSON lines and 2 parquet files; expected one JSON lines file, or"):
        rows_of_path(tmp_path, COLUMNS)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"holds 0 JSON lines and 0 parquet files"):
        rows_of_path(tmp_path / "none", COLUMNS)


def test_other_columns_are_left_in_the_file(tmp_path: Path) -> None:
    """Images, and types that are no JSON or cannot be read at all."""
    rows = [{**row, "image": {"bytes": b"\x89PNG", "path": "0.png"}, "when": datetime(2026, 1, 1)} for row in ROWS]
    assert rows_of_path(write_parquet(tmp_path / "a.parquet", rows), COLUMNS).rows == ROWS


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), date(2026, 1, 1), Decimal("1.5"), b"bytes", 5, ["a"]])
def test_a_column_of_another_type_is_one_line(tmp_path: Path, value: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"question": value, "answer": "So"}])
    with pytest.raises(UserError, match=r"row 0: column 'question' is .*; expected a string"):
        rows_of_path(path, COLUMNS)


@pytest.mark.parametrize(
    ("suite", "line", "said"),
    [
        (
            "aime25",
            '{"problem": "x", "answer": 1' + "0" * 30 + "}",
            "a number beyond 64 bits or not finite; expected a whole number",
        ),
        (
            "amc",
            '{"problem": "x", "answer": 1' + "0" * 4000 + "}",
            "a number beyond 64 bits or not finite; expected a number",
        ),
        ("amc", '{"problem": "x", "answer": 1e400}', "a number beyond 64 bits or not finite; expected a number"),
        ("mtbench", '{"category": "x", "turns": []}', "an empty list; expected a list of strings"),
        ("mtbench", '{"category": "x", "turns": ["Hi", 3]}', "a list that holds a number; expected a list of"),
    ],
)
def test_numbers_and_lists_that_no_table_holds_are_one_line(tmp_path: Path, suite: str, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_suite(suite, data=tmp_path / "a.jsonl")
    assert said in str(caught.value)


def test_whole_and_broken_numbers_share_a_column(tmp_path: Path) -> None:
    rows = [{"problem": "x", "answer": 2**60 + 1}, {"problem": "y", "answer": 1.5}]
    assert len(load_suite("amc", data=write_jsonl(tmp_path / "a.jsonl", rows)).problems) == 2


def test_what_may_never_end_or_has_no_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="is not a regular file"):
            load_suite("gsm8k", data=path)
    with pytest.raises(UserError, match="data '' names no file"):
        load_suite("gsm8k", data="")


def test_parquet_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"bad\.parquet': not readable as parquet"):
        rows_of_path(tmp_path / "bad.parquet", COLUMNS)
    path = write_parquet(tmp_path / "a.parquet", [{"question": "Why?", "reply": "So"}])
    with pytest.raises(UserError, match=r"a\.parquet', row 0: no column 'answer'"):
        rows_of_path(path, COLUMNS)
    empty = pyarrow.Table.from_pylist([], schema=pyarrow.schema({"question": pyarrow.string()}))
    pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="has no rows"):
        rows_of_path(tmp_path / "empty.parquet", COLUMNS)
    with pytest.raises(UserError, match="no data file"):
        rows_of_path(tmp_path / "nowhere.parquet", COLUMNS)


class Builder:
    """A data set of the hub, without a hub."""

    hash = "0123456789abcdef"
    asked: tuple[Any, ...] = ()

    def __init__(self, *asked: Any) -> None:
        type(self).asked = asked

    def download_and_prepare(self) -> None:
        pass

    def as_dataset(self, split: str) -> Any:
        assert split == "test"
        return datasets.Dataset.from_list(ROWS)


def test_the_hubs_data_set_is_asked_for_by_its_name_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda path, config, revision: Builder(path, config, revision)
    )
    suite = load_suite("gsm8k", data=HUB, revision="v1", limit=1)
    assert Builder.asked == ("openai/gsm8k", "main", "v1")
    assert suite.source == "hub openai/gsm8k main at 0123456789ab"
    assert suite.revision == "0123456789abcdef"
    assert suite.data_sha256 == rows_hash(ROWS)
    assert suite.problems[0].prompt.endswith("Question: What is 2 + 3?\nAnswer:")


def test_mt_bench_is_its_question_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local = tmp_path / "snapshots" / "abc" / "question.jsonl"
    local.parent.mkdir(parents=True)
    write_jsonl(local, [{"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}])
    asked: dict[str, Any] = {}

    def download(repo: str, path: str, **options: Any) -> str:
        asked.update(options, repo=repo, path=path)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    suite = load_suite("mtbench", data=HUB)
    assert (asked["repo"], asked["path"]) == ("lmsys/mt-bench", "data/mt_bench/question.jsonl")
    assert asked["repo_type"] == "space"
    assert suite.revision == "abc"
    assert suite.problems[0].follow_ups == ("\n\nUser: Two?\n\nAssistant:",)


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach it\non the hub"), ValueError("x"), OSError()])
def test_a_hub_that_cannot_be_reached_is_one_line_with_two_ways_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for name, data_set in (("gsm8k", "openai/gsm8k"), ("mtbench", "lmsys/mt-bench")):
        with pytest.raises(UserError) as caught:
            load_suite(name, data=HUB)
        message = str(caught.value)
        assert message.startswith(f"data set {data_set}: not to be had from the hub (")
        assert "--data with a local copy" in message
        assert "HF_HOME" in message
        assert "\n" not in message


def test_a_data_set_in_other_columns_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(
        hash="1",
        download_and_prepare=lambda: None,
        as_dataset=lambda split: datasets.Dataset.from_list([{"question": "a"}]),
    )
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: other)
    with pytest.raises(UserError, match="data set openai/gsm8k, row 0: no column 'answer'"):
        load_suite("gsm8k", data=HUB)


def test_a_revision_of_anything_but_the_hub_is_refused() -> None:
    with pytest.raises(UserError, match="revision 'v1' without data from the hub; expected --data hub"):
        load_suite("gsm8k", revision="v1")
