"""Fitted acceptance estimators beside the saved cost models: one folder for each target, drafter and temperature."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.costs.store import VARIABLE, store_folder
from ecospec.harness.manifest import checkpoint_hash
from ecospec.harness.writing_folders import found_folder, write_folder
from ecospec.predictors.acceptance.contract import SavedFolder
from ecospec.predictors.acceptance.folder import temperature_key

FOLDER = "acceptance"


def acceptance_folder() -> Path:
    """``acceptance`` in the folder of the saved cost models; it may not exist."""
    return store_folder() / FOLDER


def path_of(facts: Mapping[str, Any], temperature: str) -> Path:
    """Where what was fitted lies, or would.

    Args:
        facts: ``target`` and ``drafter`` as a folder of fitted estimators has them.
        temperature: see `temperature_key`.
    """
    return acceptance_folder() / f"{_digest(facts)}-T{temperature}"


def _digest(facts: Mapping[str, Any]) -> str:
    key = {name: facts[name] for name in ("target", "drafter")}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def save_estimators(facts: Mapping[str, Any], temperature: str, fill: Callable[[Path], None]) -> Path:
    """Save what was fitted at one temperature, whole or not at all, in place of what was there; returns where.

    Args:
        fill: writes the files into the folder that it is given.

    Raises:
        UserError: it cannot be written.
    """
    path = path_of(facts, temperature)
    try:
        write_folder(path, fill)
    except UserError as error:
        raise UserError(f"acceptance estimators: {error}; expected a folder that can be, in ${VARIABLE}") from error
    return path


def find_estimators(facts: Mapping[str, Any], temperature: float) -> SavedFolder | None:
    """What is saved for exactly this target and drafter at this temperature; None where nothing is.

    That it is whole and fits is for whoever loads it to check.

    Raises:
        UserError: the store cannot be read.
    """
    try:
        path = path_of(facts, temperature_key(temperature))
        folder = found_folder(path)
        if folder is None and os.path.lexists(path):
            raise UserError(f"{path}: no folder, as saved acceptance estimators are; delete it and fit them anew")
        return None if folder is None else SavedFolder(folder, checkpoint_hash(folder))
    except OSError as error:
        raise UserError(f"acceptance estimators in {acceptance_folder()}: cannot be read ({error.strerror})") from error


def saved_temperatures(facts: Mapping[str, Any]) -> list[str]:
    """The temperatures for which there is something of this target and drafter, from low to high.

    Raises:
        UserError: the store cannot be read.
    """
    start = f"{_digest(facts)}-T"
    try:
        there = acceptance_folder().iterdir() if acceptance_folder().is_dir() else ()
        names = [each.name for each in there if each.is_dir()]
    except OSError as error:
        raise UserError(f"acceptance estimators in {acceptance_folder()}: cannot be read ({error.strerror})") from error
    return sorted((name.removeprefix(start) for name in names if name.startswith(start)), key=_number)


def _number(text: str) -> tuple[float, str]:
    """Sorts what is no number, a copy of the user's say, behind all that are."""
    try:
        return float(text), text
    except ValueError:
        return float("inf"), text
