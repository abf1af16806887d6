"""Heads in every published layout: each file and naming gives the same head, and each flag what it says.

The forward pass is written out once more here, entry by entry and head by head, from the description of the
published heads; nothing of it comes from the modules under test.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import (
    CONTEXT,
    HIDDEN,
    VOCAB,
    head_facts,
    random_tokens,
    rule_for,
    run_ar,
    run_speculative,
    tiny_head,
    tiny_target,
)
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_speculative_batch
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.eagle3 import FLAGS, Eagle3Head
from ecospec.harness.eagle3_loading import load_eagle3, output_layers
from ecospec.harness.preparing import load_head
from ecospec.policies import Confidence

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


# --- where the tensors are

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("save", FILES)
@pytest.mark.parametrize("rename", [lambda tensors: tensors, as_vllm], ids=["midlayer", "layers.0"])
def test_every_layout_is_the_same_head(
    tmp_path: Path, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]], save: str, dtype: torch.dtype
) -> None:
    tensors = published() | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    head = load(write(tmp_path / "head", facts(), rename(tensors), FILES[save]))
    found = dict(head.named_parameters())
    assert {*found, "embed_tokens.weight", "d2t", "t2d"} == tensors.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, tensors[name].float()), name
    assert head.own_embedding is not None
    assert head.own_embedding.dtype == torch.float32
    assert torch.equal(head.own_embedding, tensors["embed_tokens.weight"].float())
    assert head.to_target_ids(torch.arange(DRAFT_VOCAB)).tolist() == DRAFT_IDS


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "was-run"),)

    folder = write(tmp_path / "head", facts(), {}, lambda at, _: torch.save({"x": Runs()}, at / "pytorch_model.bin"))
    assert refusal(folder).startswith("pytorch_model.bin is not readable (")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"state": {"fc.weight": torch.zeros(1)}}, {1: torch.zeros(1)}])
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    folder = write(tmp_path / "head", facts(), {}, lambda at, _: torch.save(content, at / "pytorch_model.bin"))
    assert refusal(folder) == "pytorch_model.bin holds something else than tensors by name"


# --- the forward pass, written out


@dataclass(frozen=True)
class Description:
    """A head as its description has it: sizes, flags, and the frequency of each rotary pair with their scale."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    flags: tuple[str, ...] = ()
    frequencies: list[float] = field(default_factory=lambda: default_frequencies(8))
    scale: float = 1.0


def default_frequencies(head_dim: int, theta: float = 10000.0) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + EPS) * weight


def rotated(x: Tensor, position: int, of: Description) -> Tensor:
    half = of.head_dim // 2
    out = torch.empty_like(x)
    for i, frequency in enumerate(of.frequencies):
        cosine, sine = (of.scale * f(position * frequency) for f in (math.cos, math.sin))
        out[i] = x[i] * cosine - x[i + half] * sine
        out[i + half] = x[i + half] * cosine + x[i] * sine
    return out


def fused(w: dict[str, Tensor], features: Tensor, of: Description) -> Tensor:
    """h [H] of the target's three states [3·Ht]."""
    parts = [features[i * HIDDEN : (i + 1) * HIDDEN] for i in range(3)]
    if "fc_norm" in of.flags:
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    joined = torch.cat(parts)
    if "norm_before_fc" in of.flags:
        joined = rms(joined, w["input_norm.weight"])
    return w["fc.weight"] @ joined


