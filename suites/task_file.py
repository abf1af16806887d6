"""A suite's task file: an lm-eval YAML file, with what this project needs to know of its data in ``metadata``.

lm-eval reads the file again itself; here it is read, and checked, before lm-eval is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from ecospec.errors import UserError, nearest
from ecospec.suites.rows import COLUMN_KINDS

SUFFIXES = (".yaml", ".yml")
ALL = "all"
"""What stands for all of ecospec's own suites, and so names none."""
SAMPLE, EXEMPLARS = "sample.jsonl", "exemplars.jsonl"
MOST_INCLUDES = 8
# YAML's aliases make a few lines into a value of any size.
_shown = reprlib.Repr()
_shown.maxlevel = 2
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class TaskFile:
    """A task file that was read and found usable.

    Attributes:
        name: the task's name, which is the suite's.
        config: its settings, included files merged in; functions are left as their names.
        builtin: whether it is one of ecospec's own.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    builtin: bool

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What ecospec reads and lm-eval does not."""
        found: Mapping[str, Any] = self.config["metadata"]
        return found

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the data that the task needs, by their kind."""
        found: Mapping[str, str] = self.metadata["columns"]
        return found

    @property
    def num_fewshot(self) -> int:
        """Worked examples in front of every problem."""
        return self.config.get("num_fewshot") or 0

    @property
    def split(self) -> str:
        """The split that holds the problems."""
        return str(self.config.get("test_split") or self.config["validation_split"])

    @property
    def fewshot_split(self) -> str:
        """The split that lm-eval takes worked examples from."""
        return next(iter(self._further_splits()), self.split)

    @property
    def other_splits(self) -> set[str]:
        """Every split that the file names, besides that of the problems."""
        return set(self._further_splits()) - {self.split}

    def _further_splits(self) -> list[str]:
        fewshot = self.config.get("fewshot_config")
        own = fewshot.get("split") if isinstance(fewshot, Mapping) else None
        named = (own, *(self.config.get(f"{use}_split") for use in ("fewshot", "training", "validation")))
        return [str(split) for split in named if split is not None]

    @property
    def sample(self) -> Path:
        """Where the embedded sample is, if there is one."""
        return self.path.parent / SAMPLE

    @property
    def exemplars(self) -> Path:
        """Where the worked examples are, if there are any."""
        return self.path.parent / EXEMPLARS

    @property
    def sha256(self) -> str:
        """SHA-256 of all settings and of the Python files beside it, which they may name."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        for path in sorted(self.path.parent.glob("*.py")):
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    @property
    def data_set(self) -> str:
        """The data set on the hub; empty where the file names none."""
        hub_file = self.metadata.get("hub_file")
        return str(hub_file["repo"] if hub_file else self.config.get("dataset_path") or "")


@dataclass
class InstalledSuites:
    """The suites that plugins bring, by name."""

    kind: ClassVar[str] = "suite"
    files: dict[str, TaskFile] = field(default_factory=dict)
    providers: dict[str, str] = field(default_factory=dict)

    def register(self, path: object, provider: str) -> None:
        """Add a task file.

        Raises:
            TypeError: it is no path.
            UserError: its name is taken, or see `read_task_file`.
        """
        if not isinstance(path, str | Path):
            raise TypeError(f"{path!r} is a {type(path).__name__}; expected the path of a task file")
        task_file = read_task_file(Path(path))
        if task_file.name in builtin_files() or task_file.name == ALL:
            raise UserError(f"the suite name {task_file.name!r} of {provider} is already taken by ecospec")
        if task_file.name in self.files:
            taken = self.providers[task_file.name]
            raise UserError(f"the suite name {task_file.name!r} of {provider} is already taken by {taken}")
        self.files[task_file.name] = task_file
        self.providers[task_file.name] = provider

    def __contains__(self, name: object) -> bool:
        return name in self.files or name in builtin_files()

    @property
    def paths(self) -> dict[str, Path]:
        """The task files' paths by name."""
        return {name: task_file.path for name, task_file in self.files.items()}


def builtin_files() -> dict[str, Path]:
    """ecospec's own task files by the suite's name, sorted."""
    root = Path(str(files("ecospec.suites")))  # always installed as plain files: lm-eval reads them by path
    found = {folder.name: folder / f"{folder.name}.yaml" for folder in root.iterdir()}
    return {name: path for name, path in sorted(found.items()) if path.is_file()}


def find_task_file(name: str, more: Mapping[str, Path] | None = None) -> TaskFile:
    """The task file of a suite that is given by name or by path.

    Args:
        more: installed suites besides ecospec's own, by name.

    Raises:
        UserError: there is no such suite, or see `read_task_file`.
    """
    known = builtin_files()
    if name in known:
        return read_task_file(known[name], builtin=True)
    if more and name in more:
        return read_task_file(more[name])
    if name.endswith(SUFFIXES):
        task_file = read_task_file(Path(name))
        if task_file.name in known and Path(name).resolve() != known[task_file.name].resolve():
            raise UserError(
                f"suite file {name!r}: task is {task_file.name!r}, the name of one of ecospec's own suites; expected "
                "another"
            )
        return task_file
    hint = "it is a folder: give the task file in it" if Path(name).is_dir() else "or give the path of a task file"
    raise UserError(f"no suite {name!r}; {nearest(name, [*known, *(more or ())])}; {hint}")


