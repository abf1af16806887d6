"""Reading and writing predictor folders: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ecospec.errors import UserError
from ecospec.predictors.contract import TargetView

logger = logging.getLogger("ecospec")
HASHED_ROWS = 4096
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def target_geometry(target: TargetView) -> dict[str, int]:
    """What must agree between a predictor and the target it runs beside."""
    return {
        "moe_layers": target.moe_layers,
        "experts": target.experts,
        "top_k": target.top_k,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
    }


def target_facts(target: TargetView) -> dict[str, Any]:
    """What is written down of the target that something is made from: its geometry, and a hash of its embedding."""
    return {**target_geometry(target), "embedding_sha256": embedding_hash(target)}


def embedding_hash(target: TargetView) -> str | None:
    """SHA-256 of up to 4096 evenly spaced rows of the embedding, rounded to bfloat16 as checkpoints hold it.

    It tells targets of one geometry apart, in whatever dtype they are loaded. None where there is no embedding.
    """
    if target.embedding is None:
        return None
    step = max(1, -(-len(target.embedding) // HASHED_ROWS))
    rows: Tensor = target.embedding[::step].detach().to(torch.bfloat16).contiguous().cpu()
    return hashlib.sha256(rows.view(torch.int16).numpy().tobytes()).hexdigest()


def save_predictor(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a predictor folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=1) + "\n", encoding="utf-8")


def read_predictor(folder: Path, kind: str, target: TargetView) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A predictor folder's config and tensors, checked against the target.

    One that was trained beside a target of this geometry with another embedding is read, with a warning.

    Raises:
        UserError: a file is missing or unreadable, the kind is another, or the geometry differs.
    """
    config = read_predictor_config(folder, kind, target)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(f"predictor {folder}: not readable ({error})") from error
    made_with, found = config["target"].get("embedding_sha256"), embedding_hash(target)
    if made_with is not None and found is not None and made_with != found:
        logger.warning(
            "predictor %s: trained beside a target with another embedding; it may be right less often", folder
        )
    return config, tensors


def read_predictor_config(folder: Path, kind: str, target: TargetView) -> dict[str, Any]:
    """A predictor folder's config, checked against the target's geometry.

    Raises:
        UserError: a file is missing, the config unreadable, the kind is another, or the geometry differs.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"predictor {folder}: no {name}; expected a folder with {CONFIG} and {WEIGHTS}")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"predictor {folder}: not readable ({error})") from error
    found = config.get("kind") if isinstance(config, dict) else None
    if found != kind:
        raise UserError(f"predictor {folder}: it is of kind {found!r}, expected {kind!r}")
    trained = config.get("target")
    trained = trained if isinstance(trained, dict) else {}
    for name, expected in target_geometry(target).items():
        found = trained.get(name)
        if found != expected:
            raise UserError(f"predictor {folder}: trained for {name} = {found}, but the target has {expected}")
    return config


def check_tensors(folder: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare a predictor's tensors with its model's.

    Raises:
        UserError: one is missing, left over or of another shape; the text names it.
    """
    for name in sorted(found.keys() | expected.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (found, expected)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"predictor {folder}: tensor {name} has shape {'nothing' if shapes[0] is None else shapes[0]}, "
                f"expected {'no such tensor' if shapes[1] is None else shapes[1]}"
            )


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of a checkpoint folder's weight files.

    Raises:
        UserError: it has none, or one is not readable.
    """
    digest = hashlib.sha256()
    paths = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    if not paths:
        raise UserError(f"{folder}: no *.safetensors or *.bin file; expected a checkpoint folder")
    for path in paths:
        digest.update(path.name.encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: not readable ({error.strerror})") from error
    return digest.hexdigest()
