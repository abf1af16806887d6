"""Loading the multi-token-prediction layer of a target: every tensor of it is used or named in an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecospec.harness.drafters.contract import DrafterTarget
from ecospec.harness.drafters.heads import BoundHead
from ecospec.harness.drafters.mtp import MODEL_TYPE, MtpHead, layer_config
from ecospec.harness.drafters.mtp_files import CheckpointFiles, block_size, floats
from ecospec.predictors.placing import place

WHAT = "drafter 'mtp'"
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
"""Copies of the target's own, which a checkpoint may leave out."""
RENAMED = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
    "lm_head.weight": HEAD,
}
"""Parameters of `MtpHead` outside its block, with their published names behind the prefix."""
COMPUTED = "self_attn.rotary_emb.inv_freq"
"""Frequencies that some checkpoints store; the config gives the same."""
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The library's stacked experts, of which each has its matrices in files of its own."""
EXPERTS = "mlp.experts."
IN_FULL = "block.mlp.gate."
"""The router, which the library computes in float32."""
MOST_NAMED = 4


@dataclass(frozen=True)
class FoundLayer:
    """The layer of a checkpoint before its tensors are read.

    Attributes:
        prefix: of its tensors' names. names: of all of them.
        head: without weights.
    """

    files: CheckpointFiles
    prefix: str
    names: tuple[str, ...]
    config: Any
    head: MtpHead


def find_layer(folder: Path, config: Any, layers: int, vocab_size: int) -> FoundLayer:
    """The layer that a target's config and its checkpoint's names describe.

    Args:
        config: the target's. layers: the target's number of layers, without this one.

    Raises:
        UserError: there is none.
    """
    kind = getattr(config, "model_type", "unknown")
    files = CheckpointFiles(WHAT, folder)
    if kind != MODEL_TYPE and any(each.startswith("model.layers.") and ".eh_proj." in each for each in files.places):
        raise files.fail(f"it has a layer for a target of type {MODEL_TYPE!r}, and the target is of type {kind!r}")
    prefix = f"model.layers.{layers}."
    names = tuple(each for each in files.places if each.startswith(prefix))
    if not names:
        if any(each.startswith("mtp.") for each in files.places):
            raise files.fail("its layer is named mtp.*, as Qwen3-Next's; expected a DeepSeek-V3 checkpoint")
        raise files.fail(
            f"it has no multi-token-prediction layer (no tensor {prefix}*); expected a DeepSeek-V3 checkpoint with "
            "one, or another drafter, such as an EAGLE-3 head or ngram"
        )
    if kind != MODEL_TYPE:
        raise files.fail(f"the layer of a model of type {kind!r} is not supported, expected {MODEL_TYPE!r}")
    try:
        own = layer_config(config)
        with torch.device("meta"):  # the weights come from the files, and there can be twenty gigabytes of them
            head = MtpHead(own, vocab_size, own_head=prefix + HEAD in files.places)
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise files.fail(f"its config describes no layer ({' '.join(str(error).split())})") from error
    return FoundLayer(files, prefix, names, own, head)


def bind_mtp(folder: Path, target: DrafterTarget) -> BoundHead:
    """Read the layer of a checkpoint, the target's own or another.

    Raises:
        UserError: the target has none, or a tensor is missing, left over, damaged or of another shape.
    """
    found = find_layer(folder, target.config, target.layers, target.vocab_size)
    files, prefix, names, head = found.files, found.prefix, found.names, found.head
    embedding: Tensor = target.embedding
    read = files.read([each for each in names if each != prefix + COMPUTED])
    plain = floats(files, read, block_size(target.config), embedding.dtype)
    stored = {each.removeprefix(prefix): tensor for each, tensor in plain.items()}
    check_shapes(found, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    own = stored.pop(EMBEDDING, None)
    head.load_state_dict(_assembled(head, stored, embedding.dtype), assign=True)
    head.place_rotary(found.config, embedding.device)
    exact = {name: tensor for name, tensor in head.state_dict().items() if name.startswith(IN_FULL)}
    place(head, embedding.device, embedding.dtype)
    for name_, tensor in exact.items():
        module, _, attribute = name_.rpartition(".")
        held = getattr(head.get_submodule(module), attribute)
        held.data = tensor.data.to(embedding.device)
    head.use_head(target.head)
    if own is not None:
        own = own.to(embedding.device, embedding.dtype)
        head.own_embedding = None if torch.equal(own, embedding) else own
    return BoundHead(head, embedding, ("final",))


def _published(head: MtpHead) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that a checkpoint has of the layer, by their names behind the prefix."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (head.draft_vocab_size, head.eh_proj.out_features)}
    for name, tensor in head.state_dict().items():
        shape = tuple(tensor.shape)
        if not name.startswith("block."):
            shapes[RENAMED[name]] = shape
            continue
        name = name.removeprefix("block.")
        parts = FUSED.get(name.removeprefix(EXPERTS)) if name.startswith(EXPERTS) else None
        if parts is None:
            shapes[name] = shape
            continue
        experts, rows, columns = shape
        for expert in range(experts):
            for part in parts:
                shapes[f"{EXPERTS}{expert}.{part}.weight"] = (rows // len(parts), columns)
    return shapes


def check_shapes(layer: FoundLayer, shapes: dict[str, tuple[int, ...]]) -> None:
    """Name the first tensors that are missing, of another shape, or left over.

    Args:
        shapes: of the checkpoint's tensors, by their names behind the prefix; without scales.

    Raises:
        UserError: there are such tensors.
    """
    optional = {EMBEDDING, HEAD}
    prefix, expected = layer.prefix, _published(layer.head)
    wrong = [
        f"tensor {prefix}{name} has shape {shapes.get(name, 'nothing')}, expected {shape}"
        for name, shape in expected.items()
        if shapes.get(name) != shape and not (name in optional and name not in shapes)
    ]
    wrong += [
        f"tensor {prefix}{name} has shape {shapes[name]}, expected no such tensor"
        for name in sorted(shapes.keys() - expected.keys())
    ]
    if wrong:
        more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise layer.files.fail("; ".join(wrong[:MOST_NAMED]) + more)


def _assembled(head: MtpHead, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of `MtpHead`, experts stacked, in the dtype to run in but for the router's."""
    state: dict[str, Tensor] = {}
    for name in head.state_dict():
        published = name.removeprefix("block.") if name.startswith("block.") else RENAMED[name]
        parts = FUSED.get(published.removeprefix(EXPERTS)) if published.startswith(EXPERTS) else None
        if parts is None:
            state[name] = stored[published].to(torch.float32 if name.startswith(IN_FULL) else dtype)
            continue
        experts = int(head.state_dict()[name].shape[0])
        state[name] = torch.stack(
            [
                torch.cat([stored[f"{EXPERTS}{expert}.{part}.weight"].to(dtype) for part in parts])
                for expert in range(experts)
            ]
        )
    return state
