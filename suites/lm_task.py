"""The bridge to lm-eval: a task file and rows in memory become the requests that lm-eval would send.

Nothing of the prompt is built here: few-shot building, delimiters and stop sequences are lm-eval's own, so
that a number measured on a suite is about the same text as anyone else's. Only the source of the rows is
replaced, through `custom_dataset`, which keeps lm-eval off the network and off the data sets' cache folder.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One prompt as lm-eval sends it to a model, and the text it is scored against."""

    prompt: str
    stop: tuple[str, ...]
    reference: str


def load_task(
    path: Path,
    name: str,
    *,
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
    columns: Mapping[str, str],
) -> Any:
    """lm-eval's task `name` of the task file at `path`, over the rows in `splits`.

    Only `columns` are handed on, since rows may differ in the type of any other column, which a `Dataset`
    cannot hold.
    """
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    def custom_dataset(**_: Any) -> dict[str, Any]:
        return {
            split: Dataset.from_list([{name: _cell(row[name], kind) for name, kind in columns.items()} for row in rows])
            for split, rows in splits.items()
        }

    # A task manager reads every task file below a folder; this one is shown a folder with nothing else.
    with tempfile.TemporaryDirectory() as folder:
        shown = {"include": str(path.resolve()), "task": name}
        (Path(folder) / "suite.yaml").write_text(json.dumps(shown), encoding="utf-8")  # JSON is YAML
        manager = TaskManager(include_path=folder, include_defaults=False)
        # A task named inside a group is the one spec that lets lm-eval lay a setting over a task file.
        group = {"group": "ecospec", "task": [{"task": name, "custom_dataset": custom_dataset}]}
        return manager.load(group)["tasks"][name]


def _cell(value: Any, kind: str) -> Any:
    """A value as its column holds it: a column of numbers holds no mixture of integers and others."""
    return float(value) if kind == "number" else value


def render(task: Any, num_fewshot: int) -> Iterator[Request]:
    """The requests of `task`, in the order of its rows, by the calls that lm-eval's evaluator makes."""
    for doc in task.eval_docs:
        context = task.fewshot_context(doc=doc, num_fewshot=num_fewshot, gen_prefix=task.doc_to_prefix(doc))
        prompt, generation = task.construct_requests(doc=doc, ctx=context).args
        until = generation["until"]
        stop = (until,) if isinstance(until, str) else tuple(until)
        if isinstance(until, Mapping) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"generation_kwargs.until is {until!r}, expected stop sequences")
        yield Request(prompt=prompt, stop=stop, reference=str(task.doc_to_target(doc)))


def metric_of(task: Any, doc: Any, text: str, metric: str) -> float:
    """What `task` gives a text that was generated for a row, after its last chain of filters."""
    instance = task.construct_requests(doc=doc, ctx="")
    instance.resps = [text]
    task._instances = [instance]
    task.apply_filters()
    filtered = list(instance.filtered_resps.values())[-1]
    return float(task.process_results(doc, [filtered])[metric])


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps warnings and log lines of lm-eval and its dependencies from the user's terminal.

    They speak of settings that the user did not make. Errors pass, and the process's own settings are put
    back at the end.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
