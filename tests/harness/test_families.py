"""Every family of targets, from a checkpoint on disk: a tree is verified as its paths are decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import (
    CONTEXT,
    DENSE,
    EXPERTS,
    FAMILIES,
    HIDDEN,
    REFUSED,
    VOCAB,
    WINDOW,
    WINDOWED,
    WORKING,
    family_config,
    family_model,
    write_family,
)
from tiny_models import path_to, random_selection, random_tokens, random_tree, run_ar, run_speculative, tiny_head
from transformers import AutoModelForCausalLM

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling
from ecospec.harness.decoding import Speculation
from ecospec.harness.loading import load_target, target_view
from ecospec.harness.target import Target
from ecospec.harness.target_batch import TargetBatch
from ecospec.policies.builtin import Confidence

TOLERANCE = 1e-4
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {family: write_family(base / family, family) for family in FAMILIES}


def target_of(folder: Path) -> Target:
    return load_target(str(folder), dtype=torch.float32, device="cpu", feature_layers=(0, 1, 3)).target


@pytest.mark.parametrize("family", FAMILIES)
def test_it_lies_on_disk_in_several_shards(folders: dict[str, Path], family: str) -> None:
    index = json.loads((folders[family] / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2


@pytest.mark.parametrize("family", WORKING)
def test_a_verified_tree_equals_decoding_each_of_its_paths(folders: dict[str, Path], family: str) -> None:
    target, rng = target_of(folders[family]), np.random.default_rng(0)
    for length in LENGTHS:
        prompt, tree = random_tokens(rng, length, VOCAB), random_tree(rng, 9, VOCAB)
        session = target.new_session(length + 20)
        session.prefill(prompt)
        verified = session.verify(tree, np.arange(tree.size))
        for node in range(tree.size):
            alone = target.new_session(length + 20)
            alone.prefill(prompt)
            for token in tree.tokens[path_to(tree, node)].tolist():
                decoded = alone.decode(token)
            torch.testing.assert_close(verified.logits[node], decoded.logits[-1], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(verified.features[node], decoded.features[-1], atol=TOLERANCE, rtol=1e-4)
            assert torch.equal(verified.routing[:, node].sort(-1).values, decoded.routing[:, 0].sort(-1).values)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_shorter_than_a_tree(window: int) -> None:
    """Most of a tree's nodes then do not see the root."""
    model = family_model("mixtral", sliding_window=window)
    target, rng = Target(model), np.random.default_rng(8)
    prompt, tree = random_tokens(rng, 20, VOCAB), random_tree(rng, 12, VOCAB)
    session = target.new_session(60)
    session.prefill(prompt)
    verified = session.verify(tree, np.arange(tree.size))
    for node in range(tree.size):
        path = [int(token) for token in tree.tokens[path_to(tree, node)]]
        whole = target.new_session(60).prefill([*prompt, *path])
        torch.testing.assert_close(verified.logits[node], whole.logits[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", WORKING)
def test_half_precision_is_near_single_precision(folders: dict[str, Path], family: str) -> None:
    half = load_target(str(folders[family]), dtype=torch.bfloat16, device="cpu").target
    tokens = random_tokens(np.random.default_rng(6), WINDOW + 4, VOCAB)
    tree = random_tree(np.random.default_rng(7), 4, VOCAB)
    one, other = half.new_session(60), target_of(folders[family]).new_session(60)
    found, exact = one.prefill(tokens).logits[-1], other.prefill(tokens).logits[-1]
    assert torch.corrcoef(torch.stack((found, exact)))[0, 1] > 0.9
    assert one.verify(tree, np.arange(tree.size)).logits.isfinite().all()


def plain_pass(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and experts [L, n, K] of the library's own model over a whole sequence, without our adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    noted: list[torch.Tensor] = []
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Llama4Router":  # its experts are not told who is routed to them
            module.register_forward_hook(lambda module, args, out: noted.append(out[1].topk(module.top_k).indices))
        elif kind.endswith("Experts") and kind != "Llama4TextExperts":
            module.register_forward_pre_hook(lambda module, args: noted.append(args[1]))
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits, torch.stack(noted) if noted else torch.empty(0)


@pytest.mark.parametrize("family", WORKING)
def test_decoding_equals_one_pass_of_the_library(folders: dict[str, Path], family: str) -> None:
    target = target_of(folders[family])
    tokens = random_tokens(np.random.default_rng(1), 3 * WINDOW, VOCAB)
    logits, routing = plain_pass(folders[family], tokens)
    session = target.new_session(len(tokens))
    begin = len(tokens) - 12
    first = session.prefill(tokens[:begin])
    torch.testing.assert_close(first.logits[-1], logits[begin - 1], atol=TOLERANCE, rtol=0)
    found = [first.routing]
    for place in range(begin, len(tokens)):
        step = session.decode(tokens[place])
        found.append(step.routing)
        torch.testing.assert_close(step.logits[-1], logits[place], atol=TOLERANCE, rtol=0)
    if family not in DENSE:
        assert torch.equal(torch.cat(found, dim=1).sort(-1).values, routing.sort(-1).values)


@pytest.mark.parametrize("family", WORKING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_speculative_steps_are_plain_decoding(
    folders: dict[str, Path], family: str, temperature: float
) -> None:
    target = target_of(folders[family])
    head = tiny_head(target_vocab=VOCAB, max_position_embeddings=CONTEXT)
    target.read_features((0, 1, 2))
    method = Speculation(Confidence(), head, 4, 3, 2)
    prompt = random_tokens(np.random.default_rng(2), 7, VOCAB)
    sampling = Sampling(temperature=temperature, seed=3)
    expected = run_ar(target, prompt, sampling, n=400)
    generation = run_speculative(target, method, prompt, sampling, n=400)
    assert generation.tokens == expected.tokens
    assert len(generation.steps) >= 200
    assert len(set(generation.tokens)) > 2


@pytest.mark.parametrize("family", WINDOWED)
def test_rejected_nodes_leave_nothing_behind_beyond_the_window(folders: dict[str, Path], family: str) -> None:
    """After each verification only some path is kept, over several windows; a fresh memory gives the same."""
    target, rng = target_of(folders[family]), np.random.default_rng(4)
    kept = random_tokens(rng, 6, VOCAB)
    session = target.new_session(200)
    session.prefill(kept)
    while len(kept) < 3 * WINDOW:
        tree = random_tree(rng, 8, VOCAB)
        nodes = random_selection(rng, tree, 6)
        session.verify(tree, nodes)
        path = path_to(tree, int(rng.choice(nodes)))
        session.commit([int(np.flatnonzero(nodes == node)[0]) for node in path])
        kept += tree.tokens[path].tolist()
        fresh = target.new_session(200)
        fresh.prefill(kept)
        following = random_tree(rng, 5, VOCAB)
        one, other = (each.verify(following, np.arange(5)) for each in (session, fresh))
        torch.testing.assert_close(one.logits, other.logits, atol=TOLERANCE, rtol=0)
        assert torch.equal(one.routing.sort(-1).values, other.routing.sort(-1).values)


@pytest.mark.parametrize("family", WORKING)
def test_requests_of_several_lengths_in_one_pass_equal_each_alone(folders: dict[str, Path], family: str) -> None:
    target, rng = target_of(folders[family]), np.random.default_rng(5)
    prompts = [random_tokens(rng, length, VOCAB) for length in (3 * WINDOW, 4, WINDOW + 2)]
    trees = [random_tree(rng, size, VOCAB) for size in (7, 3, 9)]
    batch = TargetBatch(target, [80, 80, 80])
    singles = [target.new_session(80) for _ in prompts]
    for session, single, prompt in zip(batch.sessions, singles, prompts, strict=True):
        session.prefill(prompt)
        single.prefill(prompt)
    for gone in (None, 1):
        if gone is not None:
            batch.leave(gone)
            del singles[gone], trees[gone]
        tokens = random_tokens(rng, len(singles), VOCAB)
        decoded = batch.decode(tokens).parts()
        for part, single, token in zip(decoded, singles, tokens, strict=True):
            torch.testing.assert_close(part.logits, single.decode(token).logits, atol=TOLERANCE, rtol=0)
        nodes = [np.arange(tree.size) for tree in trees]
        parts = batch.verify(trees, nodes).parts()
        for part, single, tree in zip(parts, singles, trees, strict=True):
            alone = single.verify(tree, np.arange(tree.size))
            torch.testing.assert_close(part.logits, alone.logits, atol=TOLERANCE, rtol=0)
            assert torch.equal(part.routing.sort(-1).values, alone.routing.sort(-1).values)
        batch.commit([[0]] * len(singles))
        for single in singles:
            single.commit([0])


def test_what_a_family_declares_is_what_is_counted(folders: dict[str, Path]) -> None:
    def facts(family: str) -> tuple[int, ...]:
        geometry = target_of(folders[family]).geometry
        return geometry.moe_layers, geometry.experts, geometry.top_k, geometry.expert_bytes

    plain = 3 * HIDDEN * 16 * 4
    assert facts("qwen2_moe") == (3, EXPERTS, 2, plain)  # the first layer is dense
    assert facts("deepseek_v3") == (3, EXPERTS, 2, plain)  # so is this one's; the shared expert is not counted
    assert facts("llama4_text") == (2, EXPERTS, 2, plain)  # every second layer
    assert facts("gpt_oss") == (4, EXPERTS, 4, plain + (2 * 16 + HIDDEN) * 4)  # with biases
    assert facts("llama") == (0, 0, 0, 0)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_by_name(folders: dict[str, Path], family: str) -> None:
    with pytest.raises(UserError, match=r"Qwen3NextForCausalLM has linear_attention layers: .* running state"):
        target_of(folders[family])


def test_experts_out_of_reach_are_no_dense_model() -> None:
    model: Any = AutoModelForCausalLM.from_config(family_config("llama"))
    model.config.num_local_experts = 8
    with pytest.raises(UserError, match="LlamaForCausalLM has 8 experts, and not behind the transformers experts"):
        Target(model)


def test_layers_that_attend_some_other_way_are_refused() -> None:
    model: Any = AutoModelForCausalLM.from_config(family_config("mixtral"), attn_implementation="eager")
    attention = model.model.layers[2].self_attn
    plain = attention.forward

    def copying(*args: Any, attention_mask: torch.Tensor | None, **kwargs: Any) -> Any:
        return plain(*args, attention_mask=None if attention_mask is None else attention_mask.clone(), **kwargs)

    attention.forward = copying
    with pytest.raises(UserError, match=r"MixtralForCausalLM: of its 4 layers 3 attend to a draft tree through"):
        Target(model)


def test_a_dense_target_has_no_experts_to_predict(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="a predictor needs a target with experts, and LlamaForCausalLM is dense"):
        target_view(target_of(folders["llama"]))


def test_a_model_that_sees_both_ways_is_refused() -> None:
    model = family_model("mixtral")
    model.config.use_bidirectional_attention = True
    with pytest.raises(UserError, match="MixtralForCausalLM is bidirectional"):
        Target(model)


def test_a_window_of_no_token_is_refused() -> None:
    with pytest.raises(UserError, match="a sliding window of no token"):
        Target(family_model("mixtral", sliding_window=0))


def test_a_target_whose_logits_are_no_numbers_is_refused() -> None:
    model = family_model("mixtral")
    model.model.norm.weight.data.fill_(float("nan"))
    target = Target(model, feature_layers=(0, 1, 2))
    with pytest.raises(UserError, match="the target's logits are not numbers"):
        run_ar(target, [1, 2, 3], n=4)
    head = tiny_head(target_vocab=VOCAB, max_position_embeddings=CONTEXT)
    with pytest.raises(UserError, match="the target's logits are not numbers"):
        run_speculative(target, Speculation(Confidence(), head, 4, 3, 2), [1, 2, 3], n=4)
