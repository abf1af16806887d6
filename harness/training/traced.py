"""Train the expert predictors from routing traces, as the paper does (section 4.1 and Appendix B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.loading import load_target, target_view
from ecospec.harness.training.predictor import PredictorShape, build_predictor, peak_rate, told
from ecospec.harness.training.target import write_record
from ecospec.predictors.contract import TargetView
from ecospec.predictors.learned import routing_loss, save_learned
from ecospec.predictors.token_frequency import build_table, save_table
from ecospec.predictors.traces import Trace, TracedText, open_trace
from ecospec.predictors.training import LoopConfig, train


@dataclass(frozen=True)
class TracedRecipe:
    """The paper's: batches of 16 texts, at most 100 epochs, a fifth of the texts held out.

    ``backbone`` and the learning rate are as in `PredictorRecipe`. ``patience`` is in epochs without a better
    held-out overlap, ``window`` the most tokens of a sample; a longer text gives several, all on the same side of
    the split.
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
    """A piece of a text: tokens int64 [n], the experts [L, n, K] that each was routed to, and the first judged one."""

    tokens: npt.NDArray[np.int64]
    routing: npt.NDArray[np.int64]
    judged_from: int


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right.

    Attributes:
        ids: [B, n].
        real: bool [B, n], those of them that are tokens, T in all.
        routing: [L, T, K], their experts.
        judged: bool [T], those that the held-out overlap is taken over; see `TracedText.judged_from`.
    """

    ids: Tensor
    real: Tensor
    routing: Tensor
    judged: Tensor


def split_texts(texts: Sequence[TracedText], share: float, seed: int) -> tuple[list[TracedText], list[TracedText]]:
    """Texts to train on, and at least one that is held out; which is which depends on the seed alone.

    Raises:
        UserError: there are fewer than two.
    """
    if len(texts) < 2:
        raise UserError(f"{len(texts)} traced text(s); expected at least two, one to train on and one held out")
    count = min(len(texts) - 1, max(1, round(share * len(texts))))
    held = set(np.random.default_rng(seed).permutation(len(texts))[:count].tolist())
    return [t for i, t in enumerate(texts) if i not in held], [t for i, t in enumerate(texts) if i in held]


def samples(texts: Sequence[TracedText], window: int) -> list[Sample]:
    """Pieces of at most ``window`` tokens."""
    return [
        Sample(
            text.tokens[start : start + window].astype(np.int64),
            text.routing[:, start : start + window].astype(np.int64),
            max(0, text.judged_from - start),
        )
        for text in texts
        for start in range(0, len(text.tokens), window)
    ]


def batch_of(chosen: Sequence[Sample], device: str) -> Batch:
    """Pad samples to the longest."""
    width = max(len(sample.tokens) for sample in chosen)
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    real = np.zeros((len(chosen), width), dtype=bool)
    for row, sample in enumerate(chosen):
        ids[row, : len(sample.tokens)] = sample.tokens
        real[row, : len(sample.tokens)] = True
    routing = np.concatenate([sample.routing for sample in chosen], axis=1)
    judged = np.concatenate([np.arange(len(sample.tokens)) >= sample.judged_from for sample in chosen])
    return Batch(*(torch.from_numpy(array).to(device) for array in (ids, real, routing, judged)))


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


def hits_by_layer(guess: Tensor, routing: Tensor) -> Tensor:
    """How many of the true experts were guessed in each layer [L]; both [L, T, K]."""
    return (guess[..., :, None] == routing[..., None, :]).any(-1).sum((1, 2))


def train_on_traces(
    target_path: Path,
    folders: Sequence[Path],
    output: Path,
    *,
    shape: PredictorShape | None = None,
    recipe: TracedRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train ``output/learned`` and count ``output/token-frequency`` from traces of one target.

    Raises:
        UserError: a trace does not fit the target or is damaged, or there is too little of it.
    """
    shape, recipe = shape or PredictorShape(), recipe or TracedRecipe()
    torch.manual_seed(recipe.seed)
    loaded = load_target(str(target_path), dtype=torch.float32, device=device)
    view, geometry = target_view(loaded.target), loaded.target.geometry
    traces = [open_trace(folder, view) for folder in folders]
    texts = [text for trace in traces for text in trace]
    training, held_out = split_texts(texts, recipe.held_out_share, recipe.seed)
    model = build_predictor(geometry, shape, recipe.backbone).to(device)
    window = min(recipe.window, geometry.context, model.reach)
    seen, unseen = samples(training, window), samples(held_out, window)
    counts = count_experts(training, view)
    table = torch.from_numpy(build_table(counts, geometry.top_k)).to(device)
    embedding = loaded.target.embedding.float()
    per_epoch = len(epoch_batches(len(seen), recipe.batch_size, recipe.seed, 0))

    def predicted(batch: Batch) -> Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            out: Tensor = model(embedding[batch.ids])
        return out.float()[batch.real]

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        epoch, at = divmod(step, per_epoch)
        chosen = epoch_batches(len(seen), recipe.batch_size, recipe.seed, epoch)[at]
        batch = batch_of([seen[i] for i in chosen], device)
        logits = predicted(batch)
        value = routing_loss(logits[None], batch.routing)
        guess = logits.detach().topk(geometry.top_k, dim=-1).indices.transpose(0, 1)
        hits = hits_by_layer(guess, batch.routing).sum()
        return value, {
            "loss": float(value.detach()),
            "overlap": float(hits) / batch.routing.numel(),
            "epoch": epoch + 1,
        }

    def held_out_batches() -> Iterator[Batch]:
        for start in range(0, len(unseen), recipe.batch_size):
            yield batch_of(unseen[start : start + recipe.batch_size], device)

    def evaluate() -> dict[str, Any]:
        hits, by_table, tokens = torch.zeros(geometry.moe_layers), 0.0, 0
        for batch in held_out_batches():
            true = batch.routing[:, batch.judged]
            guess = predicted(batch)[batch.judged].topk(geometry.top_k, dim=-1).indices.transpose(0, 1)
            hits += hits_by_layer(guess, true).cpu()
            known = table[batch.ids[batch.real][batch.judged]].transpose(0, 1)
            by_table += float(hits_by_layer(known, true).sum())
            tokens += int(batch.judged.sum())
        if not tokens:
            raise UserError("the held-out texts have no token to judge by; expected texts of two tokens or more")
        per_layer = hits / (tokens * geometry.top_k)
        return {
            "held_out_overlap": float(per_layer.mean()),
            "held_out_overlap_by_layer": [round(float(v), 4) for v in per_layer],
            "held_out_overlap_token_frequency": by_table / (tokens * geometry.top_k * geometry.moe_layers),
        }

    loop = LoopConfig(
        steps=recipe.epochs * per_epoch,
        learning_rate=peak_rate(recipe.learning_rate, recipe.backbone),
        seconds=recipe.seconds,
        weight_decay=0.0,
        evaluate_every=per_epoch,
        patience=recipe.patience,
    )
    figures = train(
        model, loss, loop, output, evaluate=evaluate, resume=resume, title="predictor", keep_best="held_out_overlap"
    )
    save_learned(output / "learned", model, view)
    save_table(output / "token-frequency", table.cpu().numpy(), view)
    facts = {
        "traces": [_facts(trace) for trace in traces],
        "texts": len(training),
        "held_out_ids": [text.id for text in held_out],
        "tokens": sum(len(text.tokens) for text in training),
        "tokens_held_out": sum(len(text.tokens) for text in held_out),
    }
    write_record(output, "predictor", *told(recipe, model), figures, facts)
    return figures


def _facts(trace: Trace) -> dict[str, Any]:
    return {
        "sources": trace.manifest.get("sources"),
        "checkpoint_sha256": trace.manifest.get("checkpoint_sha256"),
        "shards_sha256": [shard.sha256 for shard in trace.shards],
        "tokens": trace.tokens,
    }
