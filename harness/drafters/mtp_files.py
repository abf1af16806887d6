"""Reading one layer's tensors out of a target's own safetensors shards, without the rest of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ecospec.errors import UserError, one_line
from ecospec.harness.quantized import unpack_blocks

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALE = ".weight_scale_inv"
BLOCK = (128, 128)
"""Rows and columns of a block with one scale, where the config does not say."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn,)


class CheckpointFiles:
    """The weight files of a checkpoint's folder."""

    def __init__(self, what: str, folder: Path) -> None:
        """Find the index.

        Args:
            what: begins the messages, such as ``drafter 'mtp'``.

        Raises:
            UserError: there are no safetensors, or the index is not readable.
        """
        self.what, self.folder = what, folder
        self.places = self._read_places()

    def fail(self, reason: str) -> UserError:
        """An error about this checkpoint."""
        return UserError(f"{self.what}: {self.folder}: {reason}")

    def _path(self, file: str) -> Path | None:
        return self.folder / file if (self.folder / file).is_file() else None

    def _read_places(self) -> dict[str, str]:
        """The file that each tensor is in."""
        index = self._path(INDEX)
        if index is not None:
            try:
                places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                if not all(isinstance(place, str) and Path(place).name == place for place in places.values()):
                    raise ValueError("a place is no file name")
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self.fail(f"{INDEX} is not readable ({type(error).__name__}: {one_line(error)})") from error
            return dict(places)
        single = self._path(SINGLE)
        if single is None:
            raise self.fail(f"no {INDEX} and no {SINGLE}; expected the target's safetensors files")
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        except (OSError, SafetensorError) as error:
            raise self.fail(f"{SINGLE} is not readable ({one_line(error)})") from error

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, as stored.

        Raises:
            UserError: a file is missing or damaged, or lacks a tensor that the index puts there.
        """
        found: dict[str, Tensor] = {}
        for place in sorted({self.places[name] for name in names}):
            path = self._path(place)
            if path is None:
                raise self.fail(f"no {place}; {INDEX} names it")
            try:
                with safe_open(path, framework="pt") as file:
                    there = set(file.keys())
                    for name in names:
                        if self.places[name] != place:
                            continue
                        if name not in there:
                            raise self.fail(f"{place} has no tensor {name}; {INDEX} says it has")
                        found[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise self.fail(f"{place} is not readable ({one_line(error)})") from error
        return found


def block_size(config: Any) -> tuple[int, int]:
    """Rows and columns of an FP8 block, by a target's ``quantization_config``."""
    given = getattr(config, "quantization_config", None)
    size = given.get("weight_block_size") if isinstance(given, dict) else getattr(given, "weight_block_size", None)
    return (int(size[0]), int(size[1])) if size else BLOCK


def dequantised(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [o, i] of an FP8 weight [o, i] with one scale [⌈o/b₀⌉, ⌈i/b₁⌉] a block, by which it is multiplied.

    Raises:
        ValueError: there are not as many scales as blocks.
    """
    expected = tuple(math.ceil(size / step) for size, step in zip(weight.shape, block, strict=True))
    if tuple(scales.shape) != expected:
        raise ValueError(f"has shape {tuple(scales.shape)}, expected {expected}")
    return unpack_blocks(weight, scales, block)


def floats(
    files: CheckpointFiles, found: dict[str, Tensor], block: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors in floating point: FP8 weights are multiplied by their scales, which are used up, and given in ``dtype``.

    Raises:
        UserError: a tensor is of another type, an FP8 weight has no scales, or scales are without a weight.
    """
    plain: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in found.items():
        if name.endswith(SCALE):
            continue
        if tensor.dtype in FP8:
            scale = name.removesuffix(".weight") + SCALE
            if scale not in found:
                raise files.fail(f"tensor {name} is FP8, but there is no {scale}")
            used.add(scale)
            try:
                plain[name] = dequantised(tensor, found[scale], block).to(dtype)
            except ValueError as error:
                raise files.fail(f"tensor {scale} {error}") from error
        elif tensor.dtype in FLOATS:
            plain[name] = tensor
        else:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise files.fail(f"tensor {name} is {kind}, expected float32, bfloat16, float16 or float8_e4m3fn")
    left = sorted(name for name in found if name.endswith(SCALE) and name not in used)
    if left:
        raise files.fail(f"tensor {left[0]} belongs to no FP8 weight; expected no such tensor")
    return plain
