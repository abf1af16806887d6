"""Decode with a model of published shape and random weights: verdict and where a step's time goes.

    PYTHONPATH=src python examples/random_model_check.py --shape qwen3-30b-a3b --device cuda
    PYTHONPATH=src python examples/random_model_check.py --shape tiny --device cpu --dtype float32

It needs torch and transformers, no checkpoint and no network. A drafter with random weights is hardly ever right, so
that speed-ups mean nothing here; what a step costs, what it reads and that the output is plain decoding's, does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ecospec.harness.bandwidth import copy_bandwidth
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Generation, Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.lossless import check_output
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target
from ecospec.policies.builtin import Confidence

PHASES = ("draft", "select", "verify", "commit")
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3,
    "gpt-oss-20b": GPT_OSS,
    "tiny": {**QWEN3, **SMALL, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    "tiny-gpt-oss": {**GPT_OSS, **SMALL, "num_local_experts": 8, "sliding_window": 16},
}


class NoText:
    """A tokenizer for tokens that stand for nothing."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Nothing."""
        return ""


@dataclass(frozen=True)
class Row:
    """One method's figures."""

    name: str
    values: tuple[str, ...]


def build_target(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Target:
    """A target with random weights, made where it stays."""
    facts = dict(shape)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return Target(model)


def build_head(target: Target, dtype: torch.dtype) -> Eagle3Head:
    """An EAGLE-3 head with random weights that fits the target."""
    geometry = target.geometry
    layers = geometry.layers
    raw: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": 3 * geometry.hidden_size,
        "num_attention_heads": 32 if geometry.hidden_size % 32 == 0 else 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "vocab_size": geometry.vocab_size,
        "draft_vocab_size": None,
        "max_position_embeddings": geometry.context,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, max(1, layers // 2 - 1), layers - 1]},
    }
    torch.manual_seed(1)
    head = Eagle3Head(Eagle3Config.from_dict(raw)).eval().requires_grad_(False)
    target.read_features(head.config.feature_layers or ())
    return head.to(target.device, dtype)


def figures(name: str, target: Target, found: Sequence[Generation], bandwidth: float) -> Row:
    """Means over all steps of a method."""
    steps = [step for generation in found for step in generation.steps]
    geometry, count = target.geometry, len(steps)
    pairs = sum(step.expert_pairs for step in steps) / count
    verify = sum(step.seconds.get("verify", 0.0) for step in steps) / count
    read = pairs * geometry.expert_bytes + geometry.always_read_bytes
    tokens = sum(len(generation.tokens) - 1 for generation in found)
    seconds = sum(generation.decode_seconds for generation in found)
    phases = (1e3 * sum(step.seconds.get(phase, 0.0) for step in steps) / count for phase in PHASES)
    return Row(
        name,
        (
            f"{tokens / seconds:.1f}",
            f"{sum(step.emitted for step in steps) / count:.3f}",
            f"{pairs / geometry.moe_layers:.2f}",
            *(f"{phase:.2f}" for phase in phases),
            f"{read / 1e6:.0f}",
            f"{100 * read / verify / bandwidth:.1f} %",
        ),
    )


def run(shape: str, device: str, dtype: torch.dtype, prompts: int, tokens: int) -> int:
    """Decode by both methods, in turn, and print; 1 where the output is not plain decoding's, else 0."""
    began = time.perf_counter()
    target = build_target(SHAPES[shape], device, dtype)
    geometry = target.geometry
    method = Speculation(Confidence(), build_head(target, dtype), 4, 3, 2)
    bandwidth = copy_bandwidth(device)
    print(
        f"{shape}, random weights, {str(dtype).removeprefix('torch.')}, {device}: {geometry.moe_layers} MoE layers, "
        f"{geometry.experts} experts of {geometry.expert_bytes / 1e6:.2f} MB, K = {geometry.top_k}; "
        f"built in {time.perf_counter() - began:.0f} s; copies {bandwidth / 1e9:.0f} GB/s"
    )
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(geometry.vocab_size, (200,), generator=generator).tolist() for _ in range(prompts)]
    new_rule = partial(StopRule, NoText(), tokens, frozenset(), ())
    plain: list[Generation] = []
    speculative: list[Generation] = []
    verdicts = []
    for number in range(-1, prompts):  # the first is run twice; the first time is a warm-up
        prompt, chooser = texts[max(0, number)], TokenChooser(Sampling(), str(number))
        one = decode_ar_batch(target, [Stream(prompt, chooser, new_rule())])[0]
        other = decode_speculative_batch(target, method, [Stream(prompt, chooser, new_rule())])[0]
        if number < 0:
            continue
        plain.append(one)
        speculative.append(other)
        found = check_output(target, prompt, one.tokens, other.tokens, chooser, new_rule, method.tree_size)
        verdicts.append(found.verdict)
    head = ("", "tokens/s", "α", "E", *(f"T_{phase}, ms" for phase in PHASES), "MB a step", "of bandwidth")
    rows = [figures("AR", target, plain, bandwidth), figures("confidence", target, speculative, bandwidth)]
    cells = [head, *((row.name, *row.values) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print("lossless: " + ", ".join(f"{verdicts.count(kind)} {kind}" for kind in sorted(set(verdicts))))
    return int("violated" in verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args(arguments)
    return run(given.shape, given.device, getattr(torch, given.dtype), given.prompts, given.tokens)


if __name__ == "__main__":
    sys.exit(main())
