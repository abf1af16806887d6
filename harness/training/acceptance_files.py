"""Writing what was fitted: into a folder that the user names, or beside the saved cost models."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.acceptance_store import acceptance_folder, save_estimators
from ecospec.harness.costs.store import VARIABLE
from ecospec.harness.training.acceptance import FittedRecordings
from ecospec.harness.training.acceptance_card import card_text, reliability_svg
from ecospec.harness.writing import write_text
from ecospec.predictors.acceptance import isotonic, learned
from ecospec.predictors.acceptance.folder import CARD, FACTS, KIND, PLOT, SCHEMA
from ecospec.predictors.acceptance.weights import write_weights


def check_place(output: Path | None) -> None:
    """Check, before hours of work, that its result can be written; nothing is.

    Args:
        output: None for the folder beside the saved cost models.

    Raises:
        UserError: it holds something, is no folder, or no file can be made where it is to be.
    """
    place = acceptance_folder() if output is None else output
    what = f"acceptance estimators: {place}" if output is None else f"--output {output}"
    expected = f"a folder that can be written to, in ${VARIABLE}, or --output" if output is None else "another"
    try:
        if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"--output {output}: not an empty folder; expected a new one")
        nearest = next(each for each in (place, *place.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"{what}: cannot be written to ({error.strerror}); expected {expected}") from error


def write_into(output: Path, found: FittedRecordings) -> None:
    """Write one folder of all temperatures.

    Raises:
        UserError: it cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write(output, found)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written to ({error.strerror})") from error


def save(found: FittedRecordings) -> dict[str, Path]:
    """Save each temperature beside the cost models, for runs of this target and drafter; where, by temperature.

    Raises:
        UserError: it cannot be written.
    """
    return {
        key: save_estimators(found.facts, key, lambda folder, key=key: _write(folder, found.at(key)))  # type: ignore[misc]
        for key in found.fitted
    }


def _write(folder: Path, found: FittedRecordings) -> None:
    """All files; a folder without the last, ``acceptance.json``, is none of fitted estimators."""
    weights = {key: each.weights for key, each in found.fitted.items() if each.weights is not None}
    written: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        **found.facts,
        "fitted_on": sorted(frozenset[str]().union(*found.prompts.values())),
        isotonic.KIND: {key: isotonic.to_json(each.curves) for key, each in found.fitted.items()},
        learned.KIND: {key: {"rank": len(each.hidden_bias)} for key, each in weights.items()},
        "judged": {
            key: {
                "prompts": each.prompts,
                "held_out": each.held_out,
                **{name: asdict(judged) for name, judged in each.judged.items()},
            }
            for key, each in found.fitted.items()
        },
    }
    if weights:
        written["weights_sha256"] = write_weights(folder, weights)
    curves = {key: {name: judged.bins for name, judged in each.judged.items()} for key, each in found.fitted.items()}
    write_text(folder / PLOT, reliability_svg(curves))
    write_text(folder / CARD, card_text(found))
    write_text(folder / FACTS, json.dumps(written, allow_nan=False) + "\n")
