"""A saved baseline: a run without texts and times, small enough to be committed. One JSON object a line.

The first line says what the file is, one line a run what it was, and one line a prompt and method its figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.comparing.comparable import KEPT_FACTS
from ecospec.harness.comparing.runs import Method, Output, Run, by_method
from ecospec.harness.writing import write_text

SCHEMA = 1
MARK = "ecospec_baseline"
NOT_SAVED = ("prefill_seconds", "decode_seconds")


def save_baseline(path: Path, runs: Sequence[Run]) -> None:
    """Write a baseline.

    Raises:
        UserError: it cannot be written.
    """
    lines: list[dict[str, Any]] = [{MARK: SCHEMA}]
    for run in runs:
        facts = {key: run.facts.get(key) for key in KEPT_FACTS}
        methods = [asdict(method) for method in run.methods]
        lines.append({"run": run.name, "moe_layers": run.moe_layers, "methods": methods, "facts": facts})
        for found in run.outputs.values():
            for output in found.values():
                plain = {key: value for key, value in asdict(output).items() if key not in NOT_SAVED}
                lines.append({"run": run.name, **plain})
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read_baseline(path: Path, text: str) -> list[Run]:
    """The runs of a baseline.

    Args:
        text: what is in the file.

    Raises:
        UserError: it is damaged, or of another version.
    """
    heads: dict[str, dict[str, Any]] = {}
    outputs: dict[str, list[Output]] = {}
    names = {field.name for field in fields(Output)} - set(NOT_SAVED)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            raw = json.loads(line)
            if number == 1:
                if raw[MARK] != SCHEMA:
                    raise UserError(
                        f"{path}: a baseline of schema {raw[MARK]}, expected {SCHEMA}; save it anew from a run"
                    )
                continue
            name = str(raw.pop("run"))
            if "methods" in raw:
                raw["methods"] = tuple(Method(**each) for each in raw["methods"])
                heads[name], outputs[name] = raw, []
            elif set(raw) == names:
                outputs[name].append(Output(**raw))
            else:
                raise ValueError("its keys are not an output's")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a baseline ({type(error).__name__}: {error})") from error
    return [
        Run(name, head["facts"], int(head["moe_layers"]), head["methods"], by_method(outputs[name]))
        for name, head in heads.items()
    ]
