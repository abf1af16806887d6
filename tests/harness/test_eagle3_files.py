"""Heads in every published layout: each file and naming gives the same head, and what is wrong is named."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_checkpoints import (
    DRAFT_IDS,
    DRAFT_VOCAB,
    FILES,
    as_vllm,
    facts,
    load,
    published,
    refusal,
    shards,
    write,
)
from eagle3_written_out import (
    Description,
    assert_computes,
)
from safetensors.torch import save_file
from tiny_models import (
    HIDDEN,
    VOCAB,
)
from torch import Tensor


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
