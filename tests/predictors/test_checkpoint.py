"""Reading a predictor's folder: every way it can be another's, or nobody's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecospec.errors import UserError
from ecospec.predictors.checkpoint import (
    check_tensors,
    embedding_hash,
    read_predictor,
    save_predictor,
    target_facts,
    target_geometry,
    weights_hash,
)
from ecospec.predictors.contract import TargetView

TARGET = TargetView(moe_layers=3, experts=8, top_k=2, vocab_size=64, hidden_size=32, embedding=torch.zeros(64, 32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"kind": "mine", "target": target_geometry(TARGET), "note": "ä"}
    save_predictor(tmp_path / "a" / "b", config, {"weight": torch.arange(6.0).view(2, 3).t()})
    return tmp_path / "a" / "b"


def refusal(folder: Path, kind: str = "mine", target: TargetView = TARGET) -> str:
    with pytest.raises(UserError) as caught:
        read_predictor(folder, kind, target)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"predictor {folder}: ")
    return message.removeprefix(f"predictor {folder}: ")


def test_what_is_saved_is_read(folder: Path) -> None:
    config, tensors = read_predictor(folder, "mine", TARGET)
    assert config["note"] == "ä"
    assert torch.equal(tensors["weight"], torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder) == f"no {name}; expected a folder with config.json and model.safetensors"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff" * 9])
def test_a_corrupted_file_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith("not readable (")


def test_weights_cut_short_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert refusal(folder).startswith("not readable (")


def test_another_kind_is_refused(folder: Path) -> None:
    assert refusal(folder, kind="other") == "it is of kind 'mine', expected 'other'"
    (folder / "config.json").write_text("[1]")
    assert refusal(folder) == "it is of kind None, expected 'mine'"


@pytest.mark.parametrize("name", ["moe_layers", "experts", "top_k", "vocab_size", "hidden_size"])
def test_another_geometry_is_refused(folder: Path, name: str) -> None:
    trained = getattr(TARGET, name)
    other = replace(TARGET, **{name: trained + 1})
    assert refusal(folder, target=other) == f"trained for {name} = {trained}, but the target has {trained + 1}"


@pytest.mark.parametrize("target", [None, {}, "qwen", [1]])
def test_a_folder_without_a_geometry_is_refused(folder: Path, target: object) -> None:
    (folder / "config.json").write_text(json.dumps({"kind": "mine", "target": target}))
    assert refusal(folder) == "trained for moe_layers = None, but the target has 3"


def view_with(embedding: torch.Tensor) -> TargetView:
    return replace(TARGET, embedding=embedding)


def test_targets_of_one_geometry_are_told_apart_by_their_embeddings() -> None:
    """Whatever the dtype: float32 rounds to the same bfloat16; past 4096 rows evenly spaced ones are looked at."""
    torch.manual_seed(0)
    weights = torch.randn(10_000, 4).bfloat16()
    found = embedding_hash(view_with(weights))
    assert found == embedding_hash(view_with(weights.float()))
    changed = weights.clone()
    changed[9_999] += 1  # every third row: 0, 3, ..., 9999
    assert embedding_hash(view_with(changed)) != found
    assert embedding_hash(view_with(weights[:64])) != found
    assert embedding_hash(replace(TARGET, embedding=None)) is None


def test_a_predictor_of_another_targets_embedding_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_predictor(tmp_path / "p", {"kind": "mine", "target": target_facts(TARGET)}, {"w": torch.zeros(1)})
    read_predictor(tmp_path / "p", "mine", TARGET)
    read_predictor(tmp_path / "p", "mine", replace(TARGET, embedding=None))
    assert not caplog.records
    read_predictor(tmp_path / "p", "mine", view_with(torch.ones(64, 32)))
    (record,) = caplog.records
    assert "another embedding" in record.getMessage()


def test_tensors_are_compared_by_name_and_shape(tmp_path: Path) -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(())}
    check_tensors(tmp_path, dict(model), model)
    for given, said in (
        ({"a": torch.zeros(2)}, "tensor b has shape nothing, expected ()"),
        ({**model, "c": torch.zeros(1)}, "tensor c has shape (1,), expected no such tensor"),
        ({**model, "b": torch.zeros(1)}, "tensor b has shape (1,), expected ()"),
    ):
        with pytest.raises(UserError) as caught:
            check_tensors(tmp_path, given, model)
        assert said in str(caught.value)


def test_the_hash_of_weights_is_of_their_files_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    found = weights_hash(tmp_path)
    (tmp_path / "training.json").write_bytes(b"{}")
    assert weights_hash(tmp_path) == found
    (tmp_path / "more.bin").write_bytes(b"two")
    assert weights_hash(tmp_path) != found
    (tmp_path / "more.bin").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert weights_hash(tmp_path) != found
