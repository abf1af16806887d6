"""Values against the schemas. Imports jsonschema when called."""

from __future__ import annotations

import json
import reprlib
from functools import cache
from typing import TYPE_CHECKING, Any

from ecospec.harness.schemas import schema_path

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


@cache
def _validator(name: str) -> Draft202012Validator:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema_path(name).read_text(encoding="utf-8")))


def first_misfit(name: str, value: Any, *, whole: bool = True) -> str | None:
    """The first value that does not fit a schema, with where it stands and what was expected; None where all do.

    Args:
        name: of a schema that refers to no other.
        whole: whether a missing key is a misfit.
    """
    lacks: list[str] = []
    for error in _validator(name).iter_errors(value):
        where = error.json_path.removeprefix("$").removeprefix(".") or "the file"
        if error.validator == "required":
            lacks += [f"{where} lacks {key}" for key in error.validator_value if key not in error.instance]
            continue
        expected = f"{error.validator} {json.dumps(error.validator_value)}"
        return f"{where} is {reprlib.repr(error.instance)}, expected {expected}"
    return lacks[0] if whole and lacks else None
