"""Backbones of any architecture: right in tree passes, made again from their folder alone, or refused by name."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_backbones import VOCAB, WIDTH, WORKING, library_states, write_backbone
from tiny_models import CONTEXT, asked, path_to, random_tokens, random_tree, tiny_target, trees

from ecospec.errors import UserError
from ecospec.harness.loading import target_view
from ecospec.predictors.backbone import (
    UnusableBackboneError,
    backbone_config,
    build,
    check_tree_passes,
    load_pretrained,
    read_config,
)
from ecospec.predictors.contract import TargetView
from ecospec.predictors.kv_cache import SlotCache, tree_mask
from ecospec.predictors.learned import BoundLearned, ExpertPredictor, load_learned, save_learned

PROMPT = random_tokens(np.random.default_rng(0), 6)


@pytest.fixture(scope="module")
def view() -> TargetView:
    return target_view(tiny_target())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, written once."""
    base = tmp_path_factory.mktemp("backbones")

    @functools.cache
    def folder(family: str) -> Path:
        return write_backbone(base / family, family)

    return folder


def predictor_on(folder: Path, view: TargetView) -> BoundLearned:
    torch.manual_seed(3)
    model = ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, load_pretrained(str(folder), CONTEXT))
    for layer in (model.projection, model.head):
        torch.nn.init.normal_(layer.weight, std=0.4)
    for parameter in model.parameters():  # to what its file can hold
        parameter.data = parameter.data.bfloat16().float()
    return BoundLearned(model.eval().requires_grad_(False), view)


@torch.no_grad()
def by_the_library(bound: BoundLearned, folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [L, E] of the last token, from the library's eager attention over the whole sequence."""
    inputs = bound.model.projection(bound.target.embedding[tokens][None])
    found = bound.model.head(library_states(folder, inputs)[0, -1])
    return found.view(bound.target.moe_layers, bound.target.experts)


def rounded(folder: Path, family: str, tmp_path: Path) -> Path:
    """The checkpoint with its weights as the predictor's file holds them."""
    copy = tmp_path / f"{family}-rounded"
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    save_file({name: t.bfloat16().float() for name, t in load_file(path).items()}, path, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("family", WORKING)
def test_tree_passes_alone_and_packed_equal_the_librarys_own_pass_over_every_path(
    folders: Callable[[str], Path], view: TargetView, tmp_path: Path, family: str
) -> None:
    folder = rounded(folders(family), family, tmp_path)
    bound, other = predictor_on(folder, view), PROMPT[:2]
    session = bound.start(asked(PROMPT, CONTEXT))
    batch = bound.start_batch([asked(PROMPT, CONTEXT), asked(other, CONTEXT)])
    kept: list[int] = []
    for number, (tree, _) in enumerate(trees(seed=1, count=3, largest=7)):
        cache = SlotCache(bound.model.layers, CONTEXT)
        sequence = [*PROMPT, *kept]
        with torch.inference_mode():
            bound.model(view.embedding[sequence][None], cache=cache)
            cache.advance(len(sequence))
            logits = bound.model(
                view.embedding[tree.tokens.tolist()][None],
                cache=cache,
                positions=torch.tensor(tree.depths + cache.length)[None],
                mask=tree_mask(torch.tensor(tree.ancestors), cache.length),
            )[0]
        alone, packed = session.predict(tree), batch.predict([tree, tree])
        for node in range(tree.size):
            path = [int(t) for t in tree.tokens[path_to(tree, node)]]
            expected = by_the_library(bound, folder, [*sequence, *path])
            torch.testing.assert_close(logits[node], expected, atol=1e-3, rtol=1e-4)
            best = np.sort(expected.topk(view.top_k, -1).indices.numpy(), -1)
            assert np.array_equal(np.sort(alone[:, node], -1), best)
            assert np.array_equal(np.sort(packed[0][:, node], -1), best)
            behind = by_the_library(bound, folder, [*other, *kept, *path]).topk(view.top_k, -1).indices.numpy()
            assert np.array_equal(np.sort(packed[1][:, node], -1), np.sort(behind, -1))
        nodes = path_to(tree, (number + 3) % tree.size)
        session.commit(nodes)
        batch.commit([nodes, nodes])
        kept += [int(t) for t in tree.tokens[nodes]]


@pytest.mark.parametrize("family", WORKING)
def test_a_saved_predictor_is_made_again_from_its_folder_alone(view: TargetView, tmp_path: Path, family: str) -> None:
    folder = write_backbone(tmp_path / "pretrained", family)
    bound = predictor_on(folder, view)
    shutil.rmtree(folder)
    save_learned(tmp_path / "learned", bound.model, view)
    loaded = load_learned(tmp_path / "learned", view)
    ids = torch.tensor([random_tokens(np.random.default_rng(1), 9)])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(view.embedding[ids]), bound.model(view.embedding[ids]))
    tree = random_tree(np.random.default_rng(2), 6)
    ours, theirs = (each.start(asked(PROMPT, CONTEXT)).predict(tree) for each in (loaded, bound))
    assert np.array_equal(np.sort(ours, -1), np.sort(theirs, -1))
    text = (tmp_path / "learned" / "config.json").read_text()
    described = json.loads(text)["backbone"]
    assert (described["model_type"], described["vocab_size"]) == (family, 1)
    assert {described[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {None}
    assert str(tmp_path) not in text
    saved = load_file(tmp_path / "learned" / "model.safetensors")
    assert {tuple(t.shape) for t in saved.values()}.isdisjoint({(1, WIDTH), (VOCAB, WIDTH)})
    assert len(saved) == len(bound.model.state_dict()) - 1


def test_a_description_without_a_type_is_a_llamas(view: TargetView, tmp_path: Path) -> None:
    backbone = backbone_config(16, 2, 2, CONTEXT)
    model = ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, backbone)
    save_learned(tmp_path, model, view)
    config = json.loads((tmp_path / "config.json").read_text())
    del backbone["model_type"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "backbone": backbone}))
    assert type(load_learned(tmp_path, view).model.backbone).__name__ == "LlamaModel"


