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
from ecospec.suites.sources import EMBEDDED, HUB, Rows, rows_of_hub, rows_of_path

SUITES = ("gsm8k", "humaneval", "mmstar", "aime25", "math500", "amc", "mtbench")
"""The paper's suites, in the order of its Table 1."""


@dataclass(frozen=True)
class Problem:
    """One problem of a suite. `id` holds the index of its row in the data file, from 0.

    A conversation goes on with `follow_ups`: each is put behind the prompt and the answer before it.
    """

    id: str
    prompt: str
    stop: tuple[str, ...]
    reference: str
    row: Mapping[str, Any]
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """The problems of a suite, and what a report has to say about where they come from.

    `source` is "embedded sample", the path of the user's file, or the hub's data set with its `revision`;
    `data_sha256` is of the file's bytes or of the rows, whatever the limit. `exemplars` says whose worked
    examples stand in front of every problem, and `note` what a reader of a figure must know of the suite, if
    anything. `task` is lm-eval's, over these problems.
    """

    name: str
    source: str
    problems: tuple[Problem, ...]
    num_fewshot: int
    data_sha256: str
    exemplars: str
    note: str = ""
    revision: str = ""
    task: Any = field(default=None, compare=False, repr=False)


def suite_names() -> list[str]:
    """The names of all suites, sorted."""
    return sorted(folder.name for folder in _root().iterdir() if (folder / f"{folder.name}.yaml").is_file())


def load_suite(
    name: str, *, data: str | Path = EMBEDDED, limit: int | None = None, revision: str | None = None
) -> Suite:
    """The suite `name`, over its embedded sample, its data set on the hub (`data="hub"`, optionally pinned to a
    `revision`), or a local JSON lines or parquet file, or folder, in that data set's columns.

    The worked examples of a few-shot prompt are this project's own for either source, so a prompt depends on
    nothing but its own row. `limit` keeps the first problems only; a data file is checked whole all the same.

    Raises `UserError` if there is no such suite, if `limit` is below 1, and for anything in the data file
    that does not fit, or that cannot be had. All of it is found before lm-eval is imported.
    """
    if name not in suite_names():
        raise UserError(f"no suite {name!r}; {nearest(name, suite_names())}")
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected 1 or more problems")
    folder = _root() / name
    config = _read_task_file(folder / f"{name}.yaml")
    columns: dict[str, str] = config["metadata"]["columns"]
    if revision is not None and data != HUB:
        raise UserError(f"revision {revision!r} without data from the hub; expected --data hub with --revision")
    found = _rows(folder, config, data, revision)
    rows = found.rows[:limit]
    num_fewshot: int = config["num_fewshot"]
    splits = {config.get("test_split") or config["validation_split"]: rows}
    if num_fewshot:
        splits[config["fewshot_split"]], _ = read_rows(folder / "exemplars.jsonl", columns)

    from ecospec.suites import lm_task

    with lm_task.quiet():
        task = lm_task.load_task(folder, name, splits=splits, columns=columns)
        requests = list(lm_task.render(task, num_fewshot))
    problems = tuple(
        Problem(f"{name}-{index}", request.prompt, request.stop, request.reference, row, _follow_ups(config, row))
        for index, (request, row) in enumerate(zip(requests, rows, strict=True))
    )
    return Suite(
        name=name,
        source=found.source,
        problems=problems,
        num_fewshot=num_fewshot,
        data_sha256=found.sha256,
        exemplars=f"{num_fewshot} written for ecospec, not from the data set" if num_fewshot else "none",
        note=config["metadata"].get("note", ""),
        revision=found.revision,
        task=task,
    )


def _rows(folder: Path, config: Mapping[str, Any], data: str | Path, revision: str | None) -> Rows:
    columns = config["metadata"]["columns"]
    if data == EMBEDDED:
        rows, digest = read_rows(folder / "sample.jsonl", columns)
        return Rows(rows, "embedded sample", digest)
    return rows_of_hub(config, columns, revision) if data == HUB else rows_of_path(Path(data), columns)


def _follow_ups(config: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    """What is put behind each answer of a conversation, as the task file's metadata says."""
    metadata = config["metadata"]
    if "follow_ups" not in metadata:
        return ()
    template: str = metadata["follow_up"]
    return tuple(template.replace("{{turn}}", turn) for turn in row[metadata["follow_ups"]][1:])


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