def last_state(
    w: dict[str, Tensor], entries: Sequence[tuple[Tensor, Tensor]], of: Description
) -> tuple[Tensor, Tensor]:
    """Recurrent state [H] and logits [D] of the last of some entries (embedding, hidden state)."""
    query, keys, values = [torch.empty(0)], [], []
    for position, (embedding, hidden) in enumerate(entries):
        x = torch.cat(
            (rms(embedding, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"]))
        )
        projected = {part: w[f"midlayer.self_attn.{part}_proj.weight"] @ x for part in "qkv"}
        query = [rotated(q, position, of) for q in projected["q"].split(of.head_dim)]
        keys.append([rotated(k, position, of) for k in projected["k"].split(of.head_dim)])
        values.append(list(projected["v"].split(of.head_dim)))
    attended = []
    for head in range(of.heads):
        shared = head // (of.heads // of.kv_heads)
        scores = torch.stack([query[head] @ key[shared] / math.sqrt(of.head_dim) for key in keys]).softmax(0)
        attended.append(sum((s * v[shared] for s, v in zip(scores, values, strict=True)), torch.zeros(of.head_dim)))
    hidden = entries[-1][1]
    residual = rms(hidden, w["midlayer.hidden_norm.weight"]) if "norm_before_residual" in of.flags else hidden
    residual = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
    x = rms(residual, w["midlayer.post_attention_layernorm.weight"])
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
    out = residual + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    normed = rms(out, w["norm.weight"])
    return normed if "norm_output" in of.flags else out, w["lm_head.weight"] @ normed


EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
FEATURES = torch.randn(6, 3 * HIDDEN, generator=torch.Generator().manual_seed(6)) * 2
FOLLOWING = [3, 40, 12, 63, 0, 21]


def drafted_by(head: Eagle3Head) -> tuple[list[int], Tensor, Tensor]:
    """A chain of three that a running session drafts, with the states and logits it came from."""
    session = DrafterSession(head.eval().requires_grad_(False), EMBEDDING, 20)
    session.extend(FOLLOWING, FEATURES)
    tree = session.draft(FOLLOWING[-1], 3, 1)
    assert session.drafted is not None
    states = session.drafted[1].states
    with torch.inference_mode():
        logits = head.logits(states)
    return [int(token) for token in tree.tokens[1:]], states, logits


def assert_computes(head: Eagle3Head, tensors: dict[str, Tensor], of: Description) -> None:
    """Its states and logits over three draft steps are those of the description."""
    tokens, states, logits = drafted_by(head)
    w = {name: tensor.float() for name, tensor in tensors.items()}
    table = w.get("embed_tokens.weight", EMBEDDING)
    entries = [(table[t], fused(w, row, of)) for t, row in zip(FOLLOWING, FEATURES, strict=True)]
    for step in range(3):
        state, expected = last_state(w, entries, of)
        torch.testing.assert_close(states[step], state, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[step], expected, atol=1e-3, rtol=1e-3)
        best = int(expected.argmax())
        assert tokens[step] == best + (int(tensors["d2t"][best]) if "d2t" in tensors else 0)
        entries.append((table[tokens[step]], state))


FLAG_SETS = [(), *((flag,) for flag in FLAGS), ("norm_before_residual", "norm_output"), FLAGS]


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


# --- layer ids


CLOCK = 32


def clock_target(layers: int) -> Any:
    """A target whose next token is t + L, and whose layer j says t + j + 1 of token t: each layer adds one.

    The embedding is the identity; attention adds nothing, and every expert adds the token behind the one that it
    finds, ten times larger than all before.
    """
    target = tiny_target(vocab_size=CLOCK, num_hidden_layers=layers, moe_intermediate_size=CLOCK, hidden_size=CLOCK)
    model, following = target.model, torch.eye(CLOCK).roll(1, dims=0)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(CLOCK))
        model.lm_head.weight.copy_(torch.eye(CLOCK))
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.gate_up_proj.copy_(torch.cat((torch.eye(CLOCK), torch.eye(CLOCK))))
            layer.mlp.experts.down_proj.copy_(following * 10.0**index)
    return target


def clock_head(folder: Path, ids: Sequence[int], slot: int, layer: int, layers: int) -> Path:
    """A head that copies one of its three states, and is right where that is layer ``layer``'s output."""
    tensors = published(draft_vocab=CLOCK)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    tensors["fc.weight"] = torch.zeros(CLOCK, 3 * CLOCK)
    tensors["fc.weight"][:, slot * CLOCK : (slot + 1) * CLOCK] = torch.eye(CLOCK)
    tensors["norm.weight"] = torch.ones(CLOCK)
    # The state of token t stands for t + layer + 1; the token to guess is the one behind the next, t + 2·L.
    tensors["lm_head.weight"] = torch.eye(CLOCK).roll(2 * layers - layer - 1, dims=0)
    raw = head_facts(CLOCK, eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)})
    return write(folder, raw, tensors)


