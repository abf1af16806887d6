"""Where measured cost models are kept: one file for each device, dtype, model and set of versions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from ecospec.errors import UserError
from ecospec.harness.costs.saved import CostKey, Drafting, SavedCostModel, cost_model_text, read_cost_model
from ecospec.harness.writing import LOCK, write_text
from ecospec.harness.writing_folders import PATIENCE_SECONDS

VARIABLE = "ECOSPEC_COST_MODELS"


def store_folder() -> Path:
    """``$ECOSPEC_COST_MODELS``, or ``ecospec/cost-models`` in the user's cache; it may not exist."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("ecospec", appauthor=False)) / "cost-models"


def path_of(key: CostKey) -> Path:
    """Where the model of a key lies, or would."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(key), sort_keys=True).encode()).hexdigest()
    device = re.sub(r"[^a-z0-9]+", "-", key.device.lower()).strip("-")[:40]
    return store_folder() / f"{device or key.kind}-{digest[:24]}.json"


def find_cost_model(key: CostKey) -> SavedCostModel | None:
    """The saved model of exactly this key; None where there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = path_of(key)
    return load_cost_model(path, key, "saved cost model (delete it to measure anew)") if path.exists() else None


def load_cost_model(path: Path, key: CostKey, what: str = "--cost-model") -> SavedCostModel:
    """A model from a file.

    Args:
        key: of the run that it is wanted for. A projection is of no device, and fits any.

    Raises:
        UserError: it cannot be read, or was measured on something else; the text says what differs.
    """
    saved = read_cost_model(path, what)
    difference = None if saved.projection is not None else saved.key.difference(key)
    if difference is not None:
        raise UserError(f"{what} {path}: it was measured with {difference}; expected one of this device and target")
    return saved


def add_drafting(saved: SavedCostModel, drafting: Drafting) -> SavedCostModel:
    """Add a drafting to a saved model, beside what other processes have added to it meanwhile; returns what is saved.

    Of one drafting that was measured twice, the predictors and estimators that were saved first stay.

    Raises:
        UserError: it cannot be written, or what is there is damaged.
    """
    path = path_of(saved.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / LOCK, timeout=PATIENCE_SECONDS):
            there = find_cost_model(saved.key)
            if there is not None and there.measured == saved.measured:
                saved = there
            own = next((each for each in saved.draftings if each.is_for(drafting.identity)), None)
            if own is not None:
                drafting = dataclasses.replace(
                    own,
                    predicting={**drafting.predicting, **own.predicting},
                    estimating={**drafting.estimating, **own.estimating},
                )
            saved = saved.with_drafting(drafting)
            save_cost_model(saved)
    except Timeout:
        raise UserError(f"{path.parent}: another process is writing there; expected one at a time") from None
    except (OSError, NotImplementedError) as error:
        raise UserError(f"cost model {path}: cannot be written ({error})") from error
    return saved


def save_cost_model(saved: SavedCostModel, path: Path | None = None) -> Path:
    """Write a model whole or not at all; returns where.

    Args:
        path: None for its place in the store.

    Raises:
        UserError: it cannot be written.
    """
    path = path_of(saved.key) if path is None else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cost model {path}: cannot be written ({error.strerror}); expected a folder that can, in ${VARIABLE}"
        ) from error
    write_text(path, cost_model_text(saved))
    return path
