"""Predictors trained from a pretrained backbone: they start at its weights, and a resumed training is the same one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_backbones import write_backbone
from tiny_checkpoints import Checkpoints
from transformers import AutoModelForCausalLM

from ecospec.errors import UserError
from ecospec.harness.loading import load_target, target_view
from ecospec.harness.training import traced
from ecospec.harness.training.traced import TracedRecipe, batch_of, epoch_batches, samples, split_texts, train_on_traces
from ecospec.predictors.backbone import load_pretrained
from ecospec.predictors.contract import TargetView
from ecospec.predictors.learned import ExpertPredictor, load_learned, routing_loss
from ecospec.predictors.traces import TracedText, TraceWriter, pack_routing


@pytest.fixture(scope="module")
def view(checkpoints: Checkpoints) -> TargetView:
    return target_view(load_target(str(checkpoints.target), dtype=torch.float32, device="cpu").target)


@pytest.fixture(scope="module")
def texts(view: TargetView) -> list[TracedText]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(20):
        tokens = rng.integers(0, 16, 12)
        routing = rng.random((view.moe_layers, 12, view.experts)).argsort(-1)[..., : view.top_k]
        found.append(TracedText(f"made-up-{i}", tokens.astype(np.int32), 2, pack_routing(routing, view.experts)))
    return found


@pytest.fixture(scope="module")
def trace(texts: list[TracedText], view: TargetView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "trace"
    with TraceWriter(folder, {"sources": []}, view) as writer:
        for text in texts:
            writer.append(text)
    return folder


def decoder_of(folder: Path) -> torch.nn.Module:
    """The decoder as the library loads it."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model
    return model


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_training_starts_at_the_pretrained_weights(
    checkpoints: Checkpoints, view: TargetView, texts: list[TracedText], trace: Path, tmp_path: Path, family: str
) -> None:
    folder = write_backbone(tmp_path / "pretrained", family)
    recipe = TracedRecipe(epochs=1, batch_size=4, learning_rate=1e-12, backbone=str(folder))
    train_on_traces(checkpoints.target, [trace], tmp_path / "out", recipe=recipe)
    kept = torch.load(tmp_path / "out" / "best.pt", weights_only=True)["module"]
    library = decoder_of(folder).state_dict()
    table = max(library, key=lambda name: library[name].shape[0] == 50)
    for name, weight in library.items():
        if name != table:
            torch.testing.assert_close(kept[f"backbone.{name}"], weight, atol=1e-9, rtol=0, msg=name)
    assert {f"backbone.{name}" for name in library} | {"projection.weight", "head.weight"} == set(kept)

    by_hand = ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, load_pretrained(str(folder), 96))
    by_hand.projection.weight.data, by_hand.head.weight.data = kept["projection.weight"], kept["head.weight"]
    seen = samples(split_texts(texts, 0.2, recipe.seed)[0], 512)
    first = batch_of([seen[i] for i in epoch_batches(len(seen), 4, recipe.seed, 0)[0]], "cpu")
    with torch.no_grad():
        logits = by_hand(view.embedding[first.ids])[first.real]
    expected = float(routing_loss(logits[None], first.routing))
    assert rows(tmp_path / "out")[0]["loss"] == pytest.approx(expected, rel=0.01)  # which was in half the precision


