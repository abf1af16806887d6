"""The learned estimator's weights on disk: one set a temperature in a safetensors file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ecospec.errors import UserError
from ecospec.predictors.acceptance.folder import WEIGHTS, FittedFolder, temperature_key
from ecospec.predictors.acceptance.learned import KIND, Weights


def write_weights(folder: Path, by_temperature: Mapping[str, Weights]) -> str:
    """Write all sets; returns the file's SHA-256."""
    tensors = {f"{key}.{name}": array for key, each in by_temperature.items() for name, array in asdict(each).items()}
    # Not by the library's own writing, whose errors are no OSError.
    (folder / WEIGHTS).write_bytes(save({name: np.ascontiguousarray(array) for name, array in tensors.items()}))
    return _sha256(folder / WEIGHTS)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_weights(fitted: FittedFolder, temperature: float, hidden_size: int) -> Weights:
    """The set of one temperature.

    Raises:
        UserError: there is none, it is damaged, or made for states of another size.
    """
    fitted.section(KIND, temperature)
    path = fitted.folder / WEIGHTS
    try:
        recorded = fitted.facts.get("weights_sha256")  # earlier versions did not note it
        if recorded is not None and recorded != _sha256(path):
            raise ValueError("its hash is not the recorded one")
        tensors = load_file(path)
        key = temperature_key(temperature)
        weights = Weights(**{each.name: tensors[f"{key}.{each.name}"].astype(np.float32) for each in fields(Weights)})
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not the weights of this folder ({' '.join(str(error).split())})") from error
    if len(weights.state) != hidden_size:
        raise UserError(f"{path}: made for drafter states of {len(weights.state)} values, expected {hidden_size}")
    return weights
