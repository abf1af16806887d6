"""The EAGLE-3 head: the published layout, every way it can misfit, and its forward pass written out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_checkpoints import DRAFT_IDS, DRAFT_VOCAB, load, published, refusal
from safetensors.torch import save_file
from tiny_models import CONTEXT, FEATURE_LAYERS, HIDDEN, VOCAB, head_facts
from torch import Tensor

from ecospec.harness.drafting import DrafterSession
from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.eagle3_loading import default_feature_layers
from ecospec.predictors.kv_cache import SlotCache

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def write(folder: Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A head whose draft vocabulary is smaller than the target's."""
    return write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), published(draft_vocab=DRAFT_VOCAB))


# --- the forward pass, from the description of the published heads


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [heads, n, d]: pairs (i, i + d/2) turned by position · theta^(−2i/d)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def written_out(tensors: dict[str, Tensor], embeddings: Tensor, hidden: Tensor, theta: float = 10000.0) -> Tensor:
    """States [n, H] of entries 0..n−1 under causal attention."""
    layer = {name.removeprefix("midlayer.").removesuffix(".weight"): t for name, t in tensors.items()}
    n = embeddings.shape[0]
    positions = torch.arange(n)
    x = torch.cat((rms_norm(embeddings, layer["input_layernorm"]), rms_norm(hidden, layer["hidden_norm"])), -1)
    query, key, value = (
        (x @ layer[f"self_attn.{part}_proj"].T).view(n, -1, HEAD_DIM).transpose(0, 1) for part in "qkv"
    )
    query, key = rotate(query, positions, theta), rotate(key, positions, theta)
    attended = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = query[head] @ key[shared].T / HEAD_DIM**0.5
        scores = scores.masked_fill(positions[None] > positions[:, None], float("-inf"))
        attended.append(scores.softmax(-1) @ value[shared])
    hidden = hidden + torch.cat(attended, -1) @ layer["self_attn.o_proj"].T
    x = rms_norm(hidden, layer["post_attention_layernorm"])
    gate = x @ layer["mlp.gate_proj"].T
    return hidden + (gate * gate.sigmoid() * (x @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T


def head_states(head: Eagle3Head, embeddings: Tensor, hidden: Tensor) -> Tensor:
    positions = torch.arange(len(embeddings))[None]
    with torch.inference_mode():
        return head(
            embeddings[None], hidden[None], head.rotary(hidden, positions), SlotCache(1, len(embeddings)), None
        )[0]


@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_a_loaded_head_computes_what_the_layout_describes(tmp_path: Path, theta: float) -> None:
    tensors = published(draft_vocab=DRAFT_VOCAB)
    head = load(write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB, rope_theta=theta), tensors))
    torch.manual_seed(1)
    embeddings, features = torch.randn(7, HIDDEN), torch.randn(7, 3 * HIDDEN)
    hidden = features @ tensors["fc.weight"].T
    expected = written_out(tensors, embeddings, hidden, theta)
    torch.testing.assert_close(head.fc(features), hidden, atol=1e-4, rtol=1e-4)
    states = head_states(head, embeddings, hidden)
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    logits = rms_norm(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(head.logits(states), logits, atol=1e-3, rtol=1e-4)


def test_without_a_rope_theta_it_is_ten_thousand(tmp_path: Path) -> None:
    facts = head_facts(draft_vocab=DRAFT_VOCAB)
    del facts["rope_theta"]
    head = load(write(tmp_path / "head", facts, published(draft_vocab=DRAFT_VOCAB)))
    given = load(write(tmp_path / "given", head_facts(draft_vocab=DRAFT_VOCAB), published(draft_vocab=DRAFT_VOCAB)))
    torch.testing.assert_close(head.rotary.inv_freq, given.rotary.inv_freq)


def test_the_embedding_comes_before_the_hidden_state(small: Path) -> None:
    head = load(small)
    embeddings, hidden = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    swapped = head_states(head, hidden, embeddings)
    assert (swapped - head_states(head, embeddings, hidden)).abs().max() > 0.1


def test_a_published_checkpoint_loads_whole(small: Path) -> None:
    head = load(small)
    for name, tensor in published(draft_vocab=DRAFT_VOCAB).items():
        if name not in ("d2t", "t2d"):
            assert torch.equal(head.get_parameter(name), tensor), name
    assert head.config.feature_layers == FEATURE_LAYERS
    assert head.config.draft_vocab_size == DRAFT_VOCAB


def test_the_map_holds_offsets(small: Path) -> None:
    assert load(small).to_target_ids(torch.arange(DRAFT_VOCAB)).tolist() == DRAFT_IDS


@pytest.mark.parametrize("written", [None, VOCAB])
def test_with_one_vocabulary_no_map_is_needed(tmp_path: Path, written: int | None) -> None:
    head = load(write(tmp_path / "head", head_facts(draft_vocab=written), published(draft_vocab=VOCAB)))
    assert head.to_target_ids(torch.arange(VOCAB)).tolist() == list(range(VOCAB))


def test_bfloat16_tensors_load(tmp_path: Path) -> None:
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in published(draft_vocab=DRAFT_VOCAB).items()}
    head = load(write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors))
    assert torch.equal(head.fc.weight, tensors["fc.weight"].to(head.fc.weight.dtype))


