"""JSON schemas (draft 2020-12) of the files that a run leaves."""

from __future__ import annotations

from pathlib import Path

SCHEMAS = ("manifest", "prompt-record", "activations", "report", "summary")
"""Of manifest.json, a line of prompts.jsonl, a line of activations.jsonl, report.json and summary.json."""


def schema_path(name: str) -> Path:
    """The file of one of them."""
    return Path(__file__).parent / f"{name}.schema.json"
