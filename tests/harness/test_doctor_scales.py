"""Scales of FP8 weights that do not go with them: what the doctor says of their headers, a run of their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import add_tokenizer
from tiny_quantized import write_fp8
from torch import Tensor

NAME = "model.layers.0.self_attn.q_proj.weight_scale_inv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_fp8(tmp_path / "target", "qwen3_moe")
    return add_tokenizer(tmp_path / "target")


def change(folder: Path, harm: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the shard that holds the scales, and the index with it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shard = folder / index["weight_map"][NAME]
    tensors = load_file(shard)
    harm(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    if NAME not in tensors:
        del index["weight_map"][NAME]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def problems(command: Callable[..., Any], folder: Path) -> list[str]:
    ran = command("doctor", "--target", folder, "--drafter", "ngram", "--policy", "confidence", "--json")
    return [each["text"] for each in json.loads(ran.out)["findings"] if each["level"] == "problem"]


def test_scales_that_fit(command: Callable[..., Any], folder: Path) -> None:
    assert problems(command, folder) == []


def test_a_weight_without_scales(command: Callable[..., Any], folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(NAME) and None)
    assert problems(command, folder) == [
        f"target {folder}: {NAME.removesuffix('_scale_inv')} is FP8, and there is no {NAME}; 1 such weights"
    ]


def test_scales_of_another_grid(command: Callable[..., Any], folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({NAME: torch.ones(2, 2)}))
    assert problems(command, folder) == [
        f"target {folder}: {NAME} has shape (2, 2), expected (1, 1) for blocks of [128, 128]"
    ]


def test_scales_that_no_config_speaks_of(command: Callable[..., Any], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert any("are scales of quantised weights which nothing uses" in text for text in problems(command, folder))
