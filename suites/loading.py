"""Suites by name: the problems to run, as prompts that are ready for a tokenizer.

A suite is an lm-eval task file, with a `sample.jsonl` of problems beside it and, where the task is few-shot, an
`exemplars.jsonl` of worked examples. ecospec's own are the folders here; others are installed with plugins, or
given by the path of their task file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecospec.errors import UserError, one_line
from ecospec.suites.rows import Row, read_rows
from ecospec.suites.sources import EMBEDDED, HUB, Rows, rows_of_hub, rows_of_path
from ecospec.suites.task_file import TaskFile, builtin_files, find_task_file

SUITES = ("gsm8k", "humaneval", "mmstar", "aime25", "math500", "amc", "mtbench")
"""The paper's suites, in the order of its Table 1."""
FEWSHOT_SEED = 1234
"""Of the worked examples that a task draws; lm-eval's own."""


@dataclass(frozen=True)
class Problem:
    """One problem of a suite. `id` holds the index of its row in the data file, from 0.

    A conversation goes on with `follow_ups`: each is put behind the prompt and the answer before it. `turns` are
    its questions by themselves, the first included, as a chat model's messages have them. `chat_stop` are the stop
    sequences where the prompt is a message.
    """

    id: str
    prompt: str
    stop: tuple[str, ...]
    reference: str
    row: Mapping[str, Any]
    follow_ups: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    chat_stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """The problems of a suite, and what a report has to say about where they come from.

    `source` is "embedded sample" (ecospec's own), the path of the user's file, or the hub's data set with its
    `revision`; `data_sha256` is of the file's bytes or of the rows, whatever the limit. `exemplars` says whose worked
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
    task_file: TaskFile | None = field(default=None, compare=False, repr=False)
    task: Any = field(default=None, compare=False, repr=False)


def suite_names() -> list[str]:
    """The names of ecospec's own suites, sorted."""
    return list(builtin_files())


def load_suite(
    name: str,
    *,
    data: str | Path = EMBEDDED,
    limit: int | None = None,
    revision: str | None = None,
    more: Mapping[str, Path] | None = None,
) -> Suite:
    """The suite `name`, over its embedded sample, its data set on the hub (`data="hub"`, optionally pinned to a
    `revision`), or a local JSON lines or parquet file, or folder, in that data set's columns.

    `name` may also be the path of a task file, or a key of `more`, the task files of installed suites. The worked
    examples of a few-shot prompt are those beside the task file for either source, so a prompt depends on nothing
    but its own row. `limit` keeps the first problems only; a data file is checked whole all the same.

    Raises `UserError` if there is no such suite, if its task file does not fit, if `limit` is below 1, and for
    anything in the data file that does not fit, or that cannot be had. All of it but what lm-eval itself finds
    wrong with a task file is found before lm-eval is imported.
    """
    task_file = find_task_file(name, more)
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected 1 or more problems")
    if revision is not None and data != HUB:
        raise UserError(f"revision {revision!r} without data from the hub; expected --data hub with --revision")
    found = _rows(task_file, data, revision)
    rows = found.rows[:limit]
    num_fewshot = task_file.num_fewshot
    shots = _exemplars(task_file) if num_fewshot else rows
    splits = {**dict.fromkeys(task_file.other_splits, shots), task_file.split: rows}

    from ecospec.suites import lm_task

    try:
        with lm_task.quiet():
            task = lm_task.load_task(task_file.path, task_file.name, splits=splits, columns=task_file.columns)
            task.set_fewshot_seed(FEWSHOT_SEED)
            requests = list(lm_task.render(task, num_fewshot))
        if len(requests) != len(rows):
            raise ValueError(f"its process_docs makes {len(requests)} problems of {len(rows)} rows")
    except BaseException as error:  # whatever lm-eval, a template or a function of the file's raises
        if task_file.builtin or isinstance(error, KeyboardInterrupt):
            raise
        reason = one_line(error) or "no message"
        raise UserError(
            f"suite file {str(task_file.path)!r}: lm-eval cannot use it ({type(error).__name__}: {reason})"
        ) from error
    problems = tuple(
        Problem(
            f"{task_file.name}-{index}",
            request.prompt,
            request.stop,
            request.reference,
            row,
            *_conversation(task_file.metadata, row),
            chat_stop=_chat_stop(task_file.metadata, request.stop),
        )
        for index, (request, row) in enumerate(zip(requests, rows, strict=True))
    )
    whose = "written for ecospec, not from the data set" if task_file.builtin else f"from {task_file.exemplars}"
    return Suite(
        name=task_file.name,
        source=found.source,
        problems=problems,
        num_fewshot=num_fewshot,
        data_sha256=found.sha256,
        exemplars=f"{num_fewshot} {whose}" if num_fewshot else "none",
        note=task_file.metadata.get("note") or "",
        revision=found.revision,
        task_file=task_file,
        task=task,
    )


def _rows(task_file: TaskFile, data: str | Path, revision: str | None) -> Rows:
    if data == EMBEDDED:
        if not task_file.builtin and not task_file.sample.is_file():
            raise UserError(
                f"suite file {str(task_file.path)!r}: no {task_file.sample.name} beside it, so that it has no embedded "
                "sample; expected --data hub or --data with a file"
            )
        rows, digest = read_rows(task_file.sample, task_file.columns)
        return Rows(rows, "embedded sample" if task_file.builtin else str(task_file.sample), digest)
    if data != HUB:
        return rows_of_path(Path(data), task_file.columns)
    if not task_file.data_set:
        raise UserError(
            f"suite file {str(task_file.path)!r} names no data set on the hub (dataset_path); expected --data with a "
            "file"
        )
    return rows_of_hub(task_file.config, task_file.columns, revision)


def _exemplars(task_file: TaskFile) -> list[Row]:
    rows, _ = read_rows(task_file.exemplars, task_file.columns)
    if len(rows) < task_file.num_fewshot:
        raise UserError(
            f"data file {str(task_file.exemplars)!r} has {len(rows)} worked examples; expected the "
            f"{task_file.num_fewshot} of num_fewshot"
        )
    return rows


def _chat_stop(metadata: Mapping[str, Any], stop: tuple[str, ...]) -> tuple[str, ...]:
    """The task file's stop sequences for a message, or else those of the plain prompt."""
    own = metadata.get("chat_until")
    return stop if own is None else tuple(own)


def _conversation(metadata: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is put behind each answer, as the task file's metadata says, and all questions by themselves."""
    if metadata.get("follow_ups") is None:
        return (), ()
    template: str = metadata["follow_up"]
    turns = tuple(row[metadata["follow_ups"]])
    return tuple(template.replace("{{turn}}", turn) for turn in turns[1:]), turns
