"""Checkpoints with quantised experts in the published layouts, small and random, and what their numbers stand for.

The packing is written out here from the formats' definitions, apart from the library's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_families import family_model
from torch import Tensor

FP8_BLOCK = 128
FP8_SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 160,  # the last block of its rows is cut off
    "num_hidden_layers": 2,
}
FP8_FAMILIES = {
    "qwen3_moe": FP8_SIZES,
    "deepseek_v3": {**FP8_SIZES, "kv_lora_rank": 136, "q_lora_rank": 128},
}
MXFP4_SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": None}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the eight unsigned codes of a four-bit float stand for; the ninth to sixteenth are the same, negative."""


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weights and the factor of each block that gives the numbers back."""
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape)
    stored, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def from_fp8(stored: Tensor, scales: Tensor) -> Tensor:
    """The numbers of FP8 weights."""
    wide = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return stored.float() * wide[: stored.shape[0], : stored.shape[1]]


def mxfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, out, in] as blocks uint8 [E, out, in / 32, 16], two codes a byte, low half first, and exponents.

    An exponent of 127 stands for the factor 1.
    """
    by_block = weight.unflatten(-1, (-1, 32))
    exponents = (by_block.abs().amax(-1) / 6).log2().ceil().clamp(min=-126)
    scaled = by_block / exponents.exp2()[..., None]
    values = torch.tensor(_FP4)
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.unflatten(-1, (16, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """The numbers [E, out, in] of MXFP4 weights."""
    codes = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(-2).long()
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return (values[codes] * (exponents.float() - 127).exp2()[..., None]).flatten(-2)


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Two shards and their index, and no single file."""
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / shard, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, shard))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
        file.unlink()
    return found


def _declare(folder: Path, quantization: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def write_fp8(folder: Path, family: str) -> dict[str, Tensor]:
    """A folder of block-wise FP8 weights; returns what its tensors stand for, by their published names."""
    family_model(family, **FP8_FAMILIES[family]).save_pretrained(folder)
    numbers, stored = _read(folder), {}
    for name, tensor in numbers.items():
        if name.endswith("_proj.weight") or name.endswith(("_a_proj_with_mqa.weight", "_b_proj.weight")):
            stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensor)
            numbers[name] = from_fp8(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = tensor.to(torch.bfloat16) if tensor.dim() > 1 else tensor
            numbers[name] = stored[name].float()
    _write(folder, stored)
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _declare(folder, {**block, "weight_block_size": [FP8_BLOCK, FP8_BLOCK]})
    return numbers


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A GPT-OSS folder with MXFP4 experts; returns what its tensors stand for, experts as [E, in, out]."""
    family_model("gpt_oss", **MXFP4_SIZES).save_pretrained(folder)
    numbers, stored = _read(folder), {}
    for name, tensor in numbers.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, exponents = mxfp4_blocks(tensor.transpose(1, 2))
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, exponents
            numbers[name] = from_mxfp4(blocks, exponents).transpose(1, 2)
        else:
            stored[name] = tensor.to(torch.bfloat16)
            numbers[name] = stored[name].float()
    _write(folder, stored)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return numbers
