"""Small random causal LMs as checkpoint folders, for a predictor's backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, WIDTH = 50, 16
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 24},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 24, "sliding_window": None},
    "gemma": {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8, "sliding_window": 4096},
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 24},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": WIDTH},
    "bert": {"intermediate_size": 24},
    "bloom": {},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4096,
    },
}
WORKING = ("llama", "qwen3", "mistral", "gemma", "gpt2", "gpt_neox", "opt", "gemma2", "gpt_oss")


def write_backbone(folder: Path, family: str, *, seed: int = 5, positions: int = 96, **changes: Any) -> Path:
    """Write a causal LM with its embedding table and head; weights as wide as in `tiny_models`."""
    given = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        **_OWN[family],
        **changes,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def library_states(folder: Path, inputs: torch.Tensor) -> torch.Tensor:
    """Last hidden states [B, n, H] that the library itself gives for inputs [B, n, H], read causally."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: torch.Tensor = model.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    return found
