"""How a predictor's training from a corpus ends: with its best weights, and the same if it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import Checkpoints

from ecospec.harness.training.corpus import Corpus
from ecospec.harness.training.learners import FeatureShape, PredictorShape
from ecospec.harness.training.predictor import PredictorRecipe, train_predictor

RECIPE = PredictorRecipe(
    steps=60,
    learning_rate=0.08,
    tokens_per_batch=128,
    window=32,
    table_batches=12,
    seed=1,
    evaluate_every=4,
    patience=3,
)
"""Too fast to get better for long."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rng = np.random.default_rng(0)
    words = ["Sam", "has", "3", "pens", "and", "buys", "4", "more", "Answer:", "Question:"]
    records = [{"source": "toy", "license": "MIT", "text": " ".join(rng.choice(words, 40))} for _ in range(80)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made_of(kind: str, checkpoints: Checkpoints) -> dict[str, Any]:
    if kind == "feature":
        return {"kind": kind, "shape": FeatureShape(rank=4), "drafter": checkpoints.drafter}
    return {"kind": kind, "shape": PredictorShape(width=16, layers=1, heads=2)}


@pytest.mark.parametrize(("kind", "own_text"), [("learned", 0), ("learned", 24), ("feature", 0)])
def test_the_best_weights_are_kept_and_patience_ends_a_training(
    checkpoints: Checkpoints, corpus: Path, tmp_path: Path, kind: str, own_text: int
) -> None:
    rate = 2.0 if kind == "feature" else RECIPE.learning_rate
    recipe = PredictorRecipe(**{**vars(RECIPE), "own_text": own_text, "learning_rate": rate})
    made = made_of(kind, checkpoints)
    figures = train_predictor(checkpoints.target, corpus, tmp_path / "out", recipe=recipe, **made)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "held_out_overlap" in row]
    best = max(evaluated, key=lambda row: row["held_out_overlap"])
    assert [row["step"] for row in evaluated] == list(range(4, figures["steps"] + 1, 4))
    assert figures["steps"] < 60
    assert evaluated.index(best) == len(evaluated) - 1 - 3
    assert {name: figures[name] for name in best} == best
    assert 0 < figures["held_out_overlap_token_frequency"] <= 1
    assert json.loads((tmp_path / "out" / "training.json").read_text())["figures"] == figures
    kept = torch.load(tmp_path / "out" / "best.pt", weights_only=True)["module"]
    saved = load_file(tmp_path / "out" / kind / "model.safetensors")
    assert all(torch.equal(saved[name], weight.to(torch.bfloat16)) for name, weight in kept.items() if name in saved)


@pytest.mark.parametrize("kind", ["learned", "feature"])
@pytest.mark.parametrize("stop", [1, 5, 17])
def test_a_training_that_was_stopped_and_gone_on_with_is_the_same_one(
    checkpoints: Checkpoints, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stop: int
) -> None:
    """Before, within and after the batches that the table counts, each of them once."""
    recipe = PredictorRecipe(**{**vars(RECIPE), "steps": 20, "patience": 0})

    def run(output: str, **options: Any) -> dict[str, Any]:
        made = made_of(kind, checkpoints)
        return train_predictor(checkpoints.target, corpus, tmp_path / output, recipe=recipe, **made, **options)

    whole = run("whole")
    real = Corpus.windows

    def stopping(self: Corpus, count: int, length: int, *, seed: int, step: int) -> Any:
        if step == stop:
            raise KeyboardInterrupt
        return real(self, count, length, seed=seed, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "windows", stopping)
        with pytest.raises(KeyboardInterrupt):
            run("part")
    resumed = run("part", resume=(tmp_path / "part" / "checkpoint.pt").exists())
    unlike = ("seconds", "train_seconds")
    assert {k: v for k, v in resumed.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    for part in (kind, "token-frequency"):
        found = [(tmp_path / name / part / "model.safetensors").read_bytes() for name in ("whole", "part")]
        assert found[0] == found[1], part
