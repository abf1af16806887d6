"""Values against the JSON schemas that ship with the package."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from ecospec.harness.schemas import SCHEMAS, schema_path


@cache
def validator(name: str) -> Draft202012Validator:
    """Of one of the schemas, which may refer to the others."""
    found = {each: json.loads(schema_path(each).read_text(encoding="utf-8")) for each in SCHEMAS}
    registry = Registry().with_resources([(each["$id"], Resource.from_contents(each)) for each in found.values()])
    Draft202012Validator.check_schema(found[name])
    return Draft202012Validator(found[name], registry=registry)


def errors(name: str, value: Any) -> list[str]:
    """What is wrong, each with where."""
    return [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(value)]


def check(name: str, value: Any) -> None:
    """Fail with all that is wrong."""
    assert errors(name, value) == []
