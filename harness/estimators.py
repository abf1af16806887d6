"""Which fitted acceptance estimator a run gets where its user names none."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.acceptance_store import find_estimators, saved_temperatures
from ecospec.harness.distributed import from_rank_0
from ecospec.predictors.acceptance.builtin import Isotonic, Learned
from ecospec.predictors.acceptance.contract import AcceptanceEstimator, SavedFolder
from ecospec.predictors.acceptance.folder import SHIPPED, drafter_facts, read_facts, temperature_key
from ecospec.predictors.checkpoint import target_facts
from ecospec.predictors.contract import TargetView


def saved_for(estimator: AcceptanceEstimator, target: TargetView, temperature: float) -> SavedFolder | None:
    """What 'train acceptance' has saved for a target and drafter.

    None where the estimator reads no such folder, its user named one, one ships with the target and this drafter (the
    embedded ones), or nothing is saved: `bind` then says what is missing.

    Raises:
        UserError: something is saved, but for other temperatures.
    """
    if not isinstance(estimator, Isotonic | Learned) or estimator.path is not None:
        return None
    if isinstance(estimator, Learned) and target.drafter is None:
        return None
    drafter = drafter_facts(target)
    if target.bundle is not None and shipped_with(target.bundle, drafter) is not None:
        return None
    return saved_of(estimator.name, target_facts(target), drafter, temperature)


def shipped_with(bundle: Path, drafter: Mapping[str, Any]) -> Path | None:
    """The folder of the estimators that ship with a target, if they were fitted for this drafter.

    Args:
        bundle: folder of what ships with the target. drafter: see `drafter_facts`.

    Raises:
        UserError: the folder is damaged.
    """
    folder = bundle / SHIPPED
    return folder if folder.is_dir() and read_facts(folder).get("drafter") == drafter else None


def saved_of(
    name: str, target: Mapping[str, Any], drafter: Mapping[str, Any], temperature: float
) -> SavedFolder | None:
    """What is saved for a target and drafter, by what is written down of them; None where nothing is.

    Raises:
        UserError: something is saved, but for other temperatures.
    """
    facts = {"target": target, "drafter": drafter}
    saved = from_rank_0(lambda: find_estimators(facts, temperature))
    others = [] if saved is not None else saved_temperatures(facts)
    if others:
        raise UserError(
            f"acceptance estimator {name!r}: for this target and drafter there is one saved at temperature "
            f"{', '.join(others)}, not at {temperature_key(temperature)}; expected one of these, or 'ecospec-bench "
            "train acceptance' with a recording at this one, or --acceptance draft"
        )
    return saved


def with_folder(estimator: AcceptanceEstimator, saved: SavedFolder | None) -> AcceptanceEstimator:
    """The estimator, to be loaded from what was found."""
    if saved is None or not isinstance(estimator, Isotonic | Learned):
        return estimator
    return dataclasses.replace(estimator, path=saved.folder)


def say_found(estimator: AcceptanceEstimator, saved: SavedFolder) -> None:
    """A line on the terminal: what the user did not name."""
    print(
        f"ecospec-bench: acceptance estimator {estimator.name!r}: the one saved for this target and drafter, "
        f"{saved.folder} (sha256 {saved.sha256[:12]})",
        file=sys.stderr,
        flush=True,
    )
