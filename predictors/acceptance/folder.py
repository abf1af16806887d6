"""The folder of fitted estimators: ``acceptance.json`` with the facts and the isotonic curves, and the learned model's
weights beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ecospec.errors import UserError
from ecospec.predictors.checkpoint import target_facts, weights_hash
from ecospec.predictors.contract import TargetView

KIND, SCHEMA = "ecospec acceptance", 1
FACTS, WEIGHTS, CARD, PLOT = "acceptance.json", "acceptance.safetensors", "CARD.md", "reliability.svg"
SHIPPED = "acceptance"
"""Under the folder of what ships with a target."""


@dataclass(frozen=True)
class FittedFolder:
    """What a folder of fitted estimators says of itself, checked against a target and its drafter."""

    folder: Path
    facts: dict[str, Any]

    @property
    def fitted_on(self) -> frozenset[str]:
        """Keys of the prompts that it was fitted to."""
        found = self.facts.get("fitted_on")
        return frozenset(map(str, found)) if isinstance(found, list) else frozenset()

    def section(self, kind: str, temperature: float) -> dict[str, Any]:
        """What was fitted for an estimator at a temperature.

        Raises:
            UserError: it was not; the text says what was.
        """
        fitted = self.facts.get(kind)
        if not isinstance(fitted, dict) or not fitted:
            raise UserError(
                f"{self.folder}: nothing fitted for acceptance estimator {kind!r}; expected a folder that "
                "'ecospec-bench train acceptance' made from a recording with the drafter's states"
            )
        found = fitted.get(temperature_key(temperature))
        if not isinstance(found, dict):
            raise UserError(
                f"{self.folder}: acceptance was fitted at temperature {', '.join(sorted(fitted))}, not at "
                f"{temperature:g}; expected one of these, or a recording at {temperature:g} to fit to"
            )
        return found


def temperature_key(temperature: float) -> str:
    """How a temperature is written down."""
    return f"{temperature:g}"


def prompt_key(tokens: Sequence[int]) -> str:
    """What tells a prompt from others, by its token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]


def drafter_facts(target: TargetView) -> dict[str, Any]:
    """What must agree between fitted estimators and the drafter whose trees they judge."""
    if target.drafter is not None:
        return {"weights_sha256": weights_hash(target.drafter.folder)}
    more = {} if target.stateless_facts is None else target.stateless_facts()
    return {"name": target.stateless, **more}


def open_folder(folder: Path, target: TargetView) -> FittedFolder:
    """Read what was fitted, and check that it was for this target and drafter; see `read_folder`."""
    return read_folder(folder, target_facts(target), drafter_facts(target))


def read_facts(folder: Path) -> dict[str, Any]:
    """What a folder says of what was fitted.

    Raises:
        UserError: it cannot be read, or is another thing's.
    """
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"acceptance {folder}: no {FACTS}; expected a folder that 'ecospec-bench train acceptance' wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable ({' '.join(str(error).split())})") from error
    if not isinstance(facts, dict) or facts.get("kind") != KIND or facts.get("schema") != SCHEMA:
        raise UserError(f"{path}: not fitted acceptance of this version; expected kind {KIND!r}, schema {SCHEMA}")
    return facts


def read_folder(folder: Path, target: Mapping[str, Any], drafter: Mapping[str, Any]) -> FittedFolder:
    """Read what was fitted, and check that it was for a target and drafter.

    Args:
        target: see `target_facts`. drafter: see `drafter_facts`.

    Raises:
        UserError: it cannot be read, or was fitted for another target or drafter.
    """
    facts = read_facts(folder)
    for what, expected in (("target", target), ("drafter", drafter)):
        found = facts.get(what)
        for name, value in expected.items():
            other = found.get(name) if isinstance(found, dict) else None
            if other != value:
                raise UserError(
                    f"acceptance {folder}: fitted for a {what} with {name} = {str(other)[:16]}, but this one has "
                    f"{str(value)[:16]}; expected one that was fitted for it ('ecospec-bench train acceptance'), or "
                    "--acceptance draft"
                )
    return FittedFolder(folder, facts)
