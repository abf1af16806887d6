"""The doctor on a small checkpoint of every family: what it says without weights is what loading them gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import DENSE, REFUSED, WORKING, add_tokenizer, write_family
from tiny_quantized import FP8_FAMILIES, write_fp8, write_mxfp4

from ecospec.harness.loading import load_target


def look(command: Callable[..., Any], folder: Path, *arguments: object) -> tuple[dict[str, Any], list[str]]:
    """What the doctor says of a target, and its problems but for the drafter's, of which there is none."""
    ran = command("doctor", "--json", "--device", "cpu", "--policy", "confidence", "--target", folder, *arguments)
    said = json.loads(ran.out)
    texts = [finding["text"] for finding in said["findings"] if finding["level"] == "problem"]
    return said, [text for text in texts if not text.startswith("drafter: none")]


@pytest.mark.parametrize("family", WORKING)
def test_what_is_said_is_what_loading_gives(family: str, command: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_family(tmp_path / family, family)
    said, problems = look(command, folder, "--dtype", "float32")
    assert problems == []
    target = load_target(str(folder), dtype=torch.float32, device="cpu").target
    geometry = target.geometry
    keys = ("layers", "MoE layers", "vocabulary", "hidden size", "context")
    expected = (geometry.layers, geometry.moe_layers, geometry.vocab_size, geometry.hidden_size, geometry.context)
    assert tuple(said["target"][key] for key in keys) == expected
    session = target.new_session(4)
    session.prefill([1])
    memories = [memory for memory in (*session.cache._keys, *session.cache._values) if memory is not None]
    assert said["memory"]["KV cache per token"] == sum(m.numel() * m.element_size() for m in memories) // 4
    assert said["memory"]["target's weights"] == sum(p.numel() * 4 for p in target.model.parameters())
    if family in DENSE:
        assert "bytes per expert" not in said["target"]
        _, problems = look(command, folder, "--policy", "marginal", "--drafter", folder)
        assert any("is dense" in line for line in problems)
        return
    assert said["target"]["experts per MoE layer"] == geometry.experts
    assert said["target"]["K, experts per token"] == geometry.top_k
    assert said["target"]["bytes per expert, stored"] == geometry.expert_bytes


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_a_run_refuses_is_refused_here(family: str, command: Callable[..., Any], tmp_path: Path) -> None:
    _, problems = look(command, write_family(tmp_path / family, family))
    assert any("not supported" in line for line in problems)


@pytest.mark.parametrize("family", [*FP8_FAMILIES, "mxfp4"])
def test_quantised_checkpoints_are_whole(family: str, command: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    if family == "mxfp4":
        write_mxfp4(folder)
    else:
        write_fp8(folder, family)
    add_tokenizer(folder)
    said, problems = look(command, folder, "--dtype", "float32")
    assert problems == []
    assert said["target"]["scales, stored"] > 0
    total = sum(said["target"][f"{part}, stored"] for part in ("weights", "scales", "biases"))
    assert said["target"]["bytes per expert, stored"] == total < said["target"]["checkpoint bytes"]