def test_a_resumed_training_is_the_unbroken_one(
    checkpoints: Checkpoints, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has dropout, whose noise a resumed training could not repeat."""
    folder = write_backbone(tmp_path / "pretrained", "gpt2")
    recipe = TracedRecipe(epochs=4, batch_size=4, learning_rate=1e-3, backbone=str(folder))

    def run(output: str, **options: Any) -> dict[str, Any]:
        return train_on_traces(checkpoints.target, [trace], tmp_path / output, recipe=recipe, **options)

    whole = run("whole")
    real, seen = traced.batch_of, []

    def stop(chosen: Any, device: str) -> Any:
        seen.append(1)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return real(chosen, device)

    with monkeypatch.context() as patch:
        patch.setattr(traced, "batch_of", stop)
        with pytest.raises(KeyboardInterrupt):
            run("part")
    resumed = run("part", resume=True)
    assert resumed["held_out_overlap"] == whole["held_out_overlap"]
    weights = [(tmp_path / name / "learned" / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("backbone", "given", "expected"),
    [(False, (), 2e-3), (True, (), 1e-5), (True, (3e-4,), 3e-4), (False, (3e-4,), 3e-4)],
)
def test_the_learning_rate_follows_the_backbone_unless_given(
    command: Callable[..., Any],
    checkpoints: Checkpoints,
    trace: Path,
    tmp_path: Path,
    backbone: bool,
    given: tuple[float, ...],
    expected: float,
) -> None:
    write_backbone(tmp_path / "small", "llama")
    arguments = [*(("--backbone", "small") if backbone else ()), *(("--learning-rate", *given) if given else ())]
    ran = command(
        *("train", "predictor", "--target", checkpoints.target, "--trace", trace, "--output", "out"),
        *("--epochs", 1, "--batch-size", 16, *arguments),
    )
    assert ran.code == 0, ran.err
    (row,) = rows(tmp_path / "out")
    assert row["rate"] == pytest.approx(expected / 50)  # the first of fifty steps of warm-up
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["recipe"]["learning_rate"] == expected
    assert record["recipe"]["backbone"] == ("small" if backbone else None)
    assert record["shape"]["width"] == (16 if backbone else 192)


def test_a_predictor_on_a_pretrained_backbone_is_evaluated_and_run(
    command: Callable[..., Any], bench: Callable[..., Any], checkpoints: Checkpoints, trace: Path, tmp_path: Path
) -> None:
    write_backbone(tmp_path / "small", "gpt_neox", positions=4096)
    target = ("--target", checkpoints.target)
    trained = command(
        *("train", "predictor", *target, "--trace", trace, "--output", "out", "--epochs", 2, "--backbone", "small")
    )
    assert trained.code == 0, trained.err
    spec = "learned:path=out/learned"
    assert command("evaluate", *target, "--trace", trace, "--predictor", spec).code == 0
    ran = bench("--predictor", spec, "--batch-size", 2)
    assert ran.code == 0, ran.err


def test_a_corpus_will_do_as_well(checkpoints: Checkpoints, command: Callable[..., Any], tmp_path: Path) -> None:
    record = {"source": "toy", "license": "MIT", "text": "Sam has 3 pens and buys 4 more. " * 30}
    (tmp_path / "corpus.jsonl").write_text((json.dumps(record) + "\n") * 100)
    folder = write_backbone(tmp_path / "small", "qwen3", positions=64)
    ran = command(
        *("train", "predictor", "--target", checkpoints.target, "--corpus", "corpus.jsonl", "--output", "out"),
        *("--steps", 1, "--backbone", "small"),
    )
    assert ran.code == 0, ran.err
    target = load_target(str(checkpoints.target), dtype=torch.float32, device="cpu").target
    loaded = load_learned(tmp_path / "out" / "learned", target_view(target)).model
    assert loaded.reach == 64
    name = "layers.0.mlp.up_proj.weight"
    wanted = decoder_of(folder).state_dict()[name]
    torch.testing.assert_close(loaded.backbone.state_dict()[name], wanted, atol=2e-2, rtol=0)
    saved = load_file(tmp_path / "out" / "learned" / "model.safetensors")
    assert saved["backbone.layers.0.self_attn.q_norm.weight"].shape == (8,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "--backbone ./nowhere: no such folder; expected a transformers checkpoint folder or a hub name"),
        ("", "--backbone : no config.json; expected a transformers checkpoint folder"),
        (
            "mistral",
            "--backbone mistral: it has a sliding window of 64 tokens under a context of 96; ",
        ),
    ],
)
def test_a_backbone_that_cannot_be_is_refused_in_one_line(
    command: Callable[..., Any], checkpoints: Checkpoints, trace: Path, tmp_path: Path, name: str, said: str
) -> None:
    if name == "mistral":
        write_backbone(tmp_path / name, name, sliding_window=64)
    ran = command(
        *("train", "predictor", "--target", checkpoints.target, "--trace", trace, "--output", "out"),
        *("--backbone", name),
    )
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_resumed_training_keeps_to_its_backbone(checkpoints: Checkpoints, trace: Path, tmp_path: Path) -> None:
    backbones = [str(write_backbone(tmp_path / family, family)) for family in ("gpt2", "llama")]
    recipes = [TracedRecipe(epochs=1, backbone=name) for name in backbones]
    train_on_traces(checkpoints.target, [trace], tmp_path / "out", recipe=recipes[0])
    with pytest.raises(UserError, match="not a checkpoint of this training"):
        train_on_traces(checkpoints.target, [trace], tmp_path / "out", recipe=recipes[1], resume=True)
