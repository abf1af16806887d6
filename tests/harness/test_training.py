"""Training, in miniature: three steps of each model give checkpoints that load and run together."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import asked, random_tree
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, decode_ar, decode_speculative
from ecospec.harness.eagle3_loading import load_eagle3
from ecospec.harness.loading import LoadedTarget, load_target, target_view
from ecospec.harness.stopping import StopRule
from ecospec.harness.training.corpus import Corpus, build_corpus
from ecospec.harness.training.drafter import DrafterRecipe, DrafterShape, draft_vocabulary, train_drafter
from ecospec.harness.training.experts import TRAIN_EXPERTS
from ecospec.harness.training.learners import PredictorShape
from ecospec.harness.training.own_text import FILE, own_text, real_tokens
from ecospec.harness.training.predictor import PredictorRecipe, train_predictor
from ecospec.harness.training.target import TargetRecipe, TargetShape, train_target
from ecospec.policies import MarginalCost
from ecospec.predictors.learned import load_learned
from ecospec.predictors.token_frequency import build_table, load_table
from ecospec.predictors.training import LoopConfig

SHAPE = TargetShape(
    vocab_size=280,
    hidden_size=32,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_size=16,
    context=64,
)
TARGET_RECIPE = TargetRecipe(steps=3, tokens_per_batch=128, short_window=32)
DRAFTER_SHAPE = DrafterShape(draft_vocab_size=40, intermediate_size=48, heads=2, kv_heads=1, feature_layers=(0, 1, 2))
DRAFTER_RECIPE = DrafterRecipe(steps=3, tokens_per_batch=128, window=32)
PREDICTOR_SHAPE = PredictorShape(width=16, layers=1, heads=2)
PREDICTOR_RECIPE = PredictorRecipe(steps=3, tokens_per_batch=128, window=32, table_batches=5)


@dataclass(frozen=True)
class Bench:
    """Everything trained once, and what the trainers returned."""

    corpus: Path
    folder: Path
    figures: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    corpus = folder / "corpus.jsonl"
    words = ["apples", "pears", "buys", "sells", "and", "then", "seven", "three"]
    rng = np.random.default_rng(0)
    with corpus.open("w") as file:
        for number in range(60):
            text = f"Problem {number}: " + " ".join(rng.choice(words, 30))
            file.write(json.dumps({"source": "toy", "license": "MIT", "text": text}) + "\n")
    target, drafter, predictor = (folder / part for part in ("target", "drafter", "predictor"))
    figures = {
        "target": train_target(corpus, target, shape=SHAPE, recipe=TARGET_RECIPE),
        "drafter": train_drafter(target, corpus, drafter, shape=DRAFTER_SHAPE, recipe=DRAFTER_RECIPE),
        "predictor": train_predictor(target, corpus, predictor, shape=PREDICTOR_SHAPE, recipe=PREDICTOR_RECIPE),
    }
    return Bench(corpus, folder, figures)


@pytest.fixture(scope="module")
def loaded(bench: Bench) -> LoadedTarget:
    return load_target(str(bench.folder / "target"), dtype=torch.float32, device="cpu", feature_layers=(0, 1, 2))


@pytest.mark.parametrize("part", ["target", "drafter", "predictor"])
def test_a_run_leaves_a_log_and_a_record_of_how_it_was_made(bench: Bench, part: str) -> None:
    folder = bench.folder / part
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) for row in rows)
    figures = bench.figures[part]
    assert figures["steps"] == 3
    assert any(key.startswith("held_out") for key in figures)
    record = json.loads((folder / "training.json").read_text())
    assert (record["kind"], record["figures"], record["recipe"]["steps"]) == (part, figures, 3)
    assert record["train_tokens_by_source"].keys() == {"toy"}
    assert len(record["corpus_sha256"]) == 64


def test_the_target_is_an_ordinary_checkpoint(loaded: LoadedTarget) -> None:
    geometry = loaded.target.geometry
    assert (geometry.moe_layers, geometry.experts, geometry.top_k, geometry.context) == (3, 8, 2, 64)
    assert geometry.vocab_size == SHAPE.vocab_size
    tokens = loaded.tokenizer("12 apples").input_ids
    assert loaded.tokenizer.decode(tokens) == "12 apples"
    assert loaded.tokenizer.convert_ids_to_tokens(tokens)[:2] == ["1", "2"]  # digits stay single
    assert loaded.tokenizer.eos_token_id == loaded.target.config.eos_token_id
    assert loaded.target.new_session(64).prefill(tokens).logits.isfinite().all()


def test_the_drafters_vocabulary_is_the_corpuss_commonest_ids(bench: Bench, loaded: LoadedTarget) -> None:
    head = load_head(bench, loaded)
    assert head.config.feature_layers == (0, 1, 2)
    corpus = build_corpus(bench.corpus, loaded.tokenizer, piece=64, seed=0)
    counts = np.bincount(corpus.train, minlength=SHAPE.vocab_size)
    expected = draft_vocabulary(counts, 40).tolist()
    assert head.to_target_ids(torch.arange(40)).tolist() == expected


def load_head(bench: Bench, loaded: LoadedTarget) -> Any:
    return load_eagle3(
        bench.folder / "drafter", target_vocab=SHAPE.vocab_size, target_hidden=32, target_layers=3
    ).requires_grad_(False)


def test_the_table_counts_the_routing_of_the_batches_it_names(bench: Bench, loaded: LoadedTarget) -> None:
    """More batches are counted than steps were trained: all five, however short the run."""
    corpus = build_corpus(bench.corpus, loaded.tokenizer, piece=64, seed=0)
    counts = np.zeros((SHAPE.vocab_size, 3, 8), dtype=np.int64)
    for step in range(5):
        ids = corpus.windows(4, 32, seed=PREDICTOR_RECIPE.seed, step=step)
        routing = loaded.target.teach(torch.from_numpy(ids))[2].numpy()
        for layer in range(3):
            for token, experts in zip(ids.flatten(), routing[layer], strict=True):
                for expert in experts:
                    counts[token, layer, expert] += 1
    table = load_table(bench.folder / "predictor" / "token-frequency", target_view(loaded.target)).table
    assert np.array_equal(table, build_table(counts, 2))


def test_the_trained_parts_run_together_and_leave_the_output_unchanged(bench: Bench, loaded: LoadedTarget) -> None:
    target, tokenizer = loaded.target, loaded.tokenizer
    predictor = load_learned(bench.folder / "predictor" / "learned", target_view(target))
    method = Speculation(MarginalCost(), load_head(bench, loaded), 4, 3, 2, predictor=predictor)
    prompt = tokenizer("Problem 7: Sam buys").input_ids
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        outputs = []
        for run in (decode_ar, lambda target, *args: decode_speculative(target, method, *args)):
            rule = StopRule(tokenizer, 20, frozenset([tokenizer.eos_token_id]), ("Problem",))
            outputs.append(run(target, prompt, TokenChooser(sampling, "r"), rule))
        assert outputs[0].tokens == outputs[1].tokens
        assert outputs[0].text == outputs[1].text
    routing = predictor.start(asked(prompt, 64)).predict(random_tree(np.random.default_rng(0), 5))
    assert routing.shape == (3, 5, 2)


@pytest.mark.parametrize("part", ["target", "drafter", "predictor"])
def test_a_finished_run_is_not_repeated(bench: Bench, part: str) -> None:
    folder, target = bench.folder / part, bench.folder / "target"
    runs: dict[str, Any] = {
        "target": lambda **more: train_target(bench.corpus, folder, shape=SHAPE, recipe=TARGET_RECIPE, **more),
        "drafter": lambda **more: train_drafter(
            target, bench.corpus, folder, shape=DRAFTER_SHAPE, recipe=DRAFTER_RECIPE, **more
        ),
        "predictor": lambda **more: train_predictor(
            target, bench.corpus, folder, shape=PREDICTOR_SHAPE, recipe=PREDICTOR_RECIPE, **more
        ),
    }
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    with pytest.raises(UserError, match="already holds a training run"):
        runs[part]()
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before
    runs[part](resume=True)
    assert len((folder / "log.jsonl").read_text().splitlines()) == 3
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before


def test_the_last_share_of_the_targets_run_sees_whole_contexts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    windows = Corpus.windows

    def spy(self: Corpus, count: int, length: int, **key: int) -> Any:
        seen.append((count, length))
        return windows(self, count, length, **key)

    monkeypatch.setattr(Corpus, "windows", spy)
    recipe = TargetRecipe(steps=4, tokens_per_batch=128, short_window=32, long_share=0.5)
    train_target(bench.corpus, tmp_path / "target", shape=SHAPE, recipe=recipe)
    assert seen == [(4, 32), (4, 32), (2, 64), (2, 64)]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(bench: Bench, tmp_path: Path) -> None:
    small = TargetShape(**{**vars(SHAPE), "vocab_size": 100})
    with pytest.raises(UserError, match="the tokenizer has 257 tokens, the target 100"):
        train_target(bench.corpus, tmp_path / "target", shape=small, recipe=TARGET_RECIPE)


def test_a_refused_training_leaves_what_is_there(bench: Bench, tmp_path: Path) -> None:
    """Another run's tokenizer is not written over before the refusal."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    (folder / "checkpoint.pt").write_text("mine")
    with pytest.raises(UserError, match="already holds a training run"):
        train_target(bench.corpus, folder, shape=SHAPE, recipe=TARGET_RECIPE)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "tokenizer.json": "mine",
        "checkpoint.pt": "mine",
    }


