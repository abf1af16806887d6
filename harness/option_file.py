"""Options of a command from a YAML file with the same keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ecospec.errors import UserError, nearest
from ecospec.harness.yaml_file import read_yaml


def take_defaults(ctx: click.Context, said: str, path: Path, joined: tuple[str, ...] = ()) -> None:
    """Take the defaults of a command's options from a file; what the command line says wins.

    Args:
        said: what messages call the file.
        joined: options that take several values in one text, separated by commas; those that can be repeated take
            several as well.

    Raises:
        UserError: the file is not readable, or no YAML of options; an unknown key, one given twice, or no value.
    """
    options = {p.name: p for p in ctx.command.params if isinstance(p, click.Option) and p.name}
    known = set(options) - {"config", "version"}
    values: dict[str, Any] = {}
    for key, entry in _entries(said, path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UserError(f"{said}: unknown key {key!r}; {nearest(str(key), (k.replace('_', '-') for k in known))}")
        several = options[name].multiple or name in joined
        entries = entry if several and isinstance(entry, list) else [entry]
        if not entries:
            raise UserError(f"{said}: {key} is an empty list, expected at least one value")
        for each in entries:
            if not isinstance(each, str | int | float):
                kind = "empty" if each is None else f"a {type(each).__name__}"
                raise UserError(f"{said}: {key} is {kind}, expected one value")
        # As text, so that an option converts it, or refuses it, exactly as from the command line.
        try:
            texts = [str(each) for each in entries]
        except ValueError as error:  # an integer of too many digits
            raise UserError(f"{said}: {key}: {error}") from error
        values[name] = texts if options[name].multiple else ",".join(texts)
    ctx.default_map = values


def _entries(said: str, path: Path) -> dict[Any, Any]:
    """The file's keys and values, each key once."""
    found = read_yaml(said, path, lambda key: key.replace("-", "_"))
    if not isinstance(found, dict):
        raise UserError(f"{said}: expected 'option: value' lines, found a {type(found).__name__}")
    return found
