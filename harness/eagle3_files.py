"""Reading an EAGLE-3 head's folder: ``config.json``, and its tensors in any of the published files and namings."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ecospec.errors import UserError

CONFIG, SAFETENSORS, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
_UNREADABLE = (OSError, ValueError, TypeError, RuntimeError, EOFError, RecursionError, LookupError, AttributeError)


def read_config(folder: Path) -> dict[str, Any]:
    """The head's ``config.json``.

    Raises:
        UserError: it is missing or not readable.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"drafter {folder}: no {CONFIG}; expected an EAGLE-3 head's folder")
    raw = _read_json(folder, path)
    if not isinstance(raw, dict):
        raise UserError(
            f"drafter {folder}: config.json is not that of a supported EAGLE-3 head (it is a {type(raw).__name__}, "
            "expected an object)"
        )
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The head's tensors under the names of `Eagle3Head`, from the first there is of one file, shards, a pickle.

    Raises:
        UserError: a file is missing, not readable or at odds with the index, or two tensors are one by their names.
    """
    if (folder / SAFETENSORS).is_file():
        found = _read_safetensors(folder, folder / SAFETENSORS)
    elif (folder / INDEX).is_file():
        found = _read_shards(folder)
    elif (folder / PICKLED).is_file():
        found = _read_pickled(folder)
    else:
        raise UserError(f"drafter {folder}: no {SAFETENSORS}, {INDEX} or {PICKLED}; expected an EAGLE-3 head's folder")
    return canonically(folder, found)


def canonically(folder: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of `Eagle3Head`.

    Raises:
        UserError: two are one by their names.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if canonical(name) in tensors:
            raise UserError(f"drafter {folder}: tensor {name} is there under another name as well, {canonical(name)}")
        tensors[canonical(name)] = tensor
    return tensors


def canonical(name: str) -> str:
    """A tensor's name in `Eagle3Head`: vLLM, speculators and ModelOpt name the layer, vLLM the map, otherwise."""
    if name == "draft_id_to_target_id":
        return "d2t"
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _read_json(folder: Path, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise _not_readable(folder, path, error) from error


def _read_safetensors(folder: Path, path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (*_UNREADABLE, SafetensorError) as error:
        raise _not_readable(folder, path, error) from error


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = _read_json(folder, folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(f"drafter {folder}: {INDEX} has no weight_map from tensor names to files")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(f"drafter {folder}: no {shard}; {INDEX} names it")
        found = _read_safetensors(folder, folder / shard)
        _compare_shard(folder, shard, found, places)
        tensors |= found
    return tensors


def _compare_shard(folder: Path, shard: str, found: Mapping[str, Tensor], places: Mapping[str, str]) -> None:
    named = {name for name, place in places.items() if place == shard}
    for name in sorted(named - found.keys()):
        raise UserError(f"drafter {folder}: {shard} has no tensor {name}; {INDEX} says it has")
    for name in sorted(found.keys() - named):
        raise UserError(f"drafter {folder}: {shard} has tensor {name}; {INDEX} does not say so")


def _read_pickled(folder: Path) -> dict[str, Tensor]:
    path = folder / PICKLED
    try:
        # Nothing but tensors and plain containers is ever unpickled: a pickle can hold any code.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (*_UNREADABLE, pickle.UnpicklingError) as error:
        raise _not_readable(folder, path, error) from error
    if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()):
        raise UserError(f"drafter {folder}: {PICKLED} holds something else than tensors by name")
    return {name: tensor.detach() for name, tensor in found.items()}


def _not_readable(folder: Path, path: Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > 200:
        reason = reason[:200] + " ..."
    return UserError(f"drafter {folder}: {path.name} is not readable ({reason})")
