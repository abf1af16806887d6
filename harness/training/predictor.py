"""Train the expert predictors of a target from a corpus: a learned or a feature one, and the token-frequency table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.harness.loading import load_target, target_view
from ecospec.harness.training.corpus import build_corpus
from ecospec.harness.training.learners import (
    Batch,
    FeatureShape,
    PredictorShape,
    fit,
    held_out_figures,
    new_learner,
    overlap,
    peak_rate,
    table_figure,
    told,
    training_loss,
)
from ecospec.harness.training.own_text import own_text, real_tokens
from ecospec.harness.training.target import write_training_record
from ecospec.predictors.token_frequency import build_table, save_table
from ecospec.predictors.training import LoopConfig, refuse_another_run


@dataclass(frozen=True)
class PredictorRecipe:
    """How a predictor is trained from a corpus.

    Attributes:
        table_batches: batches that are counted for the token-frequency table.
        own_text: windows of the target's own greedy text to train on as well (see `own_text`); 0 for none. With them
            the held-out overlap is over the part of eight such windows that the target wrote.
        own_share: share of a batch that comes from them.
        learning_rate, backbone: see `TracedRecipe`.
        evaluate_every: steps from one evaluation to the next.
        patience: evaluations in a row without a better held-out overlap, after which to stop; 0 for no such end. The
            weights of the best evaluation are kept.
    """

    steps: int = 800
    seconds: float = 0.0
    learning_rate: float | None = None
    tokens_per_batch: int = 4096
    window: int = 512
    table_batches: int = 250
    seed: int = 2
    own_text: int = 0
    own_share: float = 0.75
    backbone: str | None = None
    evaluate_every: int = 50
    patience: int = 8


def train_predictor(
    target_path: Path,
    corpus_path: Path,
    output: Path,
    *,
    kind: str = "learned",
    drafter: Path | None = None,
    shape: PredictorShape | FeatureShape | None = None,
    recipe: PredictorRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train ``output/kind`` and count ``output/token-frequency`` from the same target and corpus.

    Args:
        kind, drafter, shape: see `new_learner`.
    """
    recipe = recipe or PredictorRecipe()
    refuse_another_run(output, resume=resume)
    torch.manual_seed(recipe.seed)
    loaded = load_target(str(target_path), dtype=torch.float32, device=device)
    target, geometry = loaded.target, loaded.target.geometry
    view = target_view(target)
    learner = new_learner(kind, target, view, drafter=drafter, shape=shape, backbone=recipe.backbone)
    corpus = build_corpus(corpus_path, loaded.tokenizer, piece=geometry.context, seed=0)
    window = min(recipe.window, geometry.context, learner.reach)
    count = max(1, recipe.tokens_per_batch // window)
    counts = np.zeros((geometry.vocab_size, geometry.moe_layers, geometry.experts), dtype=np.int64)
    counted: set[int] = set()

    def batch_of(windows: npt.NDArray[np.int64], judged_from: int = 0) -> Batch:
        ids = torch.from_numpy(windows).to(device)
        _, features, routing = target.teach(ids)
        assert routing is not None  # a target's experts go through its tap unless told otherwise
        every = torch.ones_like(ids, dtype=torch.bool)
        judged = every.clone()
        judged[:, :judged_from] = False
        return Batch(ids, every, routing, judged.flatten(), learner.context(ids, lambda: features))

    def windows_of(step: int) -> npt.NDArray[np.int64]:
        windows = corpus.windows(count, window, seed=recipe.seed, step=step)
        if own is not None:
            rng = np.random.default_rng((recipe.seed, step, 1))
            taken = rng.choice(len(own), size=round(count * recipe.own_share))
            windows[: len(taken)] = own[taken]
        return windows

    def note(step: int, windows: npt.NDArray[np.int64], routing: Tensor) -> None:
        for layer, chosen in enumerate(routing.cpu().numpy()):
            np.add.at(counts[:, layer], (windows.flatten()[:, None], chosen), 1)
        counted.add(step)

    own = None
    if recipe.own_text:
        own = own_text(
            target.model, corpus, output, windows=recipe.own_text, length=window, seed=recipe.seed, device=device
        )
        held_out, own = batch_of(own[-8:], real_tokens(window)), own[:-8]
    else:
        held_out = batch_of(corpus.held_out_windows(16, window))

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        windows = windows_of(step)
        seen = batch_of(windows)
        if step < recipe.table_batches:
            note(step, windows, seen.routing)
        views = learner.views(seen)
        value = training_loss(views)
        return value, {"loss": float(value.detach()), "overlap": fmean(overlap(view) for view in views)}

    def evaluate() -> dict[str, Any]:
        return held_out_figures(learner, [held_out])

    rate = peak_rate(recipe.learning_rate, recipe.backbone)
    loop = LoopConfig(
        steps=recipe.steps,
        learning_rate=rate,
        seconds=recipe.seconds,
        weight_decay=0.01,
        evaluate_every=recipe.evaluate_every,
        patience=recipe.patience,
    )
    figures = fit(learner, loss, loop, output, evaluate=evaluate, resume=resume)
    # A resumed or a short run counts what it has not seen.
    for step in sorted(set(range(recipe.table_batches)) - counted):
        windows = windows_of(step)
        routing = target.teach(torch.from_numpy(windows).to(device))[2]
        assert routing is not None
        note(step, windows, routing)
    learner.save(output / kind)
    table = build_table(counts, geometry.top_k)
    save_table(output / "token-frequency", table, view)
    figures |= table_figure([held_out], torch.from_numpy(table).to(device))
    write_training_record(output, "predictor", *told(learner, recipe), figures, corpus)
    return figures
