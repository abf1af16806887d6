"""What ``record`` is asked for, made ready: a recorder for each suite, with one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.outputs import check_folder
from ecospec.harness.plugins import load_plugins
from ecospec.harness.recording.folder import MANIFEST, check_output
from ecospec.harness.recording.recorder import Recorder
from ecospec.harness.several import named_suites, suites_asked
from ecospec.harness.writing import is_leftover, is_unused
from ecospec.suites import SUITES


def _check_new(output: Path, names: set[str]) -> None:
    """Check the folder for several recordings: a new one, or one that a kill has left without any of them begun.

    Raises:
        UserError: it is in use, or cannot be made.
    """
    check_folder(f"--output {output}", output)
    try:
        there = [path for path in output.iterdir() if not is_leftover(path)] if output.exists() else []
        used = any(path.name not in names or not path.is_dir() or not is_unused(path) for path in there)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from error
    if used:
        raise UserError(f"--output {output}: not an empty folder; expected a new one, or --resume")


def prepare_all(config: RunConfig, estimators: Sequence[str], *, states: bool) -> dict[Path, Recorder]:
    """Recorders by their folders: ``--output`` for one suite, a folder in it for each of several.

    Raises:
        UserError: an unknown suite, a folder that cannot be used, or see `Recorder`.
    """
    output = config.output
    assert output is not None
    plugins = load_plugins()
    names = named_suites(config, suites_asked(config.suite, SUITES), plugins)
    if len(names) == 1:
        (suite,) = names
        check_output(output, resume=config.resume)
        return {output: Recorder(replace(config, suite=suite), estimators, states=states, plugins=plugins)}
    if (output / MANIFEST).exists():
        raise UserError(f"--output {output}: a recording of one suite; expected another folder for {len(names)} suites")
    begun = {name for name in names.values() if config.resume and (output / name / MANIFEST).exists()}
    if config.resume and not begun:
        check_output(output, resume=True)  # says that there is nothing to go on with
    if not config.resume:
        _check_new(output, set(names.values()))
    for name in names.values():
        check_output(output / name, resume=name in begun)
    found: dict[Path, Recorder] = {}
    first: Recorder | None = None
    for suite, name in names.items():
        folder = output / name
        each = replace(config, suite=suite, output=folder, resume=name in begun)
        parts = first.bench.parts if first else None
        recorder = Recorder(each, estimators, states=states, parts=parts, plugins=plugins)
        first = first or recorder
        found[folder] = recorder
    return found
