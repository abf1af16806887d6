"""Train the expert predictors of a target: the learned one, and the token-frequency table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecospec.harness.loading import load_target, target_view
from ecospec.harness.target import Geometry
from ecospec.harness.training.corpus import build_corpus
from ecospec.harness.training.target import write_training_record
from ecospec.predictors.backbone import backbone_config, load_pretrained
from ecospec.predictors.learned import ExpertPredictor, routing_loss, save_learned, topk_overlap
from ecospec.predictors.token_frequency import build_table, save_table
from ecospec.predictors.training import LoopConfig, train


@dataclass(frozen=True)
class PredictorShape:
    """Geometry of the learned predictor's fresh backbone."""

    width: int = 192
    layers: int = 2
    heads: int = 4


FRESH_RATE, PRETRAINED_RATE = 2e-3, 1e-5
"""Peak learning rates; that of a pretrained backbone is the paper's."""


@dataclass(frozen=True)
class PredictorRecipe:
    """``table_batches`` batches are counted for the token-frequency table.

    ``backbone`` names a pretrained causal LM to start from, by its folder or on the hub; without it the backbone is
    a fresh one. The learning rate follows from that where none is given.
    """

    steps: int = 800
    seconds: float = 0.0
    learning_rate: float | None = None
    tokens_per_batch: int = 4096
    window: int = 512
    table_batches: int = 250
    seed: int = 2
    backbone: str | None = None


def build_predictor(geometry: Geometry, shape: PredictorShape, backbone: str | None) -> ExpertPredictor:
    """A predictor to train, with random weights or, where one is named, around a pretrained backbone.

    Raises:
        UserError: the one that is named cannot be a backbone.
    """
    sizes = (geometry.hidden_size, geometry.moe_layers, geometry.experts)
    if backbone is not None:
        return ExpertPredictor(*sizes, load_pretrained(backbone, geometry.context))
    return ExpertPredictor(*sizes, backbone_config(shape.width, shape.layers, shape.heads, geometry.context))


def peak_rate(learning_rate: float | None, backbone: str | None) -> float:
    """The learning rate that is given, else the recipe's for such a backbone."""
    if learning_rate is not None:
        return learning_rate
    return FRESH_RATE if backbone is None else PRETRAINED_RATE


def told(recipe: Any, model: ExpertPredictor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and recipe for a training's record: what was in effect, and no folder of the machine it was made on."""
    config = model.backbone.config
    shape = PredictorShape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    rate, name = peak_rate(recipe.learning_rate, recipe.backbone), recipe.backbone
    if name is not None and Path(name).exists():
        name = Path(name).resolve().name
    return asdict(shape), {**asdict(recipe), "learning_rate": rate, "backbone": name}


def train_predictor(
    target_path: Path,
    corpus_path: Path,
    output: Path,
    *,
    shape: PredictorShape | None = None,
    recipe: PredictorRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train ``output/learned`` and count ``output/token-frequency`` from the same target and corpus."""
    shape, recipe = shape or PredictorShape(), recipe or PredictorRecipe()
    torch.manual_seed(recipe.seed)
    loaded = load_target(str(target_path), dtype=torch.float32, device=device)
    target, geometry = loaded.target, loaded.target.geometry
    view = target_view(target)
    corpus = build_corpus(corpus_path, loaded.tokenizer, piece=geometry.context, seed=0)
    model = build_predictor(geometry, shape, recipe.backbone).to(device)
    embedding = target.embedding.float()
    window = min(recipe.window, geometry.context, model.reach)
    held_out = torch.from_numpy(corpus.held_out_windows(16, window)).to(device)
    count = max(1, recipe.tokens_per_batch // window)
    counts = np.zeros((geometry.vocab_size, geometry.moe_layers, geometry.experts), dtype=np.int64)
    counted = 0

    def batch(step: int) -> Tensor:
        windows = corpus.windows(count, window, seed=recipe.seed, step=step)
        return torch.from_numpy(windows).to(device)

    def routing_of(ids: Tensor) -> Tensor:
        routing = target.teach(ids)[2]
        assert routing is not None  # a target's experts go through its tap unless told otherwise
        return routing

    def note(ids: Tensor, routing: Tensor) -> None:
        nonlocal counted
        flat = ids.flatten().cpu().numpy()
        for layer, chosen in enumerate(routing.cpu().numpy()):
            np.add.at(counts[:, layer], (flat[:, None], chosen), 1)
        counted += 1

    def predicted(ids: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            out: Tensor = model(embedding[ids])
        return out.float()

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        ids = batch(step)
        routing = routing_of(ids)
        if step < recipe.table_batches:
            note(ids, routing)
        logits = predicted(ids)
        value = routing_loss(logits, routing)
        overlap = float(topk_overlap(logits.detach(), routing).mean())
        return value, {"loss": float(value.detach()), "overlap": overlap}

    def evaluate() -> dict[str, Any]:
        routing = routing_of(held_out)
        per_layer = topk_overlap(predicted(held_out), routing)
        table = torch.from_numpy(build_table(counts, geometry.top_k)).to(device)
        guess = table[held_out.flatten()].transpose(0, 1)  # [L, T, K]
        hits = (guess[..., :, None] == routing[..., None, :]).any(-1)
        return {
            "held_out_overlap": float(per_layer.mean()),
            "held_out_overlap_by_layer": [round(float(v), 4) for v in per_layer],
            "held_out_overlap_token_frequency": float(hits.float().mean()),
        }

    rate = peak_rate(recipe.learning_rate, recipe.backbone)
    loop = LoopConfig(steps=recipe.steps, learning_rate=rate, seconds=recipe.seconds, weight_decay=0.01)
    figures = train(model, loss, loop, output, evaluate=evaluate, resume=resume, title="predictor")
    for step in range(counted, recipe.table_batches):  # a resumed or a short run counts what it has not seen
        ids = batch(step)
        note(ids, routing_of(ids))
    save_learned(output / "learned", model, view)
    save_table(output / "token-frequency", build_table(counts, geometry.top_k), view)
    write_training_record(output, "predictor", *told(recipe, model), figures, corpus)
    return figures
