"""Train the expert predictors from routing traces, as the paper does (section 4.1 and Appendix B)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.loading import load_target, target_view
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
from ecospec.harness.training.target import write_record
from ecospec.predictors.contract import TargetView
from ecospec.predictors.token_frequency import build_table, save_table
from ecospec.predictors.traces import Trace, TracedText, open_trace
from ecospec.predictors.training import LoopConfig, refuse_another_run


@dataclass(frozen=True)
class TracedRecipe:
    """The paper's: batches of 16 texts, at most 100 epochs, a fifth of the texts held out.

    ``backbone`` names a pretrained causal LM to start a learned predictor from, by its folder or on the hub; without
    it the backbone is a fresh one, and the learning rate, where none is given, follows from that. ``patience`` is in
    epochs without a better held-out overlap, ``window`` the most tokens of a sample; a longer text gives several, all
    on the same side of the split.
    """

    epochs: int = 100
    batch_size: int = 16
    learning_rate: float | None = None
    held_out_share: float = 0.2
    window: int = 512
    patience: int = 5
    seconds: float = 0.0
    seed: int = 2
    backbone: str | None = None


@dataclass(frozen=True)
class Sample:
    """A piece of a text.

    Attributes:
        tokens: int64 [n].
        routing: [L, n, K], the experts that each was routed to.
        judged_from: the first that is judged by.
        context: what `Learner.context` gave for it, [S, n, H], or None.
    """

    tokens: npt.NDArray[np.int64]
    routing: npt.NDArray[np.int64]
    judged_from: int
    context: Tensor | None = None


def split_texts(texts: Sequence[TracedText], share: float, seed: int) -> tuple[list[TracedText], list[TracedText]]:
    """Texts to train on, and at least one that is held out; which is which depends on the seed alone.

    Answers to the same prompt are on the same side.

    Raises:
        UserError: there are fewer than two prompts.
    """
    given = list(dict.fromkeys(text.given for text in texts))
    if len(given) < 2:
        raise UserError(f"{len(given)} traced prompt(s); expected at least two, one to train on and one held out")
    count = min(len(given) - 1, max(1, round(share * len(given))))
    held = {given[i] for i in np.random.default_rng(seed).permutation(len(given))[:count]}
    return [t for t in texts if t.given not in held], [t for t in texts if t.given in held]


def samples(
    texts: Iterable[TracedText], window: int, context_of: Callable[[TracedText], Tensor | None] = lambda text: None
) -> list[Sample]:
    """Pieces of at most ``window`` tokens.

    Args:
        context_of: what a learner needs of a whole text beside its tokens, [S, n, H].
    """
    pieces = []
    for text in texts:
        context = context_of(text)
        for start in range(0, len(text.tokens), window):
            end = start + window
            pieces.append(
                Sample(
                    text.tokens[start:end].astype(np.int64),
                    text.routing[:, start:end].astype(np.int64),
                    max(0, text.judged_from - start),
                    None if context is None else context[:, start:end],
                )
            )
    return pieces


def batch_of(chosen: Sequence[Sample], device: torch.device | str) -> Batch:
    """Pad samples to the longest."""
    width = max(len(sample.tokens) for sample in chosen)
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    real = np.zeros((len(chosen), width), dtype=bool)
    for row, sample in enumerate(chosen):
        ids[row, : len(sample.tokens)] = sample.tokens
        real[row, : len(sample.tokens)] = True
    routing = np.concatenate([sample.routing for sample in chosen], axis=1)
    judged = np.concatenate([np.arange(len(sample.tokens)) >= sample.judged_from for sample in chosen])
    batch = Batch(*(torch.from_numpy(array).to(device) for array in (ids, real, routing, judged)))
    parts = [sample.context for sample in chosen if sample.context is not None]
    if not parts:
        return batch
    context = parts[0].new_zeros(len(parts[0]), len(chosen), width, parts[0].shape[-1])
    for row, part in enumerate(parts):
        context[:, row, : part.shape[1]] = part
    return replace(batch, context=context)


def epoch_batches(count: int, size: int, seed: int, epoch: int) -> list[npt.NDArray[np.int64]]:
    """Which samples are in each batch of an epoch; every sample is in one."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [order[start : start + size] for start in range(0, count, size)]


