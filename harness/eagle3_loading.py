"""Loading an EAGLE-3 head for a target: every tensor of its files is used or named in an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.eagle3_files import read_config, read_tensors

logger = logging.getLogger("ecospec")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16)
MOST_LEFT_OVER = 4
"""Tensors that an error names of those that no head has; another model's file can have thousands."""


def load_eagle3(
    folder: Path,
    *,
    target_vocab: int,
    target_hidden: int,
    target_layers: int,
    read: Callable[[Path], dict[str, Tensor]] = read_tensors,
    device: str = "cpu",
) -> Eagle3Head:
    """Load a head in any published layout and check that it fits the target.

    Where the checkpoint brings its own ``embed_tokens.weight`` the head uses that, else the target's.

    Args:
        read: gives the tensors of a folder by the names of `Eagle3Head`; ``d2t`` and ``t2d`` are looked into.
        device: where the head is made; ``meta`` for its shapes alone.

    Raises:
        UserError: a file or tensor is missing, left over, damaged, or of a shape or type that does not fit.
    """
    raw = read_config(folder)
    try:
        config = Eagle3Config.from_dict(raw)
        with torch.device(device):
            head = Eagle3Head(config)
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,  # sizes below zero or beyond the memory, from torch
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"drafter {folder}: config.json is not that of a supported EAGLE-3 head ({reason})") from error
    layers = read_layers(folder, config.feature_layers, target_layers)
    config = head.config = replace(config, feature_layers=layers)
    _check_config(folder, config, target_vocab=target_vocab, target_hidden=target_hidden)
    tensors = read(folder)
    embedding = tensors.pop("embed_tokens.weight", None)
    _check_fit(folder, config, embedding, target_hidden=target_hidden)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and config.draft_vocab_size != target_vocab:
        raise UserError(
            f"drafter {folder}: draft vocabulary {config.draft_vocab_size} is smaller than the target's "
            f"{target_vocab}, but there is no d2t tensor to map one to the other"
        )
    if config.tied and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _tied_head(folder, config, embedding)
    if embedding is not None:
        _check_type(folder, "embed_tokens.weight", embedding)
        head.own_embedding = embedding.float()
    _check_tensors(folder, dict(head.named_parameters()), tensors)
    head.load_state_dict(tensors)
    if d2t is not None or t2d is not None:
        head.d2t = _checked_map(folder, d2t, t2d, config.draft_vocab_size, target_vocab)
    return head