# --- layer ids


def test_the_default_layers_are_a_low_a_middle_and_a_high_output() -> None:
    assert default_feature_layers(48) == (1, 23, 44)
    assert default_feature_layers(36) == (1, 17, 32)
    assert default_feature_layers(94) == (1, 46, 90)  # the published Qwen3-235B head writes these


def test_a_head_that_names_no_layers_gets_the_default(tmp_path: Path) -> None:
    facts = head_facts(draft_vocab=DRAFT_VOCAB)
    del facts["eagle_config"]
    folder = write(tmp_path / "head", facts, published(draft_vocab=DRAFT_VOCAB))
    assert load(folder, target_layers=8).config.feature_layers == (1, 3, 4)
    assert refusal(folder, target_layers=6) == (
        "its config names no eagle_aux_hidden_state_layer_ids, and the default [1, 2, 2] is no choice for a "
        "target of 6 layers"
    )


def test_another_number_of_layers_than_three_is_refused(tmp_path: Path) -> None:
    facts = head_facts(draft_vocab=DRAFT_VOCAB, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})
    folder = write(tmp_path / "head", facts, published(draft_vocab=DRAFT_VOCAB))
    assert "names (1, 2) feature layers, expected three" in refusal(folder)


# --- what does not fit


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(small: Path, name: str) -> None:
    (small / name).unlink()
    others = "" if name == "config.json" else ", model.safetensors.index.json or pytorch_model.bin"
    assert refusal(small) == f"no {name}{others}; expected an EAGLE-3 head's folder"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_unreadable_file_is_refused(small: Path, name: str) -> None:
    (small / name).write_bytes(b'{"hidden_size": 3')
    assert refusal(small).startswith(f"{name} is not readable (")


@pytest.mark.parametrize(
    "facts",
    [
        [1, 2],
        {"hidden_size": "large"},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"draft_vocab_size": "many"},
        {"eagle_config": [0, 1, 2]},
    ],
)
def test_a_config_that_describes_no_head_is_refused(small: Path, facts: Any) -> None:
    changed = facts if isinstance(facts, list) else head_facts(draft_vocab=DRAFT_VOCAB) | facts
    (small / "config.json").write_text(json.dumps(changed))
    assert refusal(small).startswith("config.json is not that of a supported EAGLE-3 head (")


def test_more_than_one_layer_is_refused(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "h",
        head_facts(draft_vocab=DRAFT_VOCAB, num_hidden_layers=2),
        published(draft_vocab=DRAFT_VOCAB),
    )
    assert "num_hidden_layers is 2, expected 1" in refusal(folder)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = published(draft_vocab=VOCAB)
    shape = tuple(tensors.pop(name).shape)
    folder = write(tmp_path / "head", head_facts(), tensors)
    assert refusal(folder) == f"tensor {name} has shape nothing, expected {shape}"


def test_a_tensor_that_would_be_ignored_is_named(tmp_path: Path) -> None:
    extra = {"input_norm.weight": torch.ones(3 * HIDDEN)}
    folder = write(tmp_path / "head", head_facts(), {**published(draft_vocab=VOCAB), **extra})
    assert refusal(folder) == f"tensor input_norm.weight has shape {(3 * HIDDEN,)}, expected no such tensor"


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors = {**published(draft_vocab=VOCAB), "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    folder = write(tmp_path / "head", head_facts(), tensors)
    assert refusal(folder) == f"tensor fc.weight has shape {(HIDDEN, 2 * HIDDEN)}, expected {(HIDDEN, 3 * HIDDEN)}"


def test_a_smaller_draft_vocabulary_without_a_map_is_refused(tmp_path: Path) -> None:
    tensors = published(draft_vocab=DRAFT_VOCAB)
    del tensors["d2t"], tensors["t2d"]
    folder = write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors)
    assert refusal(folder) == (
        f"draft vocabulary {DRAFT_VOCAB} is smaller than the target's {VOCAB}, but there is no d2t tensor to "
        "map one to the other"
    )


def test_a_map_of_absolute_ids_is_refused(tmp_path: Path) -> None:
    """Read as offsets, [2, 5, …, 59] reaches 59 + 19, which is no target id."""
    tensors = {**published(draft_vocab=DRAFT_VOCAB), "d2t": torch.tensor(DRAFT_IDS)}
    folder = write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors)
    assert "it holds offsets: target id = draft id + d2t" in refusal(folder)


