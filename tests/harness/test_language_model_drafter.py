"""A small causal LM as a drafter: its trees against the library's own passes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_deepseek import tiny_tokenizer
from tiny_language_models import write_language_model
from tiny_models import path_to, random_tokens, rule_for, tiny_target
from transformers import AutoModelForCausalLM

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Generation, Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.drafters.builtin import LanguageModel
from ecospec.harness.drafters.contract import BoundDrafter
from ecospec.harness.drafters.loading import load_drafter
from ecospec.harness.loading import LoadedTarget
from ecospec.policies import Confidence, DraftTree

VOCAB, CONTEXT = 320, 200
FAMILIES = ("llama", "qwen3", "gemma", "gpt2", "opt")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    target = tiny_target(vocab_size=VOCAB, feature_layers=(), max_position_embeddings=CONTEXT)
    return LoadedTarget(
        target, tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB), "target", 1, Path("target")
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_language_model(root / family, VOCAB, family) for family in FAMILIES}


def bound(loaded: LoadedTarget, folder: Path) -> BoundDrafter:
    return load_drafter(LanguageModel(folder), loaded, None)


def no_features(count: int) -> torch.Tensor:
    return torch.zeros(count, 0)


@torch.no_grad()
def brute_force(model: Any, text: list[int], steps: int, top_k: int) -> dict[tuple[int, ...], float]:
    """Paths below the root with the probability of their last token, each by a pass of its own over everything."""
    paths: dict[tuple[int, ...], float] = {}
    beam: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(steps):
        grown = []
        for path, likelihood in beam:
            probs = model(input_ids=torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1].softmax(-1)
            best = probs.topk(top_k)
            for prob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                paths[(*path, token)] = prob
                grown.append(((*path, token), likelihood * prob))
        beam = sorted(grown, key=lambda entry: -entry[1])[:top_k]
    return paths


def assert_is(tree: DraftTree, expected: dict[tuple[int, ...], float]) -> None:
    tokens = tree.tokens.tolist()
    found = {tuple(tokens[n] for n in path_to(tree, node)[1:]): float(tree.probs[node]) for node in range(1, tree.size)}
    assert set(found) == set(expected)
    assert len(found) == tree.size - 1
    for path, prob in expected.items():
        assert found[path] == pytest.approx(prob, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_trees_hold_the_likeliest_paths_by_its_own_softmax(
    family: str, loaded: LoadedTarget, folders: dict[str, Path]
) -> None:
    """Prompt, tree, what was emitted, tree again: nothing drafted stays, and the batch is as each alone."""
    library = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    drafter, rng = bound(loaded, folders[family]), np.random.default_rng(1)
    texts = [random_tokens(rng, n, VOCAB) for n in (2, 9, 5)]
    batch = drafter.open([60] * 3)
    singles = [drafter.open([60]) for _ in texts]
    for i, text in enumerate(texts):
        for opened, index in ((batch, i), (singles[i], 0)):
            opened.start(index, text, no_features(len(text) - 1))
    for counts in ((1, 4, 2), (3, 1, 1)):
        trees = batch.draft([text[-1] for text in texts], [3, 2, 3], 2)
        for text, tree, depth, single in zip(texts, trees, (3, 2, 3), singles, strict=True):
            assert_is(tree, brute_force(library, text, depth, 2))
            assert_is(single.draft([text[-1]], [depth], 2)[0], brute_force(library, text, depth, 2))
        blocks = [random_tokens(rng, count, VOCAB) for count in counts]
        batch.extend(blocks, [no_features(count) for count in counts])
        for single, block, text in zip(singles, blocks, texts, strict=True):
            single.extend([block], [no_features(len(block))])
            text += block
    batch.leave(1)
    del texts[1]
    batch.extend([[7, 8], [9]], [no_features(2), no_features(1)])
    texts[0] += [7, 8]
    texts[1] += [9]
    batch.leave(0)
    batch.extend([[3, 4]], [no_features(2)])
    texts[1] += [3, 4]
    assert_is(batch.draft([4], [3], 2)[0], brute_force(library, texts[1], 3, 2))


def decoded(loaded: LoadedTarget, method: Speculation | None, sampling: Sampling) -> list[Generation]:
    prompts = [random_tokens(np.random.default_rng(i), n, VOCAB) for i, n in enumerate((1, 6, 14))]
    streams = []
    for prompt, count in zip(prompts, (64, 30, 80), strict=True):
        rule = rule_for(prompt, count, context=CONTEXT)
        rule.tokenizer = loaded.tokenizer
        streams.append(Stream(prompt, TokenChooser(sampling, "r"), rule))
    if method is None:
        return [decode_ar_batch(loaded.target, [stream])[0] for stream in streams]
    return decode_speculative_batch(loaded.target, method, streams)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_the_output_is_plain_decodings(loaded: LoadedTarget, folders: dict[str, Path], sampling: Sampling) -> None:
    method = Speculation(Confidence(), bound(loaded, folders["llama"]), 4, 3, 2, drafter_name="lm")
    plain = decoded(loaded, None, sampling)
    for ours, theirs in zip(decoded(loaded, method, sampling), plain, strict=True):
        assert ours.tokens == theirs.tokens
    assert sum(len(each.tokens) for each in plain) > 150


def refusal(loaded: LoadedTarget, folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        bound(loaded, folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_another_vocabulary_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
    small = write_language_model(tmp_path / "small", 300)
    assert "its vocabulary has 300 tokens, the target's 320" in refusal(loaded, small)
    other = write_language_model(tmp_path / "other", VOCAB)
    raw = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    ids = raw["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (other / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    said = refusal(loaded, other)
    assert f"another vocabulary than the target's: 'A' is id {ids['A']}, in the target's id {ids['B']}" in said


def test_what_is_no_model_or_takes_no_tree_is_refused(
    loaded: LoadedTarget, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert "no such folder" in refusal(loaded, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(loaded, tmp_path / "empty")
    bloom = write_language_model(tmp_path / "bloom", VOCAB, "bloom")
    assert "bloom" in refusal(loaded, bloom)
    window = write_language_model(tmp_path / "window", VOCAB, "mistral", sliding_window=16)
    assert "it has a sliding window of 16 tokens under a context of 200" in refusal(loaded, window)
    bare = write_language_model(tmp_path / "bare", VOCAB)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert refusal(loaded, bare).startswith(f"drafter 'lm': {bare}: ")


def test_a_text_longer_than_it_can_read_ends_in_one_line(loaded: LoadedTarget, tmp_path: Path) -> None:
    short = write_language_model(tmp_path / "short", VOCAB, positions=32)
    method = Speculation(Confidence(), bound(loaded, short), 4, 3, 2, drafter_name="lm")
    with pytest.raises(UserError, match=r"drafter 'lm': .* reads at most 32 tokens, and a prompt with its output"):
        decoded(loaded, method, Sampling())