def default_feature_layers(target_layers: int) -> tuple[int, int, int]:
    """Outputs of a low, a middle and a high layer: 1, L/2 − 1, L − 4, as the published heads use.

    EAGLE and vLLM write the same tensors as the inputs of layers 2, L/2, L − 3.
    """
    return (1, target_layers // 2 - 1, target_layers - 4)


def output_layers(ids: tuple[int, ...], target_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a head reads, of the ids that its config gives.

    An id is the layer whose output is read (SpecForge and the heads trained with it), unless one of them is L: no
    layer has that index, so that head counts boundaries between layers, L being the one before the final norm, and
    boundary b is the output of layer b − 1.
    """
    return tuple(i - 1 for i in ids) if target_layers in ids else ids


def read_layers(folder: Path, ids: tuple[int, ...] | None, target_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a head reads: those that its config gives in either convention, or the default.

    Raises:
        UserError: the target has no such layers.
    """
    if ids is None:
        layers = default_feature_layers(target_layers)
        if not 0 <= layers[0] < layers[1] < layers[2] < target_layers:
            raise UserError(
                f"drafter {folder}: its config names no eagle_aux_hidden_state_layer_ids, and the default "
                f"{list(layers)} is no choice for a target of {target_layers} layers"
            )
        return layers
    if len(ids) != 3:
        raise UserError(f"drafter {folder}: it names {ids} feature layers, expected three")
    outputs = output_layers(ids, target_layers)
    if not all(0 <= layer < target_layers for layer in outputs):
        raise UserError(
            f"drafter {folder}: its eagle_aux_hidden_state_layer_ids are {list(ids)}; expected outputs of layers "
            f"0 to {target_layers - 1}, or boundaries 1 to {target_layers}, as the target has {target_layers} layers"
        )
    inputs = tuple(layer + 1 for layer in default_feature_layers(target_layers))
    if outputs == inputs:
        logger.warning(
            "drafter %s: its eagle_aux_hidden_state_layer_ids %s are read as outputs of these layers; EAGLE and vLLM "
            "mean their inputs by the same numbers, and a head trained so has to name each layer less one",
            folder,
            list(ids),
        )
    return outputs


def _check_config(folder: Path, config: Eagle3Config, *, target_vocab: int, target_hidden: int) -> None:
    _check_fact(folder, "vocab_size", config.llama.vocab_size, target_vocab)
    _check_fact(folder, "target_hidden_size", config.target_hidden_size, target_hidden)
    if config.draft_vocab_size > target_vocab:
        raise UserError(
            f"drafter {folder}: draft vocabulary {config.draft_vocab_size} exceeds the target's {target_vocab}"
        )


def _check_fit(folder: Path, config: Eagle3Config, embedding: Tensor | None, *, target_hidden: int) -> None:
    if embedding is None:  # the target's embedding is its input
        _check_fact(folder, "hidden_size", config.llama.hidden_size, target_hidden)
    else:
        size = (config.llama.vocab_size, config.llama.hidden_size)
        _check_fact(folder, "the shape of embed_tokens.weight", tuple(embedding.shape), size)


def _check_fact(folder: Path, name: str, found: object, expected: object) -> None:
    if found != expected:
        raise UserError(f"drafter {folder}: {name} is {found}, expected {expected} for this target")


def _tied_head(folder: Path, config: Eagle3Config, embedding: Tensor | None) -> Tensor:
    """The embedding as ``lm_head.weight``."""
    size = (config.draft_vocab_size, config.llama.hidden_size)
    if config.draft_vocab_size < config.llama.vocab_size:
        raise UserError(
            f"drafter {folder}: no lm_head.weight, and tie_word_embeddings cannot stand for it: an embedding of "
            f"{config.llama.vocab_size} tokens is no head of {size[0]}; expected lm_head.weight of shape {size}"
        )
    if embedding is None:
        raise UserError(
            f"drafter {folder}: tie_word_embeddings without embed_tokens.weight and lm_head.weight; expected one of "
            f"them, of shape {size}"
        )
    return embedding


def _check_type(folder: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"drafter {folder}: tensor {name} is {kind}, expected float32, float16 or bfloat16")


def _check_tensors(folder: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Name all tensors that are missing or of another shape, and the first of those left over."""
    shapes = [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in (found, expected)]
    wrong = [
        f"tensor {name} has shape {shapes[0].get(name, 'nothing')}, expected {shapes[1][name]}"
        for name in sorted(expected)
        if shapes[0].get(name) != shapes[1][name]
    ]
    over = sorted(found.keys() - expected.keys())
    wrong += [f"tensor {name} has shape {shapes[0][name]}, expected no such tensor" for name in over[:MOST_LEFT_OVER]]
    if len(over) > MOST_LEFT_OVER:
        wrong.append(f"{len(over) - MOST_LEFT_OVER} more tensors that no head has")
    if wrong:
        raise UserError(f"drafter {folder}: {'; '.join(wrong)}")
    for name, tensor in found.items():
        _check_type(folder, name, tensor)


def _checked_map(folder: Path, d2t: Tensor | None, t2d: Tensor | None, size: int, target_vocab: int) -> Tensor:
    """The offsets from draft ids to target ids; without ``d2t`` the vocabularies are one."""
    offsets = torch.zeros(size, dtype=torch.long) if d2t is None else d2t
    for name, tensor, types in (("d2t", offsets, INTEGERS), ("t2d", t2d, (torch.bool, torch.uint8, *INTEGERS))):
        if tensor is not None and tensor.dtype not in types:
            kinds = " or ".join(str(kind).removeprefix("torch.") for kind in types[:1])
            found = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"drafter {folder}: tensor {name} is {found}, expected {kinds}")
    if tuple(offsets.shape) != (size,):
        raise UserError(f"drafter {folder}: d2t has shape {tuple(offsets.shape)}, expected {(size,)}")
    offsets = offsets.long()
    ids = torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= target_vocab or len(ids.unique()) != size:
        raise UserError(
            f"drafter {folder}: d2t must map draft ids to different target ids below {target_vocab} "
            "(it holds offsets: target id = draft id + d2t)"
        )
    if t2d is not None:
        marked = torch.zeros(target_vocab, dtype=torch.bool)
        marked[ids] = True
        if tuple(t2d.shape) != (target_vocab,) or not torch.equal(t2d.bool(), marked):
            raise UserError(f"drafter {folder}: t2d does not mark the target ids that d2t maps to")
    elif size < target_vocab and not offsets.any():
        # The first D ids may be meant, but all zeros is also what a map that was never filled looks like, and such a
        # head would guess wrong without an error. A t2d that marks these ids says that they are meant.
        raise UserError(
            f"drafter {folder}: d2t is all zeros with a draft vocabulary of {size} below the target's {target_vocab}; "
            f"expected offsets, or a t2d tensor that marks ids 0 to {size - 1} if these are meant"
        )
    return offsets