def clock_acceptance(folder: Path, layers: int) -> float:
    """Tokens a step of a chain of one draft token, over 20 emitted tokens."""
    target = clock_target(layers)
    head = load_head(folder, target).eval().requires_grad_(False)
    method = Speculation(Confidence(), head, budget=2, draft_steps=1, draft_topk=1)
    done = run_speculative(target, method, [5, 9, 2], n=21)
    assert done.tokens == [(2 + layers * (i + 1)) % CLOCK for i in range(21)]  # lossless whatever the head guesses
    return sum(step.emitted for step in done.steps) / len(done.steps)


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize(
    ("ids", "outputs"),
    [((0, 2, 5), (0, 2, 5)), ((2, 4, 6), (1, 3, 5)), ((1, 3, 4), (1, 3, 4))],
    ids=["outputs", "boundaries", "outputs below the last"],
)
def test_a_copying_head_is_right_only_at_the_layer_that_it_copies(
    tmp_path: Path, ids: tuple[int, ...], outputs: tuple[int, ...], slot: int
) -> None:
    right = clock_acceptance(clock_head(tmp_path / "right", ids, slot, outputs[slot], 6), 6)
    assert right == 2.0
    for name, off in (("before", -1), ("behind", 1)):
        wrong = clock_acceptance(clock_head(tmp_path / name, ids, slot, outputs[slot] + off, 6), 6)
        assert wrong == 1.0


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_without_ids_a_copying_head_is_right_at_the_default_layers(tmp_path: Path, slot: int) -> None:
    layer = (1, 3, 4)[slot]  # outputs 1, L/2 - 1, L - 4 of 8: the inputs of layers 2, L/2, L - 3
    folder = clock_head(tmp_path / "head", (), slot, layer, 8)
    raw = json.loads((folder / "config.json").read_text())
    del raw["eagle_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert clock_acceptance(folder, 8) == 2.0


def test_published_ids_are_read_as_their_heads_mean_them() -> None:
    assert output_layers((1, 17, 33), 36) == (1, 17, 33)
    assert output_layers((1, 46, 90), 94) == (1, 46, 90)
    assert output_layers((24, 30, 36), 36) == (23, 29, 35)


def test_ids_at_the_top_level_count_too(tmp_path: Path) -> None:
    raw = facts(eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    del raw["eagle_config"]
    assert load(write(tmp_path / "head", raw, published())).config.feature_layers == (2, 3, 5)


@pytest.mark.parametrize("ids", [[1, 3, 9], [-1, 3, 5], [0, 4, 8]])
def test_layers_that_do_not_exist_are_refused(tmp_path: Path, ids: list[int]) -> None:
    raw = facts(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert refusal(write(tmp_path / "head", raw, published())) == (
        f"its eagle_aux_hidden_state_layer_ids are {ids}; expected outputs of layers 0 to 7, or boundaries 1 to 8, "
        "as the target has 8 layers"
    )


def test_ids_that_are_the_usual_inputs_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = facts(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    with caplog.at_level(logging.WARNING, "ecospec"):
        assert load(write(tmp_path / "head", raw, published())).config.feature_layers == (2, 4, 5)
    (record,) = caplog.records
    assert "[2, 4, 5] are read as outputs of these layers" in record.getMessage()


# --- tied embeddings, and maps


def test_a_tied_head_uses_its_embedding(tmp_path: Path) -> None:
    tensors = published(draft_vocab=VOCAB) | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    stored = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    raw = facts(draft_vocab_size=None, tie_word_embeddings=True)
    assert_computes(load(write(tmp_path / "head", raw, stored)), tensors, Description())
    assert refusal(write(tmp_path / "not", raw | {"tie_word_embeddings": False}, stored)) == (
        f"tensor lm_head.weight has shape nothing, expected {(VOCAB, HIDDEN)}"
    )
    del stored["embed_tokens.weight"]
    assert "tie_word_embeddings without embed_tokens.weight and lm_head.weight" in refusal(
        write(tmp_path / "neither", raw, stored)
    )


def test_a_tied_head_with_a_smaller_vocabulary_needs_a_head_of_its_own(tmp_path: Path) -> None:
    tensors = published() | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    raw = facts(tie_word_embeddings=True)
    assert_computes(load(write(tmp_path / "own", raw, tensors)), tensors, Description())
    del tensors["lm_head.weight"]
    assert refusal(write(tmp_path / "head", raw, tensors)) == (
        "no lm_head.weight, and tie_word_embeddings cannot stand for it: an embedding of 64 tokens is no head of 20; "
        "expected lm_head.weight of shape (20, 32)"
    )


def test_a_map_of_zeros_is_believed_only_with_its_mask(tmp_path: Path) -> None:
    tensors = published() | {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.long)}
    tensors["t2d"] = torch.arange(VOCAB) < DRAFT_VOCAB
    head = load(write(tmp_path / "meant", facts(), tensors))
    assert head.to_target_ids(torch.arange(DRAFT_VOCAB)).tolist() == list(range(DRAFT_VOCAB))
    del tensors["t2d"]
    assert refusal(write(tmp_path / "unfilled", facts(), tensors)) == (
        "d2t is all zeros with a draft vocabulary of 20 below the target's 64; expected offsets, or a t2d tensor that "
        "marks ids 0 to 19 if these are meant"
    )
    empty = tensors | {"t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    assert "t2d does not mark" in refusal(write(tmp_path / "empty", facts(), empty))


def test_a_mask_alone_is_checked_too(tmp_path: Path) -> None:
    tensors = published(draft_vocab=VOCAB)
    raw = facts(draft_vocab_size=None)
    load(write(tmp_path / "all", raw, tensors | {"t2d": torch.ones(VOCAB, dtype=torch.bool)}))
    some = torch.arange(VOCAB) > 3
    assert "t2d does not mark" in refusal(write(tmp_path / "some", raw, tensors | {"t2d": some}))


# --- what is refused, each in one line


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', expected 'llama'"),
        ({"hidden_size": None}, "it has no hidden_size"),
        ({"transformer_layer_config": {"hidden_size": 32}}, "expected its keys at the top level"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of num_key_value_heads, 3"),
        ({"head_dim": 3}, "head_dim is 3, expected an even number"),
        ({"norm_output": "yes"}, "norm_output is 'yes', expected true or false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5, 2, 3]}}, "are [1.5, 2, 3], expected integers"),
        ({"fc_norm": True, "eagle_config": {"fc_norm": False}}, "fc_norm is True at the top level and False in"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "given by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected none"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters differ",
        ),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    message = refusal(write(tmp_path / "head", facts(**changed), published()))
    assert message.startswith("config.json is not that of a supported EAGLE-3 head (")
    assert reason in message


def test_all_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = published() | {f"model.layers.{i}.weight": torch.zeros(1) for i in range(9)}
    del tensors["fc.weight"], tensors["norm.weight"]
    tensors["midlayer.mlp.up_proj.weight"] = torch.zeros(2, 2)
    message = refusal(write(tmp_path / "head", facts(), tensors))
    for part in (
        "tensor fc.weight has shape nothing, expected (32, 96)",
        "tensor norm.weight has shape nothing, expected (32,)",
        "tensor midlayer.mlp.up_proj.weight has shape (2, 2), expected (48, 32)",
        "tensor model.layers.0.weight has shape (1,), expected no such tensor",
        "5 more tensors that no head has",
    ):
        assert part in message


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_a_norms_tensors_and_its_flag_go_together(tmp_path: Path, flag: str) -> None:
    assert "has shape nothing, expected" in refusal(write(tmp_path / "no-tensor", facts(**{flag: True}), published()))
    assert "expected no such tensor" in refusal(write(tmp_path / "no-flag", facts(), published(flags=[flag])))


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("fc.weight", torch.int8, "float32, float16 or bfloat16"),
        ("lm_head.weight", torch.float8_e4m3fn, "float32, float16 or bfloat16"),
        ("embed_tokens.weight", torch.int64, "float32, float16 or bfloat16"),
        ("d2t", torch.float32, "int64"),
        ("t2d", torch.float32, "bool"),
    ],
)
def test_a_tensor_of_another_type_is_named(tmp_path: Path, name: str, dtype: torch.dtype, expected: str) -> None:
    tensors = published() | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    tensors[name] = tensors[name].to(dtype)
    kind = str(dtype).removeprefix("torch.")
    assert refusal(write(tmp_path / "head", facts(), tensors)) == f"tensor {name} is {kind}, expected {expected}"


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    tensors = published()
    tensors["layers.0.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()
    assert "is there under another name as well" in refusal(write(tmp_path / "head", facts(), tensors))


@pytest.mark.parametrize("save", FILES)
@pytest.mark.parametrize("harm", ["truncated", "emptied", "overwritten"])
def test_a_damaged_file_is_named(tmp_path: Path, save: str, harm: str) -> None:
    folder = write(tmp_path / "head", facts(), published(), FILES[save])
    path = max((*folder.glob("*.safetensors"), *folder.glob("*.bin")), key=lambda path: path.name)
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "emptied": b"", "overwritten": b"\x93" * 4000}[harm])
    assert refusal(folder).startswith(f"{path.name} is not readable (")


def test_a_header_beyond_the_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", facts(), {}, lambda at, _: None)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert refusal(folder).startswith("model.safetensors is not readable (")


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", facts(), published(), shards)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = "model-00001-of-00002.safetensors"
    save_file({"extra": torch.zeros(1)}, tmp_path / "outside.safetensors")
    for change, reason in (
        (lambda places: places | {"extra": first}, f"{first} has no tensor extra; {path.name} says it has"),
        (
            lambda places: {n: p for n, p in places.items() if n != "d2t"},
            f"{first} has tensor d2t; {path.name} does not say so",
        ),
        (lambda places: places | {"extra": "model-3.safetensors"}, f"no model-3.safetensors; {path.name} names it"),
        (lambda places: places | {"extra": "../outside.safetensors"}, "no ../outside.safetensors; "),
        (lambda places: [1], f"{path.name} has no weight_map from tensor names to files"),
        (lambda places: {"x": 1}, f"{path.name} has no weight_map from tensor names to files"),
    ):
        path.write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))
        assert refusal(folder).startswith(reason)
    path.write_text("{")
    assert refusal(folder).startswith(f"{path.name} is not readable (")


# --- decoding


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", FLAG_SETS, ids="+".join)
def test_sixty_steps_with_any_head_are_exact(flags: tuple[str, ...], temperature: float) -> None:
    target, head = tiny_target(), tiny_head(**dict.fromkeys(flags, True))
    method = Speculation(Confidence(), head, budget=3, draft_steps=2, draft_topk=2)
    sampling, prompt = Sampling(temperature=temperature, seed=3), random_tokens(np.random.default_rng(0), 4)
    done = run_speculative(target, method, prompt, sampling, n=90)
    assert done.tokens == run_ar(target, prompt, sampling, n=90).tokens
    assert len(done.tokens) == 90
    assert len(done.steps) >= 60


@pytest.mark.parametrize("flags", [FLAGS[:2], FLAGS])
def test_a_batch_with_such_a_head_is_exact(flags: tuple[str, ...]) -> None:
    target, head = tiny_target(), tiny_head(**dict.fromkeys(flags, True))
    method = Speculation(Confidence(), head, budget=4, draft_steps=3, draft_topk=2)
    sampling = Sampling(temperature=1.0, seed=3)
    prompts = [random_tokens(np.random.default_rng(seed), 4 + seed) for seed in (0, 1)]
    alone = [run_speculative(target, method, prompt, sampling, n=30) for prompt in prompts]
    streams = [Stream(prompt, TokenChooser(sampling, "r"), rule_for(prompt, 30)) for prompt in prompts]
    together = decode_speculative_batch(target, method, streams)
    for one, other, prompt in zip(alone, together, prompts, strict=True):
        assert one.tokens == other.tokens == run_ar(target, prompt, sampling, n=30).tokens
        assert [step.emitted for step in one.steps] == [step.emitted for step in other.steps]  # the same trees


def test_beyond_the_heads_positions_decoding_goes_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt = tiny_target(), random_tokens(np.random.default_rng(4), 8)
    short, long = tiny_head(max_position_embeddings=20), tiny_head(max_position_embeddings=CONTEXT)
    plain = run_ar(target, prompt, n=60)
    found = []
    with caplog.at_level(logging.WARNING, "ecospec"):
        for head in (long, short, short):
            method = Speculation(Confidence(), head, budget=4, draft_steps=3, draft_topk=2)
            done = run_speculative(target, method, prompt, n=60)
            assert done.tokens == plain.tokens
            found.append([step.emitted for step in done.steps])
    assert found[0] == found[1] == found[2]  # its angles simply go on
    (record,) = caplog.records
    assert record.getMessage() == (
        "drafter: request r may take 68 positions, the head's max_position_embeddings is 20; its guesses may be "
        "accepted less often beyond"
    )
