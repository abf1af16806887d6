"""The column types that a task file can ask for."""

import json
from pathlib import Path

import pytest

from ecospec.errors import UserError
from ecospec.suites.rows import read_rows


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"it": value}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "value"),
    [("string", "a"), ("integer", 3), ("number", 3), ("number", 0.5), ("strings", ["a", "b"])],
)
def test_value_of_its_type_is_read(tmp_path: Path, kind: str, value: object) -> None:
    rows, _ = read_rows(write(tmp_path, value), {"it": kind})
    assert rows == [{"it": value}]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("integer", 0.5, "is a number; expected a whole number"),
        ("integer", True, "is true or false; expected a whole number"),
        ("number", "3", "is a string; expected a number"),
        ("number", False, "is true or false; expected a number"),
        ("strings", "a", "is a string; expected a list of strings"),
        ("strings", [], "is an empty list; expected a list of strings"),
        ("strings", ["a", 1], "is a list that holds a number; expected a list of strings"),
        ("strings", ["a", ""], "is empty; expected text"),
    ],
)
def test_value_of_another_type_is_refused(tmp_path: Path, kind: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rows(write(tmp_path, value), {"it": kind})
    assert str(caught.value).endswith(f"line 1: column 'it' {message}")
