"""Quantised checkpoints: their numbers, the routing of their experts, and the bytes of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_experts import Packed, old_forward, with_fp8_experts, with_mxfp4_experts
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB, add_tokenizer, write_family
from tiny_models import random_tokens
from tiny_quantized import FP8_BLOCK, fp8_blocks, from_fp8, mxfp4_blocks, write_fp8, write_mxfp4
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.loading import load_target
from ecospec.harness.quantized import MXFP4_BLOCK, unpack_blocks, unpacked_method
from ecospec.harness.target import Target

PROMPT = random_tokens(np.random.default_rng(0), 12, VOCAB)


def load(folder: Path) -> Any:
    add_tokenizer(folder)
    return load_target(str(folder), dtype=torch.float32, device="cpu").target.model


def load_target_note(folder: Path) -> str | None:
    """What a run says about the quantisation of a checkpoint."""
    return load_target(str(folder), dtype=torch.float32, device="cpu").unpacked


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (3, 5), (576, 128)])
def test_cut_off_blocks_have_the_scale_of_their_place(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    stored, scales = fp8_blocks(weight)
    numbers = unpack_blocks(stored, scales, (FP8_BLOCK, FP8_BLOCK))
    assert torch.equal(numbers, from_fp8(stored, scales))
    for i, j in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)):
        assert numbers[i, j] == stored[i, j].float() * scales[i // FP8_BLOCK, j // FP8_BLOCK]
    torch.testing.assert_close(numbers, weight, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fp8_weights_are_unpacked_to_the_numbers_they_stand_for(tmp_path: Path, family: str) -> None:
    numbers = write_fp8(tmp_path, family)
    model = load(tmp_path)
    parameters = dict(model.named_parameters())
    seen = 0
    for name, expected in numbers.items():
        if ".experts." not in name and name in parameters:
            assert torch.equal(parameters[name], expected), name
            seen += 1
    layer = 1
    experts = model.model.layers[layer].mlp.experts
    prefix = f"model.layers.{layer}.mlp.experts"
    for e in range(experts.num_experts):
        gate, up, down = (numbers[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj[e], torch.cat((gate, up)))
        assert torch.equal(experts.down_proj[e], down)
    assert seen > 10
    assert load_target_note(tmp_path) == "fp8"
    Target(model).new_session(20).prefill(PROMPT)


def test_mxfp4_weights_are_unpacked_to_the_numbers_they_stand_for(tmp_path: Path) -> None:
    numbers = write_mxfp4(tmp_path)
    model = load(tmp_path)
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(numbers)
    for name, expected in numbers.items():
        assert torch.equal(parameters[name], expected), name
    assert load_target_note(tmp_path) == "mxfp4"
    Target(model).new_session(20).prefill(PROMPT)


def test_what_is_not_quantised_is_not_unpacked(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3_moe")
    assert load_target_note(tmp_path) is None


def same_passes(one: Target, other: Target) -> None:
    """Both give the same logits and the same routing, in a prompt and in decoding."""
    sessions = [target.new_session(30) for target in (one, other)]
    first, second = (session.prefill(PROMPT) for session in sessions)
    for token in (None, 7, 9):
        if token is not None:
            first, second = (session.decode(token) for session in sessions)
        torch.testing.assert_close(first.logits, second.logits, atol=1e-4, rtol=0)
        assert torch.equal(first.routing.sort(-1).values, second.routing.sort(-1).values)


def test_experts_that_stay_fp8_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fp8(tmp_path, "qwen3_moe")
    plain = load(tmp_path)
    packed = with_fp8_experts(plain, monkeypatch)
    assert unpacked_method({"quant_method": "any"}, packed) is None
    target = Target(packed)
    same_passes(target, Target(plain))
    assert target.geometry.expert_bytes == 3 * 128 * 128 + 3 * 4  # a byte a weight, a float for each of three blocks


@pytest.mark.parametrize("old", [False, True])
def test_experts_that_stay_mxfp4_are_seen(tmp_path: Path, old: bool) -> None:
    write_mxfp4(tmp_path)
    plain = load(tmp_path)
    packed = with_mxfp4_experts(plain, old=old)
    assert unpacked_method({"quant_method": "any"}, packed) is None
    target = Target(packed)
    same_passes(target, Target(plain))
    weights, biases = 3 * 64 * 32, (2 * 32 + 64) * 4
    assert target.geometry.expert_bytes == weights // 2 + weights // MXFP4_BLOCK + biases


def test_a_layer_whose_routing_is_not_seen_stops_the_run(tmp_path: Path) -> None:
    """Experts that are told their tokens in no form that is known."""
    write_mxfp4(tmp_path)
    plain = load(tmp_path)
    mlp = plain.model.layers[1].mlp
    module = Packed(plain.config)
    module.numbers = {name: getattr(mlp.experts, name).clone() for name in ("gate_up_proj", "down_proj")}
    mlp.experts = module

    class Other(type(mlp)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            return old_forward(self, hidden_states)

    mlp.__class__ = Other
    with pytest.raises(UserError, match=r"no routing was captured for MoE layer model\.layers\.1\.mlp\.experts of 2"):
        Target(plain)


def test_the_packing_of_these_tests_is_that_of_the_format() -> None:
    """Numbers worked out by hand: code 5 is 3.0, code 9 is −0.5; the exponent 128 doubles."""
    weight = torch.zeros(1, 1, 32)
    weight[0, 0, 0], weight[0, 0, 1], weight[0, 0, 2] = 6.0, -1.0, 12.0
    blocks, exponents = mxfp4_blocks(weight)
    assert exponents.tolist() == [[[128]]]
    assert blocks[0, 0, 0, :2].tolist() == [5 + 16 * 9, 7]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a folder of two shards."""
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


def test_scales_of_another_grid_are_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, "qwen3_moe")
    add_tokenizer(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"

    def wider(tensors: dict[str, Tensor]) -> None:
        if name in tensors:
            tensors[name] = torch.ones(1, 2)

    rewrite(tmp_path, wider)
    with pytest.raises(UserError, match=r"scales \[1, 2\], expected \[1, 1\] for blocks of \[128, 128\]"):
        load_target(str(tmp_path), dtype=torch.float32, device="cpu")


def test_scales_that_nothing_uses_are_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, "qwen3_moe")
    add_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="are scales of quantised weights which nothing uses"):
        load_target(str(tmp_path), dtype=torch.float32, device="cpu")
