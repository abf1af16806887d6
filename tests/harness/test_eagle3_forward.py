"""The forward pass of every kind of head, against the description of the published heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_checkpoints import (
    facts,
    load,
    published,
    write,
)
from eagle3_written_out import (
    FLAG_SETS,
    Description,
    assert_computes,
    default_frequencies,
    drafted_by,
)
from tiny_models import (
    HIDDEN,
    VOCAB,
)

from ecospec.harness.eagle3 import FLAGS


@pytest.mark.parametrize("nested", [False, True], ids=["top", "eagle_config"])
@pytest.mark.parametrize("flags", FLAG_SETS, ids="+".join)
def test_three_draft_steps_are_those_of_the_description(tmp_path: Path, flags: tuple[str, ...], nested: bool) -> None:
    on = dict.fromkeys(flags, True)
    raw = facts(**({} if nested else on))
    raw["eagle_config"] |= on if nested else {}
    tensors = published(flags=flags)
    assert_computes(load(write(tmp_path / "head", raw, tensors)), tensors, Description(flags=flags))


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_logits(tmp_path: Path, flag: str) -> None:
    tensors = published(flags=[flag])
    plain = {name: tensor for name, tensor in tensors.items() if "fc_norm" not in name and "input_norm" not in name}
    found = [
        drafted_by(load(write(tmp_path / str(on), facts(**{flag: on}), tensors if on else plain)))[2]
        for on in (True, False)
    ]
    # The recurrent state shows from the second step on.
    assert (found[0][1] - found[1][1]).abs().max() > 0.1


@pytest.mark.parametrize("sizes", [(4, 2, 16), (8, 1, 4), (2, 2, 20), (4, 4, 8)])
def test_head_sizes_are_those_of_the_file(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = sizes
    tensors = published(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    raw = facts(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    of = Description(heads, kv_heads, head_dim, frequencies=default_frequencies(head_dim))
    assert_computes(load(write(tmp_path / "head", raw, tensors)), tensors, of)


def test_without_sizes_of_heads_they_are_the_libraries_defaults(tmp_path: Path) -> None:
    raw = facts()
    del raw["head_dim"], raw["num_key_value_heads"]
    tensors = published(kv_heads=4)
    assert_computes(load(write(tmp_path / "head", raw, tensors)), tensors, Description(kv_heads=4))


@pytest.mark.parametrize("draft_vocab_size", [None, VOCAB, "absent"])
@pytest.mark.parametrize("embedding", ["own", "target's"])
def test_one_vocabulary_and_either_embedding(tmp_path: Path, draft_vocab_size: Any, embedding: str) -> None:
    tensors = published(draft_vocab=VOCAB)
    if embedding == "own":
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    raw = facts(draft_vocab_size=draft_vocab_size)
    if draft_vocab_size == "absent":
        del raw["draft_vocab_size"]
    assert_computes(load(write(tmp_path / "head", raw, tensors)), tensors, Description())


# --- rotary parameters, old and new


def llama3(frequency: float) -> float:
    """Factor 4, low and high frequency factors 1 and 4, 64 positions at first."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 64 / 4:
        return frequency
    if wavelength > 64 / 1:
        return frequency / 4
    smooth = (64 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 4 + smooth * frequency


def yarn(frequency: float, i: int, head_dim: int = 8) -> float:
    """Factor 4, 64 positions at first, 32 and 1 rotations as bounds."""

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(64 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), head_dim - 1)
    ramp = min(max((i - low) / (high - low), 0.0), 1.0)
    return frequency / 4 * ramp + frequency * (1 - ramp)


PLAIN = default_frequencies(8)
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "absent": ({}, PLAIN, 1.0),
    "top level": ({"rope_theta": 50.0}, default_frequencies(8, 50.0), 1.0),
    "null scaling": ({"rope_theta": 50.0, "rope_scaling": None}, default_frequencies(8, 50.0), 1.0),
    "new": ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, default_frequencies(8, 50.0), 1.0),
    "old linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, [f / 4 for f in PLAIN], 1.0),
    "old linear with theta": (
        {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        [f / 4 for f in default_frequencies(8, 50.0)],
        1.0,
    ),
    "new linear": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
        [f / 4 for f in default_frequencies(8, 50.0)],
        1.0,
    ),
    "old llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, [llama3(f) for f in PLAIN], 1.0),
    "new llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
        [llama3(f) for f in PLAIN],
        1.0,
    ),
    "old yarn": (
        {"rope_scaling": {"type": "yarn", **YARN}},
        [yarn(f, i) for i, f in enumerate(PLAIN)],
        0.1 * math.log(4) + 1,
    ),
    "new yarn": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
        [yarn(f, i) for i, f in enumerate(PLAIN)],
        0.1 * math.log(4) + 1,
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_parameters_old_and_new(tmp_path: Path, rope: str) -> None:
    given, frequencies, scale = ROPES[rope]
    raw = facts()
    del raw["rope_theta"]
    tensors = published()
    head = load(write(tmp_path / "head", raw | given, tensors))
    assert_computes(head, tensors, Description(frequencies=frequencies, scale=scale))
