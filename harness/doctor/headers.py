"""Names, types and shapes of a checkpoint's tensors, read from the first bytes of its files."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from ecospec.errors import UserError, one_line

SAFETENSORS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
LONGEST_HEADER_BYTES: Final = 100_000_000
"""What the format allows."""
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Header:
    """One tensor, without its contents."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: Path


def has_weights(folder: Path) -> bool:
    """Whether there is a file that names tensors."""
    return any((folder / name).is_file() for file in (SAFETENSORS, PICKLED) for name in (file, f"{file}.index.json"))


def read_headers(what: str, folder: Path) -> tuple[dict[str, Header], list[str]]:
    """The tensors of a checkpoint by name, and what is wrong with its files, a line each.

    Args:
        what: begins the lines, such as ``target NAME``.
    """
    for file in (SAFETENSORS, PICKLED):
        index = folder / f"{file}.index.json"
        if (folder / file).is_file():
            return _read_files(what, folder, {file: None})
        if index.is_file():
            try:
                shards = _shards(index)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return {}, [f"{what}: {index.name} has no weight_map from tensor names to files"]
            return _read_files(what, folder, shards)
    return {}, [f"{what}: no weights; expected {SAFETENSORS} or {PICKLED}, whole or in shards"]


def _shards(index: Path) -> dict[str, set[str] | None]:
    shards: dict[str, set[str] | None] = {}
    for tensor, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        named = shards.setdefault(str(shard), set())
        assert named is not None
        named.add(tensor)
    return shards


def _read_files(what: str, folder: Path, files: dict[str, set[str] | None]) -> tuple[dict[str, Header], list[str]]:
    tensors: dict[str, Header] = {}
    wrong: list[str] = []
    absent = [name for name in sorted(files) if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        more = f", and {len(absent) - 1} more of {len(files)} files" if len(absent) > 1 else ""
        wrong.append(f"{what}: no {absent[0]}{more}; its index names it")
    for name in sorted(files.keys() - set(absent)):
        try:
            found = _read_file(folder / name)
        except UserError as error:
            wrong.append(f"{what}: {name} {error}")
            continue
        tensors |= found
        lacking = sorted((files[name] or set()) - found.keys())
        if lacking:
            wrong.append(f"{what}: {name} has no tensor {lacking[0]}; its index says it has")
    return tensors, wrong


def _read_file(path: Path) -> dict[str, Header]:
    return _read_pickled(path) if path.suffix == ".bin" else _read_safetensors(path)


def _read_safetensors(path: Path) -> dict[str, Header]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER_BYTES, size - 8):
                raise UserError("is truncated, or no safetensors file")
            raw = json.loads(file.read(length))
        tensors = {name: _header(path, entry) for name, entry in raw.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"has no readable header ({one_line(error)})") from error
    expected = 8 + length + sum(header.bytes for header in tensors.values())
    if size != expected:
        raise UserError(
            f"is {'truncated' if size < expected else 'too long'}: it has {size:,} bytes, its header describes "
            f"{expected:,}"
        )
    return tensors


def _header(path: Path, entry: dict[str, Any]) -> Header:
    begin, end = entry["data_offsets"]
    return Header(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), int(end) - int(begin), path)


def _read_pickled(path: Path) -> dict[str, Header]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: Header(
            names.get(tensor.dtype, str(tensor.dtype)),
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
            path,
        )
        for name, tensor in _mapped(path).items()
    }


def _mapped(path: Path) -> dict[str, Tensor]:
    """A pickle's tensors, whose contents stay on disk until they are looked at."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        raise UserError(f"is not readable without reading it whole ({one_line(error)})") from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError("holds something else than tensors by name")
    return found


def stand_in(header: Header) -> Tensor:
    """A tensor of this type and shape without contents; one of an unknown type has bytes."""
    return torch.empty(header.shape, dtype=DTYPES.get(header.dtype, torch.uint8), device="meta")


def contents(name: str, header: Header) -> Tensor:
    """The tensor itself."""
    if header.file.suffix == ".bin":
        return _mapped(header.file)[name].clone()
    with safe_open(header.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
