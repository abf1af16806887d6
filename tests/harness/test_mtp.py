"""The multi-token-prediction layer against a transcription of its forward pass, and what is refused about its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_deepseek as tiny
import torch
from mtp_written_out import YARN, transcription
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens, tiny_target
from torch import Tensor

import ecospec.harness.drafting as drafting
from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.drafters.builtin import Mtp
from ecospec.harness.drafters.heads import BoundHead
from ecospec.harness.drafters.loading import load_drafter
from ecospec.harness.drafters.mtp_files import dequantised
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.loading import LoadedTarget, load_target
from ecospec.harness.stopping import StopRule
from ecospec.policies import Confidence

P = tiny.PREFIX


@pytest.fixture(scope="module")
def tensors() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return tiny.deepseek_tensors()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tensors: tuple[dict[str, Any], dict[str, Tensor]]) -> LoadedTarget:
    folder = tiny.write_shards(tmp_path_factory.mktemp("deepseek") / "target", *tensors)
    return load_target(str(folder), dtype=torch.float32, device="cpu")


def bound(loaded: LoadedTarget, path: Path | None = None) -> BoundHead:
    found = load_drafter(Mtp(path), loaded, None)
    assert isinstance(found, BoundHead)
    return found


def layer_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(P): tensor for name, tensor in tensors.items() if name.startswith(P)}


def chain(
    head: BoundHead, loaded: LoadedTarget, prompt: list[int], drafted: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Logits of three draft steps that are made to draft given tokens."""
    seen: list[Tensor] = []

    def forced(proposer: Any, states: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(proposer.logits(states)[0])
        return torch.zeros(1, 1), torch.tensor([[drafted[len(seen) - 1]]]), torch.zeros(1, 1)

    monkeypatch.setattr(drafting, "_top_children", forced)
    features = loaded.target.new_session(40).prefill(prompt).features
    session = DrafterSession(head.head, head.embedding, 40)
    session.extend([*prompt[1:], drafted[0]], features)
    session.draft(drafted[0], 3, 1)
    return seen


def expected_chain(
    layer: dict[str, Tensor],
    whole: dict[str, Tensor],
    loaded: LoadedTarget,
    prompt: list[int],
    drafted: list[int],
    yarn: bool = False,
) -> list[Tensor]:
    table = layer.get("embed_tokens.weight", whole["model.embed_tokens.weight"])
    head = layer.get("shared_head.head.weight", whole["lm_head.weight"])
    with torch.no_grad():  # the library's own last state
        hidden = loaded.target.model.model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        entries, found = [*prompt[1:], drafted[0]], []
        for step in range(3):
            state = transcription(layer, table[entries], hidden, yarn)[-1]
            found.append(state @ head.T)
            # draft step d is fed token d of the draft, with the layer's own state before it
            hidden = torch.cat((hidden, state[None]))
            entries = [*entries, drafted[step]]
    return found


@pytest.mark.parametrize("copies", ["equal", "absent", "different"])
def test_a_chain_of_three_steps_is_the_transcription_of_it(
    copies: str,
    loaded: LoadedTarget,
    tensors: tuple[dict[str, Any], dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, whole = tensors
    whole = dict(whole)
    torch.manual_seed(9)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        if copies == "absent":
            del whole[P + name]
        elif copies == "different":
            whole[P + name] = 0.25 * torch.randn(tiny.VOCAB, tiny.HIDDEN)
    drafter = bound(loaded, tiny.write_shards(tmp_path / "layer", raw, whole, shards=1 + 2 * (copies == "equal")))
    prompt = random_tokens(np.random.default_rng(3), 9, tiny.VOCAB)
    drafted = random_tokens(np.random.default_rng(4), 3, tiny.VOCAB)
    found = chain(drafter, loaded, prompt, drafted, monkeypatch)
    expected = expected_chain(layer_of(whole), whole, loaded, prompt, drafted)
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (expected[1] - expected[0]).abs().max() > 0.5
    own = drafter.head.own_embedding
    assert (own is not None) == (copies == "different")  # an equal copy takes no memory


def test_stretched_positions_are_the_targets(
    tensors: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YaRN as published, with its factor on the attention scores."""
    folder = tiny.write_shards(tmp_path / "yarn", {**tensors[0], "rope_scaling": YARN}, tensors[1])
    stretched = load_target(str(folder), dtype=torch.float32, device="cpu")
    prompt = random_tokens(np.random.default_rng(3), 24, tiny.VOCAB)
    found = chain(bound(stretched), stretched, prompt, [5, 6, 7], monkeypatch)
    layer = layer_of(tensors[1])
    plain = expected_chain(layer, tensors[1], stretched, prompt, [5, 6, 7])
    for ours, theirs, other in zip(
        found, expected_chain(layer, tensors[1], stretched, prompt, [5, 6, 7], yarn=True), plain, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert (theirs - other).abs().max() > 1e-2


def test_the_targets_last_state_is_read_behind_its_final_norm(loaded: LoadedTarget) -> None:
    bound(loaded)
    prompt = random_tokens(np.random.default_rng(3), 9, tiny.VOCAB)
    features = loaded.target.new_session(20).prefill(prompt).features
    with torch.no_grad():
        logits = loaded.target.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(loaded.target.model.lm_head(features), logits, atol=1e-4, rtol=0)


def stream(loaded: LoadedTarget, prompt: list[int], sampling: Sampling, count: int) -> Stream:
    return Stream(prompt, TokenChooser(sampling, "r"), StopRule(loaded.tokenizer, count, frozenset(), ()))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_it_drafts_and_the_output_is_plain_decodings(loaded: LoadedTarget, sampling: Sampling) -> None:
    method = Speculation(Confidence(), bound(loaded), 4, 3, 2, drafter_name="mtp")
    prompts = [random_tokens(np.random.default_rng(i), n, tiny.VOCAB) for i, n in enumerate((1, 6, 20))]
    counts = [70, 90, 64]
    plain = [
        decode_ar_batch(loaded.target, [stream(loaded, p, sampling, n)])[0]
        for p, n in zip(prompts, counts, strict=True)
    ]
    alone = [
        decode_speculative_batch(loaded.target, method, [stream(loaded, p, sampling, n)])[0]
        for p, n in zip(prompts, counts, strict=True)
    ]
    streams = [stream(loaded, p, sampling, n) for p, n in zip(prompts, counts, strict=True)]
    together = decode_speculative_batch(loaded.target, method, streams)
    for ours, batched, theirs, count in zip(alone, together, plain, counts, strict=True):
        assert ours.tokens == theirs.tokens
        assert batched.tokens == theirs.tokens
        assert len(ours.tokens) == count
        assert [s.emitted for s in ours.steps] == [s.emitted for s in batched.steps]  # the same trees
    assert sum(len(each.steps) for each in alone) >= 60


def test_its_experts_are_not_counted_as_the_targets(loaded: LoadedTarget) -> None:
    drafter = bound(loaded)
    prompt = random_tokens(np.random.default_rng(5), 7, tiny.VOCAB)
    first = loaded.target.new_session(40).prefill(prompt)
    reported = list(loaded.target._tap.indices)
    batch = drafter.open([40])
    batch.start(0, [*prompt, 5], first.features)
    batch.draft([5], [3], 2)
    assert all(a is b for a, b in zip(loaded.target._tap.indices, reported, strict=True))
    assert loaded.target.geometry.moe_layers == tiny.LAYERS - 1
    assert not hasattr(drafter.head.block.mlp.experts, "_ecospec")  # type: ignore[attr-defined]


# --- FP8 blocks


@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (12, 9), (3, 2)])
def test_blocks_are_multiplied_by_their_scales(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    block = (4, 3)
    weight, scales = tiny.quantised(torch.randn(shape), block)
    found = dequantised(weight, scales, block)
    for i in range(shape[0]):
        for j in range(shape[1]):
            assert float(found[i, j]) == pytest.approx(float(weight[i, j].float() * scales[i // 4, j // 3]), rel=1e-6)


def test_an_fp8_layer_is_the_transcription_of_its_dequantised_weights(
    loaded: LoadedTarget,
    tensors: tuple[dict[str, Any], dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, whole = tensors
    stored, meant = dict(whole), dict(whole)
    for name, tensor in whole.items():
        if name.startswith(P) and tensor.dim() == 2 and "_proj" in name:
            fp8, scales = tiny.quantised(tensor, (128, 128))
            stored[name], stored[name.removesuffix(".weight") + ".weight_scale_inv"] = fp8, scales
            meant[name] = fp8.float() * scales  # smaller than a block
    assert sum(name.endswith("_scale_inv") for name in stored) > 3 * tiny.EXPERTS
    drafter = bound(loaded, tiny.write_shards(tmp_path / "fp8", raw, stored))
    prompt = random_tokens(np.random.default_rng(3), 9, tiny.VOCAB)
    found = chain(drafter, loaded, prompt, [5, 6, 7], monkeypatch)
    expected = expected_chain(layer_of(meant), whole, loaded, prompt, [5, 6, 7])
    unquantised = expected_chain(layer_of(whole), whole, loaded, prompt, [5, 6, 7])
    for ours, theirs, before in zip(found, expected, unquantised, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert (theirs - before).abs().max() > 1e-3


def test_in_bfloat16_the_router_stays_exact(loaded: LoadedTarget, tmp_path: Path) -> None:
    half = load_target(loaded.name, dtype=torch.bfloat16, device="cpu")
    drafter = bound(half)
    head: Any = drafter.head
    prompt = random_tokens(np.random.default_rng(5), 7, tiny.VOCAB)
    batch = drafter.open([40])
    batch.start(0, [*prompt, 5], half.target.new_session(40).prefill(prompt).features)
    assert batch.draft([5], [3], 2)[0].size == 11
    assert head.eh_proj.weight.dtype == torch.bfloat16
    assert head.block.mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert head.block.mlp.gate.e_score_correction_bias.dtype == torch.float32
    whole = load_file(next(Path(loaded.name).glob("*-00001-of-*.safetensors")))
    for part in sorted(Path(loaded.name).glob("*.safetensors")):
        whole |= load_file(part)
    assert torch.equal(head.block.mlp.gate.e_score_correction_bias, whole[P + "mlp.gate.e_score_correction_bias"])
    assert torch.equal(head.block.mlp.gate.weight, whole[P + "mlp.gate.weight"])


# --- what is refused


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(whole: dict[str, Tensor]) -> None:
        del whole[name]

    return change


def given(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(whole: dict[str, Tensor]) -> None:
        whole[name] = tensor

    return change


def no_layer(whole: dict[str, Tensor]) -> None:
    for name in [n for n in whole if n.startswith(P)]:
        del whole[name]


def otherwise_named(whole: dict[str, Tensor]) -> None:
    no_layer(whole)
    whole["mtp.fc.weight"] = torch.zeros(2, 2)


def lone_fp8(whole: dict[str, Tensor]) -> None:
    whole[P + "eh_proj.weight"] = tiny.quantised(whole[P + "eh_proj.weight"], (128, 128))[0]


def wrong_scales(whole: dict[str, Tensor]) -> None:
    lone_fp8(whole)
    whole[P + "eh_proj.weight_scale_inv"] = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(P + "eh_proj.weight"), f"tensor {P}eh_proj.weight has shape nothing, expected (32, 64)"),
        (without(P + "mlp.experts.5.up_proj.weight"), f"tensor {P}mlp.experts.5.up_proj.weight has shape nothing"),
        (without(P + "mlp.gate.e_score_correction_bias"), "e_score_correction_bias has shape nothing, expected (8,)"),
        (given(P + "hnorm.weight", torch.ones(31)), f"tensor {P}hnorm.weight has shape (31,), expected (32,)"),
        (
            given(P + "embed_tokens.weight", torch.ones(9, 32)),
            "embed_tokens.weight has shape (9, 32), expected (320, 32)",
        ),
        (
            given(P + "mlp.experts.8.up_proj.weight", torch.ones(12, 32)),
            f"tensor {P}mlp.experts.8.up_proj.weight has shape (12, 32), expected no such tensor",
        ),
        (given(P + "new.weight", torch.ones(2)), f"tensor {P}new.weight has shape (2,), expected no such tensor"),
        (given(P + "enorm.weight", torch.ones(32, dtype=torch.int32)), f"{P}enorm.weight is int32, expected float32"),
        (lone_fp8, f"tensor {P}eh_proj.weight is FP8, but there is no {P}eh_proj.weight_scale_inv"),
        (wrong_scales, f"tensor {P}eh_proj.weight_scale_inv has shape (2, 1), expected (1, 1)"),
        (given(P + "enorm.weight_scale_inv", torch.ones(1)), f"{P}enorm.weight_scale_inv belongs to no FP8 weight"),
        (no_layer, f"it has no multi-token-prediction layer (no tensor {P}*)"),
        (otherwise_named, "its layer is named mtp.*, as Qwen3-Next's; expected a DeepSeek-V3 checkpoint"),
    ],
)
def test_files_that_do_not_hold_the_layer_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], None],
    said: str,
    loaded: LoadedTarget,
    tensors: tuple[dict[str, Any], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    raw, whole = tensors[0], dict(tensors[1])
    change(whole)
    folder = tiny.write_shards(tmp_path / "layer", raw, whole)
    with pytest.raises(UserError) as refused:
        bound(loaded, folder)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"drafter 'mtp': {folder}: ")
    assert "\n" not in str(refused.value)


def test_the_layer_of_another_kind_of_model_is_refused(loaded: LoadedTarget) -> None:
    other = LoadedTarget(tiny_target(), None, "other", 1, Path("other"))
    with pytest.raises(
        UserError, match=r"a layer for a target of type 'deepseek_v3', and the target is of type 'qwen3_moe'"
    ):
        bound(other, Path(loaded.name))


def test_stored_rotary_frequencies_are_passed_over(
    loaded: LoadedTarget, tensors: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    whole = {**tensors[1], P + "self_attn.rotary_emb.inv_freq": torch.ones(4)}
    bound(loaded, tiny.write_shards(tmp_path / "layer", tensors[0], whole))


def test_a_single_file_without_an_index_is_read(
    loaded: LoadedTarget, tensors: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    save_file(tensors[1], tmp_path / "model.safetensors")
    head: Any = bound(loaded, tmp_path).head
    assert torch.equal(head.eh_proj.weight, tensors[1][P + "eh_proj.weight"])


def test_damaged_and_absent_files_are_named(
    loaded: LoadedTarget, tensors: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = tiny.write_shards(tmp_path / "layer", *tensors)
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors is not readable"):
        bound(loaded, folder)
    shard.unlink()
    with pytest.raises(UserError, match=r"no model-00002-of-00003.safetensors; model.safetensors.index.json names it"):
        bound(loaded, folder)
    (folder / "model.safetensors.index.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"model.safetensors.index.json is not readable"):
        bound(loaded, folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"no model.safetensors.index.json and no model.safetensors"):
        bound(loaded, folder)
