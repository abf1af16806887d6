"""Predictors trained from traces: what can be learned is learned, and a training that was stopped is the same one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import Checkpoints

from ecospec.errors import UserError
from ecospec.harness.accuracy import accuracy_of
from ecospec.harness.loading import load_target, target_view
from ecospec.harness.training import traced
from ecospec.harness.training.learners import FeatureShape, PredictorShape
from ecospec.harness.training.traced import (
    Sample,
    TracedRecipe,
    batch_of,
    count_experts,
    epoch_batches,
    samples,
    split_texts,
    train_on_traces,
)
from ecospec.predictors.builtin import Learned, NoisyOracle, TokenFrequency
from ecospec.predictors.contract import TargetView
from ecospec.predictors.traces import TracedText, TraceWriter, pack_routing

SHAPE = PredictorShape(width=64, layers=2, heads=4)
WORDS = 16
"""Token ids that the made-up texts use."""


@pytest.fixture(scope="module")
def view(checkpoints: Checkpoints) -> TargetView:
    return target_view(load_target(str(checkpoints.target), dtype=torch.float32, device="cpu").target)


def routed(tokens: np.ndarray, view: TargetView, *, by_previous: bool) -> np.ndarray:
    """Routing [L, n, K] that is a fixed function of each token, or in all layers but the first of the one before."""
    rng = np.random.default_rng(7)
    tables = rng.random((view.moe_layers, WORDS, view.experts)).argsort(-1)[..., : view.top_k]
    previous = np.concatenate((tokens[:1], tokens[:-1]))
    return np.stack([table[previous if by_previous and layer else tokens] for layer, table in enumerate(tables)])


def made_up(view: TargetView, count: int, *, by_previous: bool, length: int = 24, seed: int = 0) -> list[TracedText]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        tokens = rng.integers(0, WORDS, length)
        routing = pack_routing(routed(tokens, view, by_previous=by_previous), view.experts)
        found.append(TracedText(f"made-up-{i}", tokens.astype(np.int32), 2, routing))
    return found


def write(folder: Path, texts: list[TracedText], view: TargetView) -> Path:
    with TraceWriter(folder, {"sources": []}, view) as writer:
        for text in texts:
            writer.append(text)
    return folder


@pytest.mark.parametrize("by_previous", [False, True])
def test_routing_by_the_token_or_the_one_before_is_learned(
    checkpoints: Checkpoints, view: TargetView, tmp_path: Path, by_previous: bool
) -> None:
    """It fails where positions, shifts or layers are mixed up; a table of tokens cannot know the token before."""
    folder = write(tmp_path / "trace", made_up(view, 120, by_previous=by_previous), view)
    recipe = TracedRecipe(epochs=60, learning_rate=4e-3, patience=60)
    figures = train_on_traces(checkpoints.target, [folder], tmp_path / "out", shape=SHAPE, recipe=recipe)
    assert figures["held_out_overlap"] >= 0.99
    by_table = figures["held_out_overlap_token_frequency"]
    assert by_table < 0.7 if by_previous else by_table >= 0.99
    fresh = made_up(view, 10, by_previous=by_previous, seed=1)
    learned, table = (
        accuracy_of(predictor.name, predictor.bind(view), view, fresh, oracle=False)
        for predictor in (Learned(tmp_path / "out" / "learned"), TokenFrequency(tmp_path / "out" / "token-frequency"))
    )
    assert learned.mean() >= 0.985
    assert (learned.by_layer() > 0.95).all()
    assert table.by_layer()[0] >= 0.985
    assert (table.mean() < 0.7) == by_previous


@pytest.mark.parametrize("kind", ["learned", "feature"])
def test_a_training_that_was_stopped_and_gone_on_with_is_the_same_one(
    checkpoints: Checkpoints, view: TargetView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = write(tmp_path / "trace", made_up(view, 40, by_previous=True), view)
    recipe = TracedRecipe(epochs=5, batch_size=8)
    made: dict[str, Any] = {"kind": kind, "shape": SHAPE, "recipe": recipe}
    if kind == "feature":
        made |= {"shape": FeatureShape(rank=4), "drafter": checkpoints.drafter}

    def run(output: str, **options: Any) -> dict[str, Any]:
        return train_on_traces(checkpoints.target, [folder], tmp_path / output, **made, **options)

    whole = run("whole")
    real, seen = traced.batch_of, []

    def stop(chosen: Any, device: str) -> Any:
        seen.append(1)
        if len(seen) == 15:
            raise KeyboardInterrupt
        return real(chosen, device)

    with monkeypatch.context() as patch:
        patch.setattr(traced, "batch_of", stop)
        with pytest.raises(KeyboardInterrupt):
            run("part")
    resumed = run("part", resume=True)
    unlike = ("seconds", "train_seconds")
    assert {k: v for k, v in resumed.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    weights = [(tmp_path / name / kind / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


def test_the_best_epoch_is_kept_and_patience_ends_a_training(
    checkpoints: Checkpoints, view: TargetView, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    texts = []
    for text in made_up(view, 20, by_previous=False):
        noise = rng.random((view.moe_layers, len(text.tokens), view.experts)).argsort(-1)[..., : view.top_k]
        texts.append(TracedText(text.id, text.tokens, 2, pack_routing(noise, view.experts)))
    folder = write(tmp_path / "trace", texts, view)
    recipe = TracedRecipe(epochs=50, learning_rate=1e-2, patience=3)
    figures = train_on_traces(checkpoints.target, [folder], tmp_path / "out", shape=SHAPE, recipe=recipe)
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    evaluated = [row for row in log if "held_out_overlap" in row]
    best = max(evaluated, key=lambda row: row["held_out_overlap"])
    assert figures["best_step"] == best["step"]
    assert figures["held_out_overlap"] == best["held_out_overlap"]
    kept = torch.load(tmp_path / "out" / "best.pt", weights_only=True)["module"]
    saved = load_file(tmp_path / "out" / "learned" / "model.safetensors")
    assert all(torch.equal(tensor, kept[name].to(tensor.dtype)) for name, tensor in saved.items())
    last = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["module"]
    assert not torch.equal(last["head.weight"], kept["head.weight"])
    assert len(evaluated) < 50  # noise cannot be learned
    assert evaluated.index(best) == len(evaluated) - 1 - 3


def test_texts_are_split_and_batched_each_once(view: TargetView) -> None:
    texts = list({text.given: text for text in made_up(view, 40, by_previous=False)}.values())[:25]
    training, held_out = split_texts(texts, 0.2, seed=3)
    assert (len(training), len(held_out)) == (20, 5)
    assert {t.id for t in training} | {t.id for t in held_out} == {t.id for t in texts}
    assert [t.id for t in split_texts(texts, 0.2, seed=3)[1]] == [t.id for t in held_out]
    assert [t.id for t in split_texts(texts, 0.2, seed=4)[1]] != [t.id for t in held_out]
    assert [len(part) for part in split_texts(texts[:2], 0.01, seed=0)] == [1, 1]
    with pytest.raises(UserError, match="1 traced prompt"):
        split_texts(texts[:1], 0.2, seed=0)
    again = [TracedText(f"again-{i}", text.tokens[::-1], 0, text.routing) for i, text in enumerate(texts)]
    for text in texts:
        tokens = np.array([*text.tokens[:2], 5], dtype=np.int32)
        again.append(TracedText(f"other-{text.id}", tokens, 2, text.routing[:, :3]))
    sides = [{text.given for text in side} for side in split_texts([*texts, *again], 0.2, seed=3)]
    assert not sides[0] & sides[1]  # another answer to a prompt is on the prompt's side
    assert [len(side) for side in sides] == [40, 10]
    batches = epoch_batches(10, 4, seed=0, epoch=1)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(np.concatenate(batches).tolist()) == list(range(10))
    assert not np.array_equal(batches[0], epoch_batches(10, 4, seed=0, epoch=2)[0])


def test_long_texts_are_cut_and_judged_where_the_target_wrote(view: TargetView) -> None:
    (text,) = made_up(view, 1, by_previous=True, length=10)
    pieces = samples([TracedText(text.id, text.tokens, 6, text.routing)], 4)
    assert [piece.tokens.tolist() for piece in pieces] == [part.tolist() for part in np.split(text.tokens, (4, 8))]
    assert np.array_equal(np.concatenate([piece.routing for piece in pieces], axis=1), text.routing)
    batch = batch_of(pieces, "cpu")
    assert batch.real.tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]
    assert batch.routing.shape == (view.moe_layers, 10, view.top_k)
    assert batch.judged.tolist() == [False] * 6 + [True] * 4
    read_only = batch_of(samples([TracedText(text.id, text.tokens, 10, text.routing)], 4), "cpu")
    assert read_only.judged.tolist() == [False] + [True] * 9


def test_experts_are_counted_by_token_and_layer(view: TargetView) -> None:
    texts = made_up(view, 3, by_previous=True)
    counts = count_experts(texts, view)
    expected = np.zeros_like(counts)
    for text in texts:
        for layer in range(view.moe_layers):
            for token, experts in zip(text.tokens, text.routing[layer], strict=True):
                for expert in experts:
                    expected[token, layer, expert] += 1
    assert np.array_equal(counts, expected)


def test_accuracy_by_hand(view: TargetView) -> None:
    """A noisy oracle of one half has it in each text and layer; an oracle that is shown the trace is always right."""
    texts = made_up(view, 6, by_previous=True)
    for accuracy in (0.5, 1.0):
        bound = NoisyOracle(accuracy=accuracy).bind(view)
        found = accuracy_of("noisy-oracle", bound, view, texts, oracle=True)
        assert found.tokens == {"made-up": 6 * 22, "all": 6 * 22}
        assert found.by_layer().tolist() == [accuracy] * view.moe_layers
        assert found.mean("made-up") == accuracy
    with pytest.raises(UserError, match="no text with a token to predict"):
        accuracy_of("noisy-oracle", bound, view, [], oracle=True)


def test_four_commands_lead_from_a_trace_to_a_run(
    command: Callable[..., Any], bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    target = ("--target", checkpoints.target)
    common = (*target, "--data", "embedded", "--max-new-tokens", 16, "--limit", 6)
    assert command("trace", "--suite", "amc,math500", *common, "--output", "trace").code == 0
    trained = command("train", "predictor", *target, "--trace", "trace", "--output", "predictor", "--epochs", 3)
    assert trained.code == 0, trained.err
    figures = json.loads(trained.out.splitlines()[-2])
    record = json.loads((tmp_path / "predictor" / "training.json").read_text())
    assert record["figures"]["held_out_overlap"] == figures["held_out_overlap"]
    learned, table = (f"{kind}:path=predictor/{kind}" for kind in ("learned", "token-frequency"))
    both = ("--predictor", learned, "--predictor", table)
    ran = command(
        "evaluate", *target, "--trace", "trace", *both, "--held-out-of", "predictor", "--output", "found.json"
    )
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "found.json").read_text())
    # The predictor's file is in half the training's precision.
    assert found[learned]["accuracy"]["all"] == pytest.approx(figures["held_out_overlap"], abs=0.02)
    assert found[table]["accuracy"]["all"] == pytest.approx(figures["held_out_overlap_token_frequency"])
    assert set(found[learned]["accuracy"]) <= {"amc", "math500", "all"}
    assert sum(n for name, n in found[table]["tokens"].items() if name != "all") == found[table]["tokens"]["all"]
    assert "MoE layer" in ran.out
    assert bench("--predictor", learned, "--output", "out").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "takes either --trace, once or several times, or --corpus"),
        (("--trace", "trace", "--corpus", "x.jsonl"), "takes either --trace, once or several times, or --corpus"),
        (("--trace", "trace", "--steps", 5), "--steps 5: it goes with --corpus; expected to be left out"),
        (("--corpus", "x.jsonl", "--epochs", 5), "--epochs 5: it goes with --trace; expected to be left out"),
        (("--trace", "trace", "--epochs", 0), "--epochs 0: expected an integer of at least 1"),
        (("--trace", "trace", "--batch-size", 0), "--batch-size 0: expected an integer of at least 1"),
        (("--trace", "nowhere"), "trace nowhere: no manifest.json"),
        (("--trace", "single"), "1 traced prompt(s); expected at least two"),
        (("--trace", "other"), "trace other: made from a target with moe_layers = "),
    ],
)
def test_a_mistake_is_one_line(
    command: Callable[..., Any],
    checkpoints: Checkpoints,
    view: TargetView,
    tmp_path: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    texts = made_up(view, 3, by_previous=False)
    write(tmp_path / "trace", texts, view)
    write(tmp_path / "single", texts[:1], view)
    more = TargetView(view.moe_layers + 1, view.experts, view.top_k, view.vocab_size, view.hidden_size, view.embedding)
    write(tmp_path / "other", made_up(more, 3, by_previous=False), more)
    ran = command("train", "predictor", "--target", checkpoints.target, "--output", "out", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_training_that_held_nothing_out_is_no_choice(
    command: Callable[..., Any], checkpoints: Checkpoints, view: TargetView, tmp_path: Path
) -> None:
    write(tmp_path / "trace", made_up(view, 3, by_previous=False), view)
    (tmp_path / "training.json").write_text('{"held_out": ["elsewhere-1"]}')
    arguments = ("--target", checkpoints.target, "--trace", "trace", "--predictor", "noisy-oracle")
    for folder, said in ((".", "none of the traces' texts was held out"), ("nowhere", "no training from traces")):
        ran = command("evaluate", *arguments, "--held-out-of", folder)
        assert ran.code == 2
        assert said in ran.err


def test_a_sample_is_what_it_was_cut_from() -> None:
    sample = Sample(np.arange(3), np.zeros((2, 3, 1), dtype=np.int64), 1)
    assert batch_of([sample], "cpu").ids.tolist() == [[0, 1, 2]]
