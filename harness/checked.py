"""What is wrong with a file of a known form, in one line."""

from __future__ import annotations

from pydantic import ValidationError

from ecospec.errors import one_line


def first_problem(error: Exception) -> str:
    """Where the first wrong value stands and what was expected there, without a full stop."""
    if not isinstance(error, ValidationError):
        return one_line(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{where}: {' '.join(first['msg'].removeprefix('Value error, ').split())}"
