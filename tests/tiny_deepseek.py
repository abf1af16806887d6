"""Small random DeepSeek-V3 checkpoints in exactly the published layout, their multi-token-prediction layer included.

Per-expert names, several shards with an index, the further layer behind the last one with copies of embedding and
head, optionally FP8 blocks with ``weight_scale_inv``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ecospec.harness.training.target import train_tokenizer

LAYERS, HIDDEN, VOCAB, EXPERTS, CONTEXT = 3, 32, 320, 8, 256
FACTS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
PREFIX = f"model.layers.{LAYERS}."


def tiny_tokenizer(folder: Path, vocab: int = VOCAB) -> Any:
    """A tokenizer of exactly so many tokens, saved."""
    alphabet = "".join(chr(code) for code in range(48, 123))
    tokenizer = train_tokenizer([f"{alphabet} Sam has 3 pens and buys 4 more. 3 + 4 = 7"] * 4, vocab)
    tokenizer.save_pretrained(folder)
    return tokenizer


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts under the published names, each matrix by itself."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, matrix in enumerate(tensor):
                found[f"{stem}.{expert}.gate_proj.weight"], found[f"{stem}.{expert}.up_proj.weight"] = matrix.chunk(2)
        elif last == "down_proj":
            found |= {f"{stem}.{expert}.down_proj.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def further_layer(seed: int, embedding: Tensor, head: Tensor, config: Any) -> dict[str, Tensor]:
    """Random tensors of the multi-token-prediction layer, by their published names behind the prefix."""
    torch.manual_seed(seed)
    one = DeepseekV3ForCausalLM._from_config(config, dtype=torch.float32)
    block = {
        name.removeprefix("model.layers.1."): tensor
        for name, tensor in randomised(one).state_dict().items()
        if name.startswith("model.layers.1.")
    }
    return {
        **published(block),
        "enorm.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "hnorm.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "eh_proj.weight": 0.3 * torch.randn(HIDDEN, 2 * HIDDEN),
        "shared_head.norm.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "shared_head.head.weight": head.clone(),
        "embed_tokens.weight": embedding.clone(),
    }


def randomised(model: Any) -> Any:
    """Weights as wide as in `tiny_models`, norms and correction biases away from one and zero."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


def deepseek_tensors(seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's config and its tensors by their published names."""
    config = DeepseekV3Config(**{**FACTS, **changes})
    torch.manual_seed(seed)
    model = randomised(DeepseekV3ForCausalLM._from_config(config, dtype=torch.float32))
    tensors = published(model.state_dict())
    layer = further_layer(seed + 1, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"], config)
    tensors |= {PREFIX + name: tensor for name, tensor in layer.items()}
    raw = {**FACTS, **changes, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return raw, tensors


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 [o, i] and the scale of each block, by which it is to be multiplied."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    fp8 = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            here = (slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1]))
            scales[r, c] = weight[here].abs().max() / 448
            fp8[here] = (weight[here] / scales[r, c]).to(torch.float8_e4m3fn)
    return fp8, scales


def write_shards(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], shards: int = 3) -> Path:
    """Config, tokenizer, shards and index; the further layer's tensors are spread over all shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tiny_tokenizer(folder, raw["vocab_size"])
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for place in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == place}, folder / place, {"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_deepseek(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A whole checkpoint."""
    return write_shards(folder, *deepseek_tensors(seed, **changes))
