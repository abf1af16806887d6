"""EAGLE-3 heads on disk in every published layout, random and small, and loading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import (
    HIDDEN,
    VOCAB,
    head_facts,
)
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.eagle3_loading import load_eagle3

INNER, DRAFT_VOCAB, LAYERS = 48, 20, 8
DRAFT_IDS = list(range(2, 2 + 3 * DRAFT_VOCAB, 3))
EPS = 1e-6


def published(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, draft_vocab: int = DRAFT_VOCAB, flags: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Random tensors under the names and shapes of the published checkpoints."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }
    if "norm_before_fc" in flags:
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    if "fc_norm" in flags:
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.3 + float(len(shape) == 1) for name, shape in shapes.items()}
    if draft_vocab == DRAFT_VOCAB:
        tensors["d2t"] = torch.tensor(DRAFT_IDS) - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][DRAFT_IDS] = True
    return tensors


def facts(**overrides: Any) -> dict[str, Any]:
    return head_facts(draft_vocab=DRAFT_VOCAB) | overrides


Saver = Callable[[Path, dict[str, Tensor]], None]


def one_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(
        {name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()},
        folder / "pytorch_model.bin",
    )


def old_pickled(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


FILES: dict[str, Saver] = {f.__name__: f for f in (one_file, shards, pickled, old_pickled)}


def as_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"d2t": "draft_id_to_target_id"}
    return {names.get(name, name.replace("midlayer.", "layers.0.")): tensor for name, tensor in tensors.items()}


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], save: Saver = one_file) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return folder


def load(folder: Path, **target: int) -> Eagle3Head:
    fitting = {"target_vocab": VOCAB, "target_hidden": HIDDEN, "target_layers": LAYERS}
    return load_eagle3(folder, **{**fitting, **target})


def refusal(folder: Path, **target: int) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, **target)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"drafter {folder}: ")
    return message.removeprefix(f"drafter {folder}: ")
