"""The run folder: ``manifest.json`` first, ``prompts.jsonl`` as prompts finish, reports at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from ecospec.errors import UserError, one_line
from ecospec.harness.activations import ACTIVATIONS
from ecospec.harness.config import RunConfig
from ecospec.harness.manifest import write_manifest
from ecospec.harness.outputs import check_folder
from ecospec.harness.records import PromptRecord, records_text
from ecospec.harness.schemas.checking import first_misfit
from ecospec.harness.writing import alone_in, is_leftover, is_unused, write_json, write_text

MANIFEST, RECORDS = "manifest.json", "prompts.jsonl"
SUITES_FILE = "suites.json"
"""In the folder of a run of several suites: their names, in order."""
OPTIONS_FILE = "options.json"
"""In the same folder: the options of the command. A single run has them in its manifest."""

# What a resumed run must share with the run it goes on from.
RESUME_KEYS = [
    "suite",
    "suite_file",
    "suite_sha256",
    "baseline",
    "policy",
    "predictor",
    "acceptance",
    "acceptance_sha256",
    "cost_model_sha256",
    "methods",
    "target",
    "drafter",
    "widened",
    "data_sha256",
    "chat_template",
    "chat_template_sha256",
    "chat_switches",
    "system_prompt",
    "prompts_sha256",
    "max_new_tokens",
    "budget",
    "draft_steps",
    "draft_topk",
    "batch_size",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "dtype",
    "device",
    "device_map",
    "max_memory",
    "processes",
    "parallel",
    "threads",
    "check",
    "run_code",
    "checkpoint_sha256",
    "drafter_sha256",
    "predictor_sha256",
]


@contextmanager
def open_folder(config: RunConfig, facts: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the run folder and write the manifest, or check that a resumed run is the same one.

    Until the block ends, no other process can have the folder.

    Raises:
        UserError: the folder holds another run, or nothing to resume; another process is running in it.
    """
    if config.resume:
        check_run_folder(config)  # before anything is made in what may be no run folder
        assert config.output is not None
        folder = config.output
    else:
        folder = _make_folder(config, facts["suite"])
    with alone_in(folder):
        yield folder, _begin(config, folder, facts)


def check_run_folder(config: RunConfig) -> None:
    """Check the folder of a run before its parts are loaded; nothing is written.

    Raises:
        UserError: see `open_folder`; also where it cannot be made.
    """
    if config.resume and config.output is None:
        raise UserError("--resume without --output: expected --resume RUN, the folder of the run to go on with")
    if config.resume and config.output is not None:
        read_manifest(config.output / MANIFEST)
    elif config.output is None:
        check_folder(str(new_folder(config.suite).parent), new_folder(config.suite))
    else:
        try:
            refuse_used(config.output)
        except OSError as error:
            raise UserError(f"--output {config.output}: cannot be made ({error.strerror})") from error
        check_folder(f"--output {config.output}", config.output)


def _make_folder(config: RunConfig, suite: str) -> Path:
    """A folder that is there and holds nothing."""
    if config.output is None:
        while True:
            folder = new_folder(suite)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # by another process, since
                continue
            except OSError as error:
                raise UserError(f"{folder}: cannot be made ({error.strerror})") from error
            return folder
    try:
        refuse_used(config.output)
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {config.output}: cannot be made ({error.strerror})") from error
    return config.output


def refuse_used(folder: Path) -> None:
    """Check that a folder is not there yet, or holds nothing.

    Raises:
        UserError: it holds something, or is no folder.
        OSError: it cannot be read.
    """
    if folder.exists() and not (folder.is_dir() and is_unused(folder)):
        raise UserError(f"--output {folder}: not an empty folder; expected a new one, or --resume {folder}")


