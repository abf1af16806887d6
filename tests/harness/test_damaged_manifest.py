"""Manifests of runs that were damaged or edited by hand: one line that says where, in every command that reads one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecospec.errors import UserError
from ecospec.harness.run_folder import read_manifest
from ecospec.harness.schemas import schema_path

SCHEMA = json.loads(schema_path("manifest").read_text(encoding="utf-8"))
ANY_KEYS = [*((name, dict) for name in ("chat_switches", "options", "cost_model")), ("method_parts", list)]
"""What may hold any key; where one is missing in it, its reader says so."""
COMMANDS = (
    *(("report", "out", "--format", kind) for kind in ("markdown", "csv", "json", "paper", "html")),
    ("compare", "out", "out"),
    ("--resume", "out"),
)


@pytest.fixture
def manifest(bench: Callable[..., Any], tmp_path: Path) -> Path:
    assert bench("--output", "out").code == 0
    return tmp_path / "out" / "manifest.json"


def test_what_is_there_is_of_its_type_and_what_a_report_needs_is_there(manifest: Path) -> None:
    whole = json.loads(manifest.read_text(encoding="utf-8"))
    assert read_manifest(manifest, whole=True) == whole
    for key in SCHEMA["properties"]:
        for wrong in ({"odd": [{}]}, [{"odd": 1}], -1.5):
            if (key, type(wrong)) in ANY_KEYS:
                continue
            manifest.write_text(json.dumps({**whole, key: wrong}), encoding="utf-8")
            with pytest.raises(
                UserError, match=rf"manifest.json is damaged or of another version \({key}.* expected"
            ) as raised:
                read_manifest(manifest)
            assert "\n" not in str(raised.value)
            assert len(str(raised.value)) < 1000
        without = {name: value for name, value in whole.items() if name != key}
        manifest.write_text(json.dumps(without), encoding="utf-8")
        assert read_manifest(manifest) == without  # a reader that needs it says so
        if key in SCHEMA["required"]:
            with pytest.raises(UserError, match=f"lacks {key}"):
                read_manifest(manifest, whole=True)
    named = {name: value for name, value in whole.items() if name != "acceptance"}
    manifest.write_text(json.dumps({**named, "estimated": True}), encoding="utf-8")
    with pytest.raises(UserError, match="lacks acceptance"):
        read_manifest(manifest, whole=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "the file is"),
        ('{"temperature": NaN}', "NaN is no number"),
        ('{"temperature": 1e400}', "temperature is inf"),
        ('{"geometry": {"moe_layers": "2"}}', "geometry.moe_layers is '2'"),
        ("{}", "the file lacks suite"),
    ],
)
def test_it_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_manifest(tmp_path / "manifest.json", whole=True)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_says_it_in_one_line(
    manifest: Path, command: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    whole = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**whole, "temperature": "warm"}), encoding="utf-8")
    ran = command(*arguments)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "temperature is 'warm', expected type \"number\"" in ran.err
