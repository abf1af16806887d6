"""What a target loaded from disk decodes, as plain values: compared between one process and several, or placements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tiny_models import FEATURE_LAYERS, run_ar, run_speculative, tiny_head, tiny_model, tiny_predictor
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Generation, Speculation, Stream, decode_speculative_batch
from ecospec.harness.loading import load_target
from ecospec.harness.placement import Placement
from ecospec.harness.plugins import load_plugins
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OTHER = [2, 7, 1, 8]


def write_model(folder: Path, family: str = "qwen3_moe", **overrides: Any) -> Path:
    """A tiny random checkpoint with a tokenizer of whole words."""
    tiny_model(family, **overrides).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


def load(folder: Path, placement: Placement | None = None) -> Target:
    """The checkpoint in float32 on the CPU."""
    loaded = load_target(
        str(folder), dtype=torch.float32, device="cpu", feature_layers=FEATURE_LAYERS, placement=placement
    )
    return loaded.target


def marginal(target: Target) -> Speculation:
    """The method with the most parts: a head, a predictor, and a policy that counts experts."""
    policy = load_plugins().create_policy("marginal")
    return Speculation(policy, tiny_head(), 4, 3, 2, predictor=tiny_predictor(target), predictor_name="learned")


def decoded(target: Target) -> dict[str, Any]:
    """Tokens and steps by plain and speculative decoding, alone and in a batch; the geometry; one pass' routing."""
    method = marginal(target)
    found: dict[str, Any] = {"geometry": dataclasses.asdict(target.geometry)}
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=7)
        found[f"ar {temperature}"] = _facts(run_ar(target, PROMPT, sampling, n=16))
        found[f"marginal {temperature}"] = _facts(run_speculative(target, method, PROMPT, sampling, n=16))
    streams = [
        Stream(prompt, TokenChooser(sampling, str(row)), StopRule(_Words(), 8 + 4 * row, frozenset(), ()))
        for row, prompt in enumerate((PROMPT, OTHER))
    ]
    for row, generation in enumerate(decode_speculative_batch(target, method, streams)):
        found[f"batch {row}"] = _facts(generation)
    found["routing"] = target.new_session(16).prefill(PROMPT).routing.tolist()
    found["logits"] = target.new_session(16).prefill(PROMPT).logits[0].tolist()
    return found


def _facts(generation: Generation) -> dict[str, Any]:
    steps = [(step.emitted, step.selected, step.expert_pairs, step.predicted_overlap) for step in generation.steps]
    return {"tokens": generation.tokens, "steps": [list(step) for step in steps]}


class _Words:
    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))
