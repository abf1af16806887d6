"""The options of a run as it keeps them, and how ``--resume RUN`` takes them up again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.run_folder import MANIFEST, OPTIONS_FILE, SUITES_FILE, read_manifest

NO_FOLDER = ""
"""What ``--resume`` has without a value: the folder is then that of ``--output``."""
NOT_KEPT = ("output", "resume")
GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT)


def options_of(config: RunConfig, runs: Mapping[str, RunConfig] | None = None) -> dict[str, Any]:
    """What a command was asked for, by the names of its options.

    Args:
        runs: those of a command that makes several.
    """
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
        if name not in NOT_KEPT
    }
    if runs is not None:
        options["batch_size"] = list(dict.fromkeys(run.batch_size for run in runs.values()))
    return options


def read_options(folder: Path) -> dict[str, Any]:
    """The options that a run, or a run of several suites or batch sizes, was begun with.

    Raises:
        UserError: the folder holds no run, a damaged one, or one of a version that did not keep them.
    """
    several = (folder / SUITES_FILE).is_file()
    if several:
        try:
            options = json.loads((folder / OPTIONS_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            options = None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--resume: {folder / OPTIONS_FILE} is damaged ({error}); start a new run") from error
    else:
        options = read_manifest(folder / MANIFEST).get("options")
    if options is None:
        raise UserError(
            f"--resume: {folder} does not hold its options, as runs of earlier versions; expected the whole command "
            f"again, with --output {folder} --resume"
        )
    if not isinstance(options, dict) or not set(options) <= set(asdict(RunConfig("", ()))):
        name = OPTIONS_FILE if several else MANIFEST
        raise UserError(f"--resume: {folder / name} does not hold options of this version; start a new run")
    return options


def take_options(ctx: click.Context, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command, taken from the run that it goes on with.

    Args:
        options: of the command line; those that are given there must be the run's.

    Raises:
        UserError: one that is given is another, or the run's options are damaged.
    """
    kept = read_options(folder)
    taken = dict(options)
    for parameter in ctx.command.params:
        name = parameter.name
        if name is None or name not in kept:
            continue
        before = _processed(ctx, parameter, kept[name], folder)
        given = ctx.get_parameter_source(name) in GIVEN
        if given and _plain(options[name]) != _plain(before):
            raise UserError(
                f"--resume: {folder} was run with {name} = {_plain(before)!r}, now it is {_plain(options[name])!r}; "
                "expected no other options than the run's own"
            )
        taken[name] = before
    return {**taken, "output": folder, "resume": True}


def _processed(ctx: click.Context, parameter: click.Parameter, value: Any, folder: Path) -> Any:
    """A kept value as the command line would have read it."""
    if value is None:
        return None
    several = isinstance(value, list)
    if several and not parameter.multiple:
        value = ",".join(map(str, value))
    elif not isinstance(value, bool):
        value = [str(each) for each in value] if several else str(value)
    try:
        return parameter.process_value(ctx, value)
    except (click.ClickException, TypeError) as error:
        raise UserError(f"--resume: {folder} holds a damaged option ({parameter.name}: {error})") from error


def _plain(value: Any) -> Any:
    """A value by which options can be compared, and which can be shown."""
    if isinstance(value, tuple | list):
        entries = [part.strip() for each in value for part in str(each).split(",") if part.strip()]
        return ",".join(entries)
    return str(value) if isinstance(value, Path) else value