def test_dropout_stays_off_in_training(folders: Callable[[str], Path], view: TargetView) -> None:
    model = predictor_on(folders("gpt2"), view).model.train()
    assert model.backbone.config.resid_pdrop == 0.1
    inputs = view.embedding[torch.tensor([PROMPT])]
    assert torch.equal(model(inputs), model(inputs))
    assert model.head.training


def test_what_a_backbone_has_no_positions_for_is_refused(view: TargetView, tmp_path: Path) -> None:
    bound = predictor_on(write_backbone(tmp_path / "short", "gpt2", positions=8), view)

    def start(prompt: list[int]) -> Any:
        return bound.start(asked(prompt, CONTEXT))

    said = r"reads at most 8 tokens, and a prompt with its output has come to 9; expected shorter ones"
    with pytest.raises(UserError, match=said):
        start([1] * 9)
    tree = random_tree(np.random.default_rng(0), 1)
    start([1] * 7).predict(tree)
    with pytest.raises(UserError, match=said):
        start([1] * 8).predict(tree)
    batch = bound.start_batch([asked([1] * 8, CONTEXT), asked([1], CONTEXT)])
    with pytest.raises(UserError, match=said):
        batch.predict([tree, tree])


# --- what is refused


def refusal(folder: Path | str, context: int = CONTEXT) -> str:
    with pytest.raises(UserError) as caught:
        load_pretrained(str(folder), context)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"--backbone {folder}: ")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mistral", {"sliding_window": 16}, "it has a sliding window of 16 tokens under a context of 96"),
        ("bloom", {}, "of the 2 layers of bloom 0 attend through the library's attention functions"),
        ("bert", {}, "in bert a token sees those behind it; expected a decoder-only causal LM"),
        ("opt", {"word_embed_proj_dim": 8}, "its embeddings are 8 wide and its states 16; expected one width"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "it has dynamic positions, whose scale depends on the longest row of a pass",
        ),
    ],
)
def test_an_architecture_that_cannot_work_is_named(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    assert refusal(write_backbone(tmp_path / family, family, **changes)).startswith(said)


def test_a_window_as_long_as_the_targets_context_is_none(tmp_path: Path) -> None:
    folder = write_backbone(tmp_path / "mistral", "mistral", sliding_window=16, positions=64)
    assert load_pretrained(str(folder), 16).config.sliding_window == 16
    assert "a sliding window of 16 tokens under a context of 17" in refusal(folder, 17)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder; expected a decoder-only causal LM"),
        ({"model_type": "vit"}, "vit is no causal LM of the library; expected a decoder-only causal LM"),
        ({"model_type": "gemma3"}, "gemma3 has other parts than a text decoder"),
        ({"model_type": "mamba"}, "it has linear_attention layers, which cannot take a draft tree"),
        ({"model_type": "rwkv"}, "rwkv keeps a running state, which cannot take a draft tree"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "its weights are quantised",
        ),
        ({"model_type": "llama"}, "not loadable as a causal LM ("),
        ({"model_type": "no-such"}, "not loadable as a causal LM ("),
        ({}, "not loadable as a causal LM ("),
        ("[1", "not loadable as a causal LM ("),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path: Path, config: object, said: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    assert refusal(tmp_path).startswith(said)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "it runs code of its own, which is never done here" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "no config.json; expected a transformers checkpoint folder"
    assert refusal(tmp_path / "none").startswith("no such folder; expected a transformers checkpoint folder or a hub")
    assert refusal("no-such-model-on-the-hub").startswith("not loadable as a causal LM (")
    folder = write_backbone(tmp_path / "part", "llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    wide = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, wide: torch.zeros(3, WIDTH)}, path, metadata={"format": "pt"})
    assert refusal(folder) == "tensor layers.1.mlp.up_proj.weight has shape (3, 16), expected (24, 16)"
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert refusal(folder) == ("the checkpoint lacks norm.weight, and 0 more tensors; expected all of the model's")
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(folder).startswith("not loadable as a causal LM (")


def test_a_saved_predictor_whose_backbone_cannot_work_is_refused(view: TargetView, tmp_path: Path) -> None:
    bert = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    bert |= {"vocab_size": 1, "pad_token_id": None}
    model = ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, bert)
    save_learned(tmp_path, model, view)

    def said() -> str:
        with pytest.raises(UserError) as caught:
            load_learned(tmp_path, view)
        return str(caught.value).removeprefix(f"predictor {tmp_path}: its backbone cannot be used: ")

    assert said() == "in bert a token sees those behind it; expected a decoder-only causal LM"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "backbone": {**bert, "model_type": "mamba"}}))
    assert said().startswith("it has linear_attention layers")


@pytest.mark.parametrize("lost", ["position_ids", "attention_mask"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_takes_no_heed_of_the_tree_is_found_out(lost: str, family: str, tmp_path: Path) -> None:
    """With weights as small as the library draws them, where a token more in sight makes the least difference."""
    sizes = backbone_config(32, 2, 2, CONTEXT) if family == "llama" else {"n_embd": 32, "n_head": 2, "n_layer": 2}
    torch.manual_seed(0)
    model = build(read_config({**sizes, "model_type": family, "vocab_size": 1, "pad_token_id": None}))
    check_tree_passes(model)
    real = model.forward

    @functools.wraps(real)
    def heedless(**given: Any) -> Any:
        return real(**{**given, lost: None})

    model.forward = heedless
    with pytest.raises(UnusableBackboneError):
        check_tree_passes(model)
