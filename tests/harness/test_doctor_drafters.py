"""What the doctor says of drafters that are no EAGLE-3 heads, beside what a run says of the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek
import torch
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB, add_tokenizer, write_family
from tiny_language_models import write_language_model

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(command: Callable[..., Any]) -> Doctor:
    """Ask the doctor about a target and a drafter."""

    def ask(target: Path, drafter: str) -> tuple[int, dict[str, Any]]:
        ran = command("doctor", "--target", target, "--drafter", drafter, "--policy", "confidence", "--json")
        assert "Traceback" not in ran.err
        return ran.code, json.loads(ran.out)

    return ask


def problems(found: dict[str, Any], level: str = "problem") -> list[str]:
    return [each["text"] for each in found["findings"] if each["level"] == level]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("target"), "qwen3_moe")


def test_a_language_model_that_fits(doctor: Doctor, target: Path, tmp_path: Path) -> None:
    folder = add_tokenizer(write_language_model(tmp_path / "lm", VOCAB, max_position_embeddings=512))
    code, found = doctor(target, f"lm:path={folder}")
    assert (code, found["fits"]) == (0, True), found["findings"]
    assert found["drafter"]["vocabulary"] == VOCAB


def test_a_language_model_with_another_tokenizer_or_none_or_a_short_reach(
    doctor: Doctor, target: Path, tmp_path: Path
) -> None:
    folder = write_language_model(tmp_path / "lm", VOCAB, max_position_embeddings=100)
    for file in folder.glob("*token*"):
        file.unlink()
    code, found = doctor(target, f"lm:path={folder}")
    assert code == 2
    assert problems(found) == [f"drafter 'lm': {folder}: no tokenizer; expected tokenizer files in the folder"]
    assert "it reads at most 100 tokens, and the target's context is 512" in problems(found, "note")[0]
    add_tokenizer(folder)
    text = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = text["model"]["vocab"]
    one, other = list(vocabulary)[10:12]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")
    code, found = doctor(target, f"lm:path={folder}")
    assert code == 2
    assert "its tokenizer has another vocabulary than the target's" in problems(found)[0]


def test_a_layer_in_the_targets_shards(doctor: Doctor, tmp_path: Path) -> None:
    folder = tiny_deepseek.write_deepseek(tmp_path / "target")
    code, found = doctor(folder, "mtp")
    assert code == 0, found["findings"]
    assert found["drafter"]["parameters"] > 1000
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    name = next(each for each in index if each.endswith("eh_proj.weight"))
    shard = folder / index[name]
    tensors = load_file(shard)
    tensors[name] = torch.zeros(3, 3)
    save_file(tensors, shard, metadata={"format": "pt"})
    code, found = doctor(folder, "mtp")
    assert code == 2
    assert f"tensor {name} has shape (3, 3)" in problems(found)[0]


def test_a_target_without_a_layer_and_a_layer_for_another_kind_of_target(
    doctor: Doctor, target: Path, tmp_path: Path
) -> None:
    code, found = doctor(target, "mtp")
    assert code == 2
    assert "it has no multi-token-prediction layer" in problems(found)[0]
    other = tiny_deepseek.write_deepseek(tmp_path / "other")
    code, found = doctor(target, f"mtp:path={other}")
    assert code == 2
    assert "a layer for a target of type 'deepseek_v3', and the target is of type 'qwen3_moe'" in problems(found)[0]


def test_prompt_lookup_needs_nothing(doctor: Doctor, target: Path) -> None:
    code, found = doctor(target, "ngram")
    assert (code, found["fits"], found["drafter"]["drafter"]) == (0, True, "ngram")
