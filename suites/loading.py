"""Suites by name: the problems to run, as prompts that are ready for a tokenizer.

A suite is a folder here with an lm-eval task file `<name>.yaml`, our own sample problems `sample.jsonl` and,
where the task is few-shot, our own worked examples `exemplars.jsonl`; a new folder is a new suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ecospec.errors import UserError, nearest
from ecospec.suites.rows import read_rows

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Problem:
    """One problem of a suite. `id` holds the index of its row in the data file, from 0."""

    id: str
    prompt: str
    stop: tuple[str, ...]
    reference: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Suite:
    """The problems of a suite, and what a report has to say about where they come from.

    `source` is "embedded sample" or the path of the user's file; `data_sha256` is of that file's bytes,
    whatever the limit. `exemplars` says whose worked examples stand in front of every problem, and `note`
    what a reader of a figure must know of the suite, if anything. `task` is lm-eval's, over these problems.
    """

    name: str
    source: str
    problems: tuple[Problem, ...]
    num_fewshot: int
    data_sha256: str
    exemplars: str
    note: str = ""
    task: Any = field(default=None, compare=False, repr=False)


def suite_names() -> list[str]:
    """The names of all suites, sorted."""
    return sorted(folder.name for folder in _root().iterdir() if (folder / f"{folder.name}.yaml").is_file())


def load_suite(name: str, *, data: str | Path = EMBEDDED, limit: int | None = None) -> Suite:
    """The suite `name`, over its embedded sample or over a local JSON lines file in its data set's columns.

    The worked examples of a few-shot prompt are this project's own for either source, so a prompt depends on
    nothing but its own row. `limit` keeps the first problems only; a data file is checked whole all the same.

    Raises `UserError` if there is no such suite, if `limit` is below 1, and for anything in the data file
    that does not fit. All of it is found before lm-eval is imported.
    """
    if name not in suite_names():
        raise UserError(f"no suite {name!r}; {nearest(name, suite_names())}")
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected 1 or more problems")
    folder = _root() / name
    embedded = data == EMBEDDED
    config = _read_task_file(folder / f"{name}.yaml")
    columns: dict[str, str] = config["metadata"]["columns"]
    rows, data_sha256 = read_rows(folder / "sample.jsonl" if embedded else Path(data), columns)
    rows = rows[:limit]
    num_fewshot: int = config["num_fewshot"]
    splits = {config.get("test_split") or config["validation_split"]: rows}
    if num_fewshot:
        splits[config["fewshot_split"]], _ = read_rows(folder / "exemplars.jsonl", columns)

    from ecospec.suites import lm_task

    with lm_task.quiet():
        task = lm_task.load_task(folder, name, splits=splits, columns=columns)
        requests = list(lm_task.render(task, num_fewshot))
    problems = tuple(
        Problem(f"{name}-{index}", request.prompt, request.stop, request.reference, row)
        for index, (request, row) in enumerate(zip(requests, rows, strict=True))
    )
    return Suite(
        name=name,
        source="embedded sample" if embedded else str(data),
        problems=problems,
        num_fewshot=num_fewshot,
        data_sha256=data_sha256,
        exemplars=f"{num_fewshot} written for ecospec, not from the data set" if num_fewshot else "none",
        note=config["metadata"].get("note", ""),
        task=task,
    )


def _root() -> Path:
    # lm-eval reads task files by path; the package is always installed as plain files.
    return Path(str(files("ecospec.suites")))


def _read_task_file(path: Path) -> dict[str, Any]:
    """The settings that are needed before lm-eval is; it reads the file again itself."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads a function's name as text; lm-eval imports it."""

    Loader.add_constructor("!function", lambda loader, node: str(node.value))
    config: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # a SafeLoader
    return config
