"""What can be said of an EAGLE-3 head from its config and its tensors' headers, by the code that loads one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.doctor.findings import Diagnosis
from ecospec.harness.doctor.headers import contents, has_weights, read_headers, stand_in
from ecospec.harness.eagle3 import FLAGS, Eagle3Config, Eagle3Head
from ecospec.harness.eagle3_files import canonical, canonically, read_config
from ecospec.harness.eagle3_loading import load_eagle3, read_layers
from ecospec.harness.hub import Checkpoint
from ecospec.harness.target import Geometry

PART = "drafter"
MAPS = ("d2t", "t2d")
"""Tensors that are looked into: a few hundred kilobytes."""


@dataclass(frozen=True)
class DrafterPart:
    """A head without weights.

    Attributes:
        hidden_size: H.
        elements: parameters that a run holds.
        kv_elements_per_token: of its one layer.
    """

    hidden_size: int
    folder: Path
    elements: int
    kv_elements_per_token: int


def look_at_drafter(said: Diagnosis, name: str, found: Checkpoint, target: Geometry) -> DrafterPart | None:
    """Describe a head and check it against a target; None where its config describes none."""
    folder = found.folder
    said.fact(PART, "checkpoint", name)
    if found.commit is not None:
        said.fact(PART, "commit", found.commit)
    later = found.commit is not None and not has_weights(folder)
    head: Eagle3Head | None = None
    try:
        head = load_eagle3(
            folder,
            target_vocab=target.vocab_size,
            target_hidden=target.hidden_size,
            target_layers=target.layers,
            read=_nothing_yet if later else _read_stand_ins,
            device="meta",
        )
        config = head.config
    except _NothingYetError:
        said.note(f"drafter {name}: its weights are not here yet, so its tensors are not checked; a run downloads them")
        config = None
    except UserError as error:
        said.problem(str(error))
        config = None
    try:
        stated = Eagle3Config.from_dict(read_config(folder))
        with torch.device("meta"):
            head = head or Eagle3Head(stated)
    except (UserError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError):
        return None  # said above
    llama = stated.llama
    said.fact(PART, "layout", "EAGLE-3", f"EAGLE-3{_flags(stated)}")
    said.fact(PART, "hidden size", llama.hidden_size)
    said.fact(PART, "vocabulary", stated.draft_vocab_size, f"{stated.draft_vocab_size:,} of {llama.vocab_size:,}")
    read = config.feature_layers if config is not None else _layers(folder, stated, target)
    if read is not None:
        said.fact(
            PART, "feature layers", list(read), f"outputs of {_list(read)} ({_convention(stated, target.layers)})"
        )
    if stated.max_positions is not None:
        said.fact(PART, "context", stated.max_positions, f"{stated.max_positions:,} tokens")
        if stated.max_positions < target.context:
            said.note(
                f"drafter {name}: its max_position_embeddings {stated.max_positions} is below the target's context "
                f"{target.context}; beyond it its guesses may be accepted less often, and the output stays exact"
            )
    elements = sum(p.numel() for p in head.parameters()) + (
        0 if head.own_embedding is None else head.own_embedding.numel()
    )
    return DrafterPart(llama.hidden_size, folder, elements, 2 * llama.num_key_value_heads * llama.head_dim)


class _NothingYetError(Exception):
    """The config fits, and there are no tensors to go on with."""


def _nothing_yet(folder: Path) -> dict[str, Tensor]:
    raise _NothingYetError


def _read_stand_ins(folder: Path) -> dict[str, Tensor]:
    headers, wrong = read_headers(f"drafter {folder}", folder)
    if wrong:
        raise UserError("; ".join(wrong))
    found = {name: contents(name, h) if canonical(name) in MAPS else stand_in(h) for name, h in headers.items()}
    return canonically(folder, found)


def _layers(folder: Path, stated: Eagle3Config, target: Geometry) -> tuple[int, ...] | None:
    """The feature layers of a head whose tensors could not be read; None where they do not fit the target."""
    try:
        return read_layers(folder, stated.feature_layers, target.layers)
    except UserError:
        return None


def _convention(stated: Eagle3Config, target_layers: int) -> str:
    ids = stated.feature_layers
    if ids is None:
        return "the default, as its config names none"
    if target_layers in ids:
        return f"its config counts boundaries: {_list(ids)}"
    return "as its config names them"


def _flags(stated: Eagle3Config) -> str:
    flags = [name for name in FLAGS if getattr(stated, name)]
    return f" with {', '.join(flags)}" if flags else ""


def _list(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))