def test_a_corpus_too_small_to_hold_anything_out_is_refused(bench: Bench, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(bench.corpus.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(
        UserError,
        match="the corpus has 0 tokens in the 2% of its records that are held out, fewer than one window of 64",
    ):
        train_target(corpus, tmp_path / "target", shape=SHAPE, recipe=TARGET_RECIPE)


def test_experts_are_balanced_more_firmly_at_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coefficient of each step's auxiliary loss, read off the model when the step's batch is drawn."""
    import ecospec.harness.training.target as module

    built: list[Any] = []
    original = module.build_target
    monkeypatch.setattr(module, "build_target", lambda *a, **k: built.append(original(*a, **k)) or built[-1])
    used: list[float] = []
    forward = ALL_EXPERTS_FUNCTIONS[TRAIN_EXPERTS]

    def spy(*args: Any) -> Any:
        used.append(built[0].router_aux_loss_coef)
        return forward(*args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, TRAIN_EXPERTS, spy)
    recipe = TargetRecipe(
        steps=4, tokens_per_batch=64, short_window=32, aux_coefficient=0.5, aux_relaxed=0.25, balance_share=0.5
    )
    train_target(bench.corpus, tmp_path / "target", shape=SHAPE, recipe=recipe)
    per_step = SHAPE.layers
    assert used[: 4 * per_step] == [0.5] * 2 * per_step + [0.25] * 2 * per_step


# The target's own text

WINDOWS, LENGTH = 70, 24


def windows(bench: Bench, loaded: LoadedTarget, folder: Path, **changes: int) -> np.ndarray:
    corpus = build_corpus(bench.corpus, loaded.tokenizer, piece=SHAPE.context, seed=0)
    options = {"windows": WINDOWS, "length": LENGTH, "seed": 5, **changes}
    return own_text(loaded.target.model, corpus, folder, **options)


def test_a_window_is_a_real_beginning_and_what_the_target_goes_on_with(
    bench: Bench,
    loaded: LoadedTarget,
    tmp_path: Path,
) -> None:
    found = windows(bench, loaded, tmp_path)
    assert found.shape == (WINDOWS, LENGTH)
    real = real_tokens(LENGTH)
    assert 0 < real < LENGTH
    corpus = build_corpus(bench.corpus, loaded.tokenizer, piece=SHAPE.context, seed=0)
    assert np.array_equal(found[:64, :real], corpus.windows(64, real, seed=5, step=0))
    assert np.array_equal(found[64:, :real], corpus.windows(6, real, seed=5, step=64))
    for window in found[[0, 33, 69]].tolist():
        rule = StopRule(loaded.tokenizer, LENGTH - real, frozenset())
        assert decode_ar(loaded.target, window[:real], TokenChooser(Sampling(), "r"), rule).tokens == window[real:]


def test_the_text_is_written_once(bench: Bench, loaded: LoadedTarget, tmp_path: Path) -> None:
    found = windows(bench, loaded, tmp_path)
    assert np.array_equal(windows(bench, loaded, tmp_path, seed=6), found)  # read, not written anew
    with pytest.raises(UserError, match=rf"{FILE}: windows \(70, 24\), expected \(71, 24\); remove it"):
        windows(bench, loaded, tmp_path, windows=71)
    (tmp_path / FILE).write_bytes(b"no array")
    with pytest.raises(UserError, match=rf"{FILE}: not readable"):
        windows(bench, loaded, tmp_path)


def test_a_head_goes_on_from_another_with_its_vocabulary(
    bench: Bench,
    loaded: LoadedTarget,
    tmp_path: Path,
) -> None:
    start = bench.folder / "drafter"
    recipe = DrafterRecipe(
        **{**vars(DRAFTER_RECIPE), "steps": 1, "learning_rate": 1e-9, "own_text": 16, "start": str(start)}
    )
    shape = DrafterShape(feature_layers=(0, 1, 2))
    figures = train_drafter(bench.folder / "target", bench.corpus, tmp_path / "drafter", shape=shape, recipe=recipe)
    assert 0 <= figures["own_text_top1_0"] <= 1
    before = load_head(bench, loaded)
    after = load_head(Bench(bench.corpus, tmp_path, {}), loaded)
    assert torch.equal(before.d2t, after.d2t)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0, msg=name)


def test_a_head_that_reads_other_layers_is_refused(bench: Bench, tmp_path: Path) -> None:
    recipe = DrafterRecipe(**{**vars(DRAFTER_RECIPE), "start": str(bench.folder / "drafter")})
    shape = DrafterShape(feature_layers=(0, 0, 2))
    with pytest.raises(UserError, match=r"--start .*: it reads layers \(0, 1, 2\); expected \(0, 0, 2\)"):
        train_drafter(bench.folder / "target", bench.corpus, tmp_path / "drafter", shape=shape, recipe=recipe)
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("stopped_at", [1, 2])
def test_a_resumed_training_counts_the_table_of_an_unbroken_one(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int
) -> None:
    windows = Corpus.windows

    def stopping(self: Corpus, count: int, length: int, *, seed: int, step: int) -> Any:
        if step == stopped_at:
            raise InterruptedError
        return windows(self, count, length, seed=seed, step=step)

    def run(**more: Any) -> dict[str, Any]:
        return train_predictor(
            bench.folder / "target", bench.corpus, tmp_path, shape=PREDICTOR_SHAPE, recipe=PREDICTOR_RECIPE, **more
        )

    every_step = partial(LoopConfig, checkpoint_every_seconds=-1.0)
    monkeypatch.setattr("ecospec.harness.training.predictor.LoopConfig", every_step)
    monkeypatch.setattr(Corpus, "windows", stopping)
    with pytest.raises(InterruptedError):
        run()
    monkeypatch.setattr(Corpus, "windows", windows)
    figures = run(resume=True)
    for part in ("learned", "token-frequency"):
        whole = bench.folder / "predictor" / part / "model.safetensors"
        assert (tmp_path / part / "model.safetensors").read_bytes() == whole.read_bytes()
    timed = {"seconds", "train_seconds"}
    unbroken = bench.figures["predictor"]
    assert {k: v for k, v in figures.items() if k not in timed} == {k: v for k, v in unbroken.items() if k not in timed}
