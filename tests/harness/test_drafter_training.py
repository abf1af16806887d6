"""How a drafter's training ends: with its best weights, when it gets no better, and the same if it was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import SHAPE, Checkpoints
from tiny_models import head_facts
from transformers import AutoTokenizer

from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.training.corpus import Corpus, build_corpus
from ecospec.harness.training.drafter import DrafterRecipe, DrafterShape, draft_vocabulary, save_head, train_drafter

HEAD = DrafterShape(
    draft_vocab_size=SHAPE.vocab_size, intermediate_size=48, heads=4, kv_heads=2, feature_layers=(0, 1, 2)
)
WAYWARD = DrafterRecipe(
    steps=120, learning_rate=0.06, tokens_per_batch=256, window=32, seed=1, evaluate_every=5, patience=3
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


def evaluated(folder: Path, figure: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if figure in row]


@pytest.mark.parametrize("own_text", [0, 24])
def test_the_best_weights_are_kept_and_patience_ends_a_training(
    checkpoints: Checkpoints, corpus: Path, tmp_path: Path, own_text: int
) -> None:
    recipe = DrafterRecipe(**{**vars(WAYWARD), "own_text": own_text})
    figures = train_drafter(checkpoints.target, corpus, tmp_path / "out", shape=HEAD, recipe=recipe)
    judged_by = "own_text_top1_0" if own_text else "held_out_top1_0"
    rows = evaluated(tmp_path / "out", judged_by)
    best = max(rows, key=lambda row: row[judged_by])
    assert [row["step"] for row in rows] == list(range(5, figures["steps"] + 1, 5))
    assert figures["steps"] < 120
    assert best[judged_by] > rows[0][judged_by] > 0
    assert rows.index(best) == len(rows) - 1 - 3
    assert figures["best_step"] == best["step"]
    assert {name: figures[name] for name in best} == best
    assert json.loads((tmp_path / "out" / "training.json").read_text())["figures"] == figures
    kept, last = (
        torch.load(tmp_path / "out" / name, weights_only=True)["module"] for name in ("best.pt", "checkpoint.pt")
    )
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == {*kept, "d2t", "t2d"}
    assert all(torch.equal(saved[name], weight.to(torch.bfloat16)) for name, weight in kept.items())
    assert not torch.equal(kept["fc.weight"], last["fc.weight"])


@pytest.mark.parametrize("own_text", [0, 24])
def test_a_training_that_was_stopped_and_gone_on_with_is_the_same_one(
    checkpoints: Checkpoints, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_text: int
) -> None:
    changes = {"steps": 9, "evaluate_every": 2, "patience": 0, "own_text": own_text}
    recipe = DrafterRecipe(**{**vars(WAYWARD), **changes})

    def run(output: str, **options: Any) -> dict[str, Any]:
        return train_drafter(checkpoints.target, corpus, tmp_path / output, shape=HEAD, recipe=recipe, **options)

    whole = run("whole")
    real, seen = Corpus.windows, []

    def stop(self: Corpus, count: int, length: int, *, seed: int, step: int) -> Any:
        if length == recipe.window:  # not the beginnings of the target's own text
            seen.append(step)
            if step == 5:
                raise KeyboardInterrupt
        return real(self, count, length, seed=seed, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "windows", stop)
        with pytest.raises(KeyboardInterrupt):
            run("part")
    assert seen == [0, 1, 2, 3, 4, 5]
    resumed = run("part", resume=True)
    unlike = ("seconds", "train_seconds")
    assert {k: v for k, v in resumed.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


def test_the_map_to_target_ids_by_hand(tmp_path: Path) -> None:
    """Of counts 3, 9, 0, 9, 4, 1 the three largest are those of ids 1, 3 and 4: offsets 1, 2 and 2."""
    vocabulary = draft_vocabulary(np.array([3, 9, 0, 9, 4, 1]), 3)
    raw = head_facts(6, 3)
    save_head(Eagle3Head(Eagle3Config.from_dict(raw)), raw, vocabulary, 6, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["d2t"].tolist() == [1, 2, 2]
    assert saved["t2d"].tolist() == [False, True, False, True, True, False]


def test_a_trained_heads_vocabulary_is_counted_in_the_training_text(
    checkpoints: Checkpoints, corpus: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(**{**vars(WAYWARD), "steps": 1})
    shape = DrafterShape(**{**vars(HEAD), "draft_vocab_size": 12})
    train_drafter(checkpoints.target, corpus, tmp_path / "out", shape=shape, recipe=recipe)
    stream = build_corpus(corpus, AutoTokenizer.from_pretrained(checkpoints.target), piece=SHAPE.context).train
    counts = Counter(stream.tolist())
    saved = load_file(tmp_path / "out" / "model.safetensors")
    inside = [draft + offset for draft, offset in enumerate(saved["d2t"].tolist())]
    outside = set(range(SHAPE.vocab_size)) - set(inside)
    assert len(set(inside)) == 12
    assert min(counts[token] for token in inside) >= max(counts[token] for token in outside) > 0


def test_patience_is_an_option_of_its_own(
    command: Callable[..., Any], checkpoints: Checkpoints, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("train", "drafter", "--target", checkpoints.target, "--corpus", corpus, "--output", "out")
    refused = command(*common, "--patience", 0)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "ecospec-bench: error: --patience 0: expected an integer of at least 1\n"
    given: list[DrafterRecipe] = []

    def note(*arguments: Any, recipe: DrafterRecipe, **options: Any) -> dict[str, Any]:
        given.append(recipe)
        return {}

    monkeypatch.setattr("ecospec.harness.training.drafter.train_drafter", note)
    assert command(*common, "--patience", 3).code == 0
    assert command(*common).code == 0
    assert [recipe.patience for recipe in given] == [3, 8]
    other = command("train", "predictor", "--corpus", corpus, "--output", "out", "--epochs", 3)
    assert other.code == 2
    assert "--epochs 3: it goes with --trace; expected to be left out" in other.err