def count_experts(texts: Sequence[TracedText], view: TargetView) -> npt.NDArray[np.int64]:
    """How often each token id was routed to each expert, [V, L, E]."""
    counts = np.zeros((view.vocab_size, view.moe_layers, view.experts), dtype=np.int64)
    for text in texts:
        for layer in range(view.moe_layers):
            np.add.at(counts[:, layer], (text.tokens[:, None], text.routing[layer]), 1)
    return counts


def train_on_traces(
    target_path: Path,
    folders: Sequence[Path],
    output: Path,
    *,
    kind: str = "learned",
    drafter: Path | None = None,
    shape: PredictorShape | FeatureShape | None = None,
    recipe: TracedRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train ``output/kind`` and count ``output/token-frequency`` from traces of one target.

    Args:
        kind, drafter, shape: see `new_learner`.

    Raises:
        UserError: a trace does not fit the target or is damaged, or there is too little of it.
    """
    recipe = recipe or TracedRecipe()
    refuse_another_run(output, resume=resume)
    torch.manual_seed(recipe.seed)
    loaded = load_target(str(target_path), dtype=torch.float32, device=device)
    target = loaded.target
    view, geometry = target_view(target), target.geometry
    learner = new_learner(kind, target, view, drafter=drafter, shape=shape, backbone=recipe.backbone)
    traces = [open_trace(folder, view) for folder in folders]
    texts = [text for trace in traces for text in trace]
    training, held_out = split_texts(texts, recipe.held_out_share, recipe.seed)
    window = min(recipe.window, geometry.context, learner.reach)

    def context_of(text: TracedText) -> Tensor | None:
        ids = torch.from_numpy(text.tokens.astype(np.int64))[None].to(device)
        found = learner.context(ids, lambda: target.teach(ids)[1])
        return None if found is None else found[:, 0]

    seen, unseen = (samples(part, window, context_of) for part in (training, held_out))
    table = torch.from_numpy(build_table(count_experts(training, view), geometry.top_k)).to(device)
    per_epoch = len(epoch_batches(len(seen), recipe.batch_size, recipe.seed, 0))

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        epoch, at = divmod(step, per_epoch)
        chosen = epoch_batches(len(seen), recipe.batch_size, recipe.seed, epoch)[at]
        views = learner.views(batch_of([seen[i] for i in chosen], device))
        value = training_loss(views)
        return value, {
            "loss": float(value.detach()),
            "overlap": fmean(overlap(view) for view in views),
            "epoch": epoch + 1,
        }

    def held_out_batches() -> Iterator[Batch]:
        for start in range(0, len(unseen), recipe.batch_size):
            yield batch_of(unseen[start : start + recipe.batch_size], device)

    by_table = table_figure(held_out_batches(), table)

    def evaluate() -> dict[str, Any]:
        return {**held_out_figures(learner, held_out_batches()), **by_table}

    loop = LoopConfig(
        steps=recipe.epochs * per_epoch,
        learning_rate=peak_rate(recipe.learning_rate, recipe.backbone),
        seconds=recipe.seconds,
        weight_decay=0.0,
        evaluate_every=per_epoch,
        patience=recipe.patience,
    )
    figures = fit(learner, loss, loop, output, evaluate=evaluate, resume=resume)
    learner.save(output / kind)
    save_table(output / "token-frequency", table.cpu().numpy(), view)
    facts = {
        "traces": [_facts(trace) for trace in traces],
        "texts": len(training),
        "held_out": sorted({text.given for text in held_out}),
        "tokens": sum(len(text.tokens) for text in training),
        "tokens_held_out": sum(len(text.tokens) for text in held_out),
    }
    write_record(output, "predictor", *told(learner, recipe), figures, facts)
    return figures


def _facts(trace: Trace) -> dict[str, Any]:
    return {
        "sources": trace.manifest.get("sources"),
        "checkpoint_sha256": trace.manifest.get("checkpoint_sha256"),
        "shards_sha256": [shard.sha256 for shard in trace.shards],
        "tokens": trace.tokens,
    }
