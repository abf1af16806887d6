"""Task files of suites of one's own, and how they are refused; shared by the tests of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecospec.errors import UserError
from ecospec.suites import load_suite
from ecospec.suites.task_file import read_task_file

PLAIN: dict[str, Any] = {
    "task": "mine",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Q:"], "do_sample": False},
    "metadata": {"version": 1.0, "columns": {"question": "string", "answer": "string"}},
}
MISSING: Any = object()
ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]


def settings(**changed: Any) -> dict[str, Any]:
    """Those of the plain task; `metadata__note` stands for `note` in the metadata, MISSING for no such key."""
    found = {**PLAIN, "metadata": dict(PLAIN["metadata"])}
    for key, value in changed.items():
        inner, _, name = key.rpartition("__")
        place = found[inner] if inner else found
        if value is MISSING:
            del place[name]
        else:
            place[name] = value
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_task(folder: Path, **changed: Any) -> Path:
    """The plain task with these changes, and an embedded sample of three rows."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(settings(**changed)), encoding="utf-8")
    write_rows(folder / "sample.jsonl", ROWS)
    return path


def write_scored(folder: Path, body: str) -> Path:
    """The plain task, scored by a function of the file `score.py` beside it with this body."""
    path = write_task(folder, metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}])
    path.write_text(f"{path.read_text()}process_results: !function score.f\n", encoding="utf-8")
    (folder / "score.py").write_text(f"def f(doc, results):\n    {body}\n", encoding="utf-8")
    return path


def copied(name: str, folder: Path, *replaced: tuple[str, str]) -> Path:
    """One of ecospec's own suites under the name `mine`, with parts of its task file replaced."""
    shutil.copytree(Path(str(files("ecospec.suites"))) / name, folder / "mine")
    path = folder / "mine" / "mine.yaml"
    (folder / "mine" / f"{name}.yaml").rename(path)
    text = path.read_text(encoding="utf-8")
    for old, new in ((f"task: {name}\n", "task: mine\n"), *replaced):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, act: Callable[[], object]) -> str:
    """The one line with which `act` refuses the task file, less the file's name."""
    with pytest.raises(UserError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"suite file {str(path)!r}")
    return message.removeprefix(f"suite file {str(path)!r}").removeprefix(": ")


def reading(path: Path) -> str:
    return refusal(path, lambda: read_task_file(path))


def loading(path: Path, **options: Any) -> str:
    return refusal(path, lambda: load_suite(str(path), **options))
