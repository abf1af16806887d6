"""Every family of targets as a checkpoint folder: random, small, in the published names, in several shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ecospec.harness.training.target import train_tokenizer

VOCAB, HIDDEN, EXPERTS, TOP_K, CONTEXT, WINDOW = 320, 32, 8, 2, 512, 16
SHARD = "60KB"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED = {"moe_intermediate_size": 16, "intermediate_size": 32}
_LATENT = {
    **_MIXED,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **_MIXED,
        "num_experts": EXPERTS,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "qwen3_moe": {**_MIXED, "head_dim": 8, "num_experts": EXPERTS},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 16, "sliding_window": WINDOW},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 16},
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "intermediate_size": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "head_dim": 8},
    "deepseek_v3": _LATENT,
    "glm4_moe": {
        **_MIXED,
        "head_dim": 8,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoe": {"num_local_experts": EXPERTS, "intermediate_size": 16},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": EXPERTS,
        "intermediate_size": 16,
        "intermediate_size_mlp": 32,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,  # the scale of queries changes within a few tokens
    },
    "minimax_m2": {"head_dim": 8, "num_local_experts": EXPERTS, "intermediate_size": 16},
    "llama": {"intermediate_size": 32},
    "qwen3_next": {
        **_MIXED,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
DENSE = ("llama",)
REFUSED = ("qwen3_next",)
WORKING = tuple(family for family in FAMILIES if family not in REFUSED)
WINDOWED = ("qwen2_moe", "mixtral", "gpt_oss", "llama4_text")


def family_config(family: str, **changes: Any) -> Any:
    """The library's config of a family."""
    given = {**_COMMON, **FAMILIES[family], **changes}
    if family in DENSE:
        del given["num_experts_per_tok"]
    return AutoConfig.for_model(family, **given)


def family_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """The library's model, float32, with weights so wide that a wrong mask or position shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        family_config(family, **changes), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        flat = name.endswith(("norm.weight", "layernorm.weight")) or parameter.dim() < 2
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1 if flat else 0.25)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.2)
    return model.eval().requires_grad_(False)


def write_family(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint folder with tokenizer, shards and their index."""
    family_model(family, seed, **changes).save_pretrained(folder, max_shard_size=SHARD)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of the same vocabulary into a folder."""
    texts = ["Question: Sam has 3 pens and buys 4 more.\nAnswer: Sam has 3 + 4 = 7 pens.\n#### 7"] * 4
    train_tokenizer(texts, VOCAB).save_pretrained(folder)
    return folder