def read_task_file(path: Path, *, builtin: bool = False) -> TaskFile:
    """Read and check a task file.

    Raises:
        UserError: it cannot be read, is no lm-eval task that generates text, or does not say what its data are.
    """
    config = _settings(path, path, 0)

    def refuse(reason: str) -> UserError:
        return UserError(f"suite file {str(path)!r}: {reason}")

    name = config.get("task")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(f"task is {_shown.repr(name)}; expected a name of letters, digits, '.', '+', '-' and '_'")
    for key, expected in _EXPECTED.items():
        if not expected.fits(config):
            raise refuse(f"{key} is {_shown.repr(expected.value(config))}; expected {expected.words}")
    task = TaskFile(name, path, config, builtin)
    if task.num_fewshot and not task.exemplars.is_file():
        raise refuse(f"num_fewshot is {task.num_fewshot}, but there is no {EXEMPLARS} beside it with worked examples")
    if task.num_fewshot and task.fewshot_split == task.split:
        raise refuse(f"worked examples would come from {task.split!r} too; expected a fewshot_split of its own")
    fewshot_config = config.get("fewshot_config")
    if task.num_fewshot and isinstance(fewshot_config, Mapping) and fewshot_config.get("samples") is not None:
        raise refuse(f"fewshot_config.samples besides {EXEMPLARS}; expected all worked examples there")
    follow_ups = task.metadata.get("follow_ups")
    if follow_ups is not None and (not isinstance(follow_ups, str) or task.columns.get(follow_ups) != "strings"):
        raise refuse(f"metadata.follow_ups is {_shown.repr(follow_ups)}; expected one of its columns of strings")
    follow_up = task.metadata.get("follow_up")
    if follow_ups is not None and not (isinstance(follow_up, str) and "{{turn}}" in follow_up):
        raise refuse("metadata.follow_ups without a metadata.follow_up that holds {{turn}}")
    return task


def _settings(path: Path, outer: Path, depth: int) -> dict[str, Any]:
    """The settings of a YAML file, over those of the files that it includes."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads a function's name as text; lm-eval imports it."""

    Loader.add_constructor("!function", lambda loader, node: str(node.value))
    where = f"suite file {str(outer)!r}" + ("" if path == outer else f", which includes {str(path)!r}")
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{where}: not a regular file; expected an lm-eval task file")
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # a SafeLoader
    except FileNotFoundError:
        raise UserError(f"{where}: no such file; expected an lm-eval task file") from None
    except OSError as error:
        raise UserError(f"{where}: not readable ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: {type(found).__name__}; expected the settings of an lm-eval task")
    merged: dict[str, Any] = {}
    included = found.pop("include", None) or []
    for each in included if isinstance(included, list) else [included]:
        if depth == MOST_INCLUDES:
            raise UserError(f"{where}: more than {MOST_INCLUDES} files deep in includes")
        merged |= _settings(path.parent / str(each), outer, depth + 1)
    return merged | found


@dataclass(frozen=True)
class _Expected:
    """A setting that must be there: where it is, whether it fits, and what was expected."""

    value: Callable[[Mapping[str, Any]], Any]
    check: Callable[[Any], bool]
    words: str

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a task file's setting is as expected."""
        return self.check(self.value(config))


def _of_metadata(key: str) -> Callable[[Mapping[str, Any]], Any]:
    def value(config: Mapping[str, Any]) -> Any:
        metadata = config.get("metadata")
        return metadata.get(key) if isinstance(metadata, Mapping) else None

    return value


def _is_columns(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and kind in list(COLUMN_KINDS) for name, kind in value.items())
    )


def _is_metric(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("metric"), str)


def _is_hub_file(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("repo", "type", "path"))
    )


_EXPECTED: dict[str, _Expected] = {
    "output_type": _Expected(
        lambda c: c.get("output_type"), lambda v: v == "generate_until", "generate_until: a suite is text to decode"
    ),
    "doc_to_text": _Expected(lambda c: c.get("doc_to_text"), lambda v: isinstance(v, str), "the prompt's template"),
    "num_fewshot": _Expected(
        lambda c: c.get("num_fewshot"),
        lambda v: v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= 0),
        "a number of worked examples",
    ),
    "metric_list": _Expected(
        lambda c: c.get("metric_list"),
        lambda v: v is None or (isinstance(v, list) and all(_is_metric(each) for each in v)),
        "a list of metrics, each with its name under 'metric'",
    ),
    "test_split": _Expected(
        lambda c: c.get("test_split") or c.get("validation_split"),
        lambda v: isinstance(v, str),
        "the split that holds the problems",
    ),
    "metadata.columns": _Expected(
        _of_metadata("columns"),
        _is_columns,
        f"each column that the prompt and the score need, with its kind: {', '.join(COLUMN_KINDS)}",
    ),
    "metadata.note": _Expected(_of_metadata("note"), lambda v: v is None or isinstance(v, str), "a line of text"),
    "metadata.chat_until": _Expected(
        _of_metadata("chat_until"),
        lambda v: v is None or (isinstance(v, list) and all(isinstance(text, str) and text for text in v)),
        "a list of stop sequences",
    ),
    "metadata.hub_file": _Expected(_of_metadata("hub_file"), _is_hub_file, "a mapping with repo, type and path"),
}
