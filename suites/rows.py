"""Strict reading of a JSON lines file: every mistake in it is found, and named, before anything runs.

lm-eval would meet a bad row in the middle of a run, as a traceback or as a silently odd prompt.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ecospec.errors import UserError

Row = dict[str, Any]

_COLUMNS_SHOWN = 12
MOST = 2**63
"""What a table can hold; it also keeps infinities out."""


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value < MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


# The types a task file can give to a column, with the words of an error message.
COLUMN_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "string": ("a string", _is_string),
    "integer": ("a whole number", _is_integer),
    "number": ("a number", _is_number),
    "strings": ("a list of strings", _is_strings),
}

_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def read_rows(path: Path, columns: Mapping[str, str]) -> tuple[list[Row], str]:
    """The rows of the JSON lines file at `path`, and the SHA-256 of the file's bytes.

    `columns` maps each column that must be there to its type: ``string``, ``integer``, ``number`` or
    ``strings``. Further columns are kept as they are. Blank lines, CRLF and a byte order mark are tolerated.
    Raises `UserError`, with the line number, at the first thing that does not fit.
    """
    raw = _read_bytes(path)
    rows = []
    # Not splitlines(): JSON strings may hold a bare U+2028, which is no line end in a JSON lines file.
    for number, line in enumerate(_decode(raw, path).split("\n"), start=1):
        if line.strip():
            rows.append(_read_row(line, columns, f"data file {str(path)!r}, line {number}"))
    if not rows:
        raise UserError(f"data file {str(path)!r} has no rows; expected one JSON object a line")
    return rows, hashlib.sha256(raw).hexdigest()


def _read_bytes(path: Path) -> bytes:
    expected = "expected 'embedded', 'hub', or the path of a JSON lines or parquet file or folder"
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe, or /dev/zero: it may never end
            raise UserError(f"data file {str(path)!r} is not a regular file; {expected}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no data file {str(path)!r}; {expected}") from None
    except IsADirectoryError:
        raise UserError(f"data file {str(path)!r} is a folder; {expected}") from None
    except OSError as error:
        raise UserError(f"cannot read data file {str(path)!r}: {error.strerror}; {expected}") from None
    except ValueError as error:  # a NUL character in the path
        raise UserError(f"cannot read data file {str(path)!r}: {error}; {expected}") from None


def _decode(raw: bytes, path: Path) -> str:
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"data file {str(path)!r}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8; "
            "expected JSON lines in UTF-8"
        ) from None


def _read_row(line: str, columns: Mapping[str, str], where: str) -> Row:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); expected one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); expected one JSON object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: {_JSON_NAMES[type(row)]}; expected one JSON object a line")
    check_row(row, columns, where)
    return row


def check_row(row: Row, columns: Mapping[str, str], where: str) -> None:
    """Raise `UserError`, beginning with `where`, at the first of `columns` that does not fit."""
    for column, kind in columns.items():
        _check_column(row, column, kind, where)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_column(row: Row, column: str, kind: str, where: str) -> None:
    if column not in row:
        found = sorted(row)
        shown = ", ".join(map(repr, found[:_COLUMNS_SHOWN])) or "none"
        more = ", ..." if len(found) > _COLUMNS_SHOWN else ""
        close = difflib.get_close_matches(column, found, n=1)
        hint = f"; the nearest is {close[0]!r}" if close else ""
        raise UserError(f"{where}: no column {column!r} (found: {shown}{more}{hint})")
    value = row[column]
    words, fits = COLUMN_KINDS[kind]
    if not fits(value):
        raise UserError(f"{where}: column {column!r} is {_shown(value, kind)}; expected {words}")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            _check_text(text, column, where)


def _shown(value: object, kind: str) -> str:
    """What a value is, in words, and what is wrong with one that is nearly of the kind."""
    name = _JSON_NAMES.get(type(value), f"of type {type(value).__name__}")
    if kind == "strings" and isinstance(value, list):
        others = [item for item in value if not isinstance(item, str)]
        return f"a list that holds {_shown(others[0], '')}" if others else "an empty list"
    if kind in ("integer", "number") and isinstance(value, int | float) and not abs(value) < MOST:
        return f"{name} beyond 64 bits or not finite"
    return name


def _check_text(text: str, column: str, where: str) -> None:
    if not text.strip():
        raise UserError(f"{where}: column {column!r} is empty; expected text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can escape half of a surrogate pair, which no tokenizer can encode.
        raise UserError(f"{where}: column {column!r} has half of a surrogate pair; expected text") from None
