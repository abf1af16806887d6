"""Checkpoints of transformers models: what is refused about one, whoever loads it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ecospec.errors import UserError

# What transformers raises on files that are missing, corrupted, or describe no model.
UNLOADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
    pickle.UnpicklingError,
)


SCALES = ("_scale_inv", "_scale", "_scales", "_blocks")
"""How the names of what belongs to quantised weights end."""


def check_folder(what: str, name: str) -> None:
    """Refuse a folder that is no checkpoint, and what looks like a folder and is none.

    Args:
        what: begins the message, such as ``target``.

    Raises:
        UserError: there is no config.json, or a path that does not exist.
    """
    folder = Path(name)
    if folder.is_file():
        raise UserError(f"{what} {name}: a file; expected the checkpoint's folder, {folder.parent}")
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"{what} {name}: no config.json; expected a transformers checkpoint folder")
    if not folder.exists() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise UserError(f"{what} {name}: no such folder; expected a transformers checkpoint folder or a hub name")


def check_complete(what: str, name: str, report: Mapping[str, Any]) -> None:
    """Refuse what the library fills with random numbers, tensors that are missing or of another shape, and scales
    that it leaves: the weights to which they belong would be other numbers.

    Args:
        report: the library's ``output_loading_info``.

    Raises:
        UserError: naming the first such tensor.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"{what} {name}: the checkpoint lacks {missing[0]}, and {len(missing) - 1} more tensors; "
            "expected all of the model's"
        )
    scales = sorted(key for key in report.get("unexpected_keys", ()) if key.endswith(SCALES))
    if scales:
        raise UserError(
            f"{what} {name}: {scales[0]}, and {len(scales) - 1} more tensors, are scales of quantised weights which "
            "nothing uses; expected the quantization_config in config.json that goes with them"
        )
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"{what} {name}: tensor {tensor} has shape {tuple(found)}, expected {tuple(expected)}")