def _begin(config: RunConfig, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the run, in a folder that nobody else has."""
    if config.resume:
        manifest = read_manifest(folder / MANIFEST)
        difference = first_difference(manifest, facts, RESUME_KEYS)
        if difference is not None:
            raise UserError(
                f"--resume: {folder} was run with {difference}; expected the same run with all its options, "
                "--limit included"
            )
        # A measurement of this machine, not a choice: where the file has none, today's stands in.
        return {"copy_bytes_per_second": facts["copy_bytes_per_second"], **manifest}
    refuse_used(folder)  # what another process may have done before this one had the folder
    return write_manifest(folder, facts)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """In words, the first of ``keys`` that two runs do not share; None where they share all."""
    for key in keys:
        if before.get(key) != now.get(key):
            # A hash says nothing to a reader where the number of prompts is why.
            shown = "limit" if key == "prompts_sha256" and before.get("limit") != now.get("limit") else key
            return f"{shown} = {before.get(shown)!r}, now it is {now.get(shown)!r}"
    return None


def check_parent(folder: Path, names: Sequence[str], *, resume: bool, named: bool) -> None:
    """Check the folder for the run folders of several suites; nothing is written.

    Raises:
        UserError: a new one is not empty; one to go on with holds a run of other suites, or none.
    """
    if not resume:
        try:
            refuse_used(folder)
        except OSError as error:
            raise UserError(f"--output {folder}: cannot be made ({error.strerror})") from error
        return
    if not named:
        raise UserError("--resume without --output: expected --resume RUN, the folder of the run to go on with")
    try:
        found = json.loads((folder / SUITES_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--resume: {folder} holds no run of several suites; give its --output folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {folder / SUITES_FILE} is damaged ({error}); start a new run") from error
    if found != list(names):
        before = ", ".join(map(str, found)) if isinstance(found, list) else str(found)
        raise UserError(
            f"--resume: {folder} holds the runs {before}, now they are {', '.join(names)}; expected the same command"
        )
    for name in names:
        inner = folder / name
        if inner.exists() and not (inner.is_dir() and (is_unused(inner) or (inner / MANIFEST).is_file())):
            raise UserError(f"--resume: {inner} is no run folder; start a new run")


@contextmanager
def open_parent(folder: Path, names: Sequence[str], options: Mapping[str, Any]) -> Iterator[None]:
    """Make the folder for the run folders of several suites, and note which they are and what was asked for.

    Until the block ends, no other process can have the folder.

    Raises:
        UserError: it cannot be made; another process is running in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error.strerror})") from error
    with alone_in(folder):
        write_json(folder / OPTIONS_FILE, dict(options))
        write_json(folder / SUITES_FILE, list(names))
        yield


def named_runs(folder: Path) -> list[str]:
    """The runs of a folder of several in the order in which they were asked for; none where it does not say.

    Raises:
        UserError: its list is damaged.
    """
    path = folder / SUITES_FILE
    if not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())})") from error
    return [str(name) for name in names] if isinstance(names, list) else []


def discard_parent(folder: Path) -> None:
    """Remove the folder of several runs in which no run folder is left; others stay as they are."""
    discard_but_for(folder, (SUITES_FILE, OPTIONS_FILE))


def discard_but_for(folder: Path, files: Sequence[str]) -> None:
    """Remove a folder that holds no more than these files."""
    paths = list(folder.iterdir())
    if all(path.name in files or is_leftover(path) for path in paths):
        for path in paths:
            path.unlink()
        folder.rmdir()


def discard_empty(folder: Path) -> None:
    """Remove the folder of a run that was refused before any prompt was finished; others stay as they are."""
    records = folder / RECORDS
    if not (records.exists() and records.stat().st_size):
        discard_but_for(folder, (MANIFEST, RECORDS, ACTIVATIONS))


def read_manifest(path: Path, option: str = "--resume", *, whole: bool = False) -> dict[str, Any]:
    """The manifest of a run to be resumed.

    Args:
        option: what a message says that it is read for.
        whole: whether it has to have every key that a report relies on; else only what is there has to fit.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        if not path.is_file():
            inside = path.parent / SUITES_FILE
            if inside.is_file():
                raise UserError(f"{option}: {path.parent} holds several runs; expected the same command as for these")
            raise UserError(f"{option}: {path.parent} holds no run (no manifest.json); give its --output folder")
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{option}: {path} is damaged ({one_line(error)}); start a new run") from error
    if isinstance(manifest, dict) and isinstance(manifest.get("kind"), str):
        raise UserError(f"{option}: {path.parent} holds an {manifest['kind']} and no run; expected a run's folder")
    wrong = first_misfit("manifest", manifest, whole=whole)
    if wrong is not None:
        raise UserError(f"{option}: {path} is damaged or of another version ({wrong}); start a new run")
    found: dict[str, Any] = manifest
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of a manifest")


def new_folder(suite: str) -> Path:
    """``runs/<suite>-<time>``, not yet existing."""
    stem = f"{suite}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{n}" if n else stem) for n in range(1000))
    return next(path for path in candidates if not path.exists())


def finished_prompts(records: Sequence[PromptRecord], labels: Sequence[str]) -> set[str]:
    """Prompts that have a record of every method."""
    seen: dict[str, set[str]] = {}
    for record in records:
        seen.setdefault(record.prompt_id, set()).add(record.method)
    return {prompt for prompt, methods in seen.items() if set(labels) <= methods}


def rewrite_records(path: Path, records: Sequence[PromptRecord]) -> None:
    """Leave only whole prompts in the file, so that a resumed run appends to a clean one."""
    write_text(path, records_text(records))