def test_absolute_ids_that_could_be_offsets_are_given_away_by_the_mask(tmp_path: Path) -> None:
    low = torch.arange(DRAFT_VOCAB)  # i + i stays inside the vocabulary
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[low] = True
    tensors = {**published(draft_vocab=DRAFT_VOCAB), "d2t": low, "t2d": mask}
    folder = write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors)
    assert refusal(folder) == "t2d does not mark the target ids that d2t maps to"


@pytest.mark.parametrize(
    "d2t",
    [
        torch.zeros(DRAFT_VOCAB, dtype=torch.long).index_fill(0, torch.tensor([0]), -1),  # below zero
        -torch.arange(DRAFT_VOCAB),  # all the same target id
    ],
)
def test_a_map_to_no_or_to_equal_target_ids_is_refused(tmp_path: Path, d2t: Tensor) -> None:
    folder = write(
        tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), {**published(draft_vocab=DRAFT_VOCAB), "d2t": d2t}
    )
    assert f"d2t must map draft ids to different target ids below {VOCAB}" in refusal(folder)


def test_a_map_of_another_length_is_refused(tmp_path: Path) -> None:
    tensors = {**published(draft_vocab=DRAFT_VOCAB), "d2t": torch.zeros(5, dtype=torch.long)}
    folder = write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors)
    assert refusal(folder) == f"d2t has shape (5,), expected {(DRAFT_VOCAB,)}"


def test_a_mask_that_disagrees_with_the_map_is_refused(tmp_path: Path) -> None:
    tensors = published(draft_vocab=DRAFT_VOCAB)
    tensors["t2d"][DRAFT_IDS[3]] = False
    folder = write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors)
    assert refusal(folder) == "t2d does not mark the target ids that d2t maps to"


def test_a_map_without_a_mask_is_enough(tmp_path: Path) -> None:
    tensors = published(draft_vocab=DRAFT_VOCAB)
    del tensors["t2d"]
    load(write(tmp_path / "head", head_facts(draft_vocab=DRAFT_VOCAB), tensors))


def test_a_head_for_another_target_is_refused(small: Path, tmp_path: Path) -> None:
    assert refusal(small, target_vocab=VOCAB + 1) == f"vocab_size is {VOCAB}, expected {VOCAB + 1} for this target"
    assert (
        refusal(small, target_hidden=HIDDEN * 2)
        == f"target_hidden_size is {HIDDEN}, expected {HIDDEN * 2} for this target"
    )
    other = write(tmp_path / "other", head_facts(target_hidden_size=HIDDEN * 2), published(draft_vocab=VOCAB))
    assert refusal(other, target_hidden=HIDDEN * 2) == f"hidden_size is {HIDDEN}, expected {HIDDEN * 2} for this target"


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", head_facts(draft_vocab=VOCAB + 1), published(draft_vocab=VOCAB + 1))
    assert refusal(folder) == f"draft vocabulary {VOCAB + 1} exceeds the target's {VOCAB}"


def test_without_target_hidden_size_it_is_the_heads_own() -> None:
    facts = head_facts()
    del facts["target_hidden_size"]
    config = Eagle3Config.from_dict(facts)
    assert (config.target_hidden_size, config.llama.max_position_embeddings) == (HIDDEN, CONTEXT)


def test_a_head_with_its_own_embedding_uses_it(tmp_path: Path) -> None:
    own = torch.randn(VOCAB, HIDDEN)
    given = load(write(tmp_path / "given", head_facts(), {**published(draft_vocab=VOCAB), "embed_tokens.weight": own}))
    lacks = load(write(tmp_path / "lacks", head_facts(), published(draft_vocab=VOCAB)))
    features, other = torch.randn(3, 3 * HIDDEN), torch.randn(VOCAB, HIDDEN)
    trees = []
    for head, embedding in ((given, other), (lacks, own), (lacks, other)):
        session = DrafterSession(head, embedding, 30)
        session.extend([3, 9, 27], features)
        trees.append(session.draft(27, 3, 2))
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].probs.tolist() == pytest.approx(trees[1].probs.tolist())
    assert trees[0].probs.tolist() != pytest.approx(trees[2].probs.tolist())


def test_an_embedding_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = {**published(draft_vocab=VOCAB), "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN + 1)}
    assert "the shape of embed_tokens.weight is" in refusal(write(tmp_path / "head", head_facts(), tensors))


def test_a_head_with_its_own_embedding_may_be_of_another_width_than_the_target(tmp_path: Path) -> None:
    wide = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "fc.weight": torch.randn(HIDDEN, 3 * 2 * HIDDEN)}
    facts = head_facts(target_hidden_size=2 * HIDDEN)
    head = load(write(tmp_path / "head", facts, {**published(draft_vocab=VOCAB), **wide}), target_hidden=2 * HIDDEN)
    session = DrafterSession(head, torch.full((VOCAB, 2 * HIDDEN), torch.nan), 30)
    session.extend([3, 4], torch.randn(2, 6 * HIDDEN))
    assert session.draft(4, 2, 2).size == 7
