"""Checkpoints on disk in the published layouts, small and random, for the tests that go through files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.loading import target_view
from ecospec.harness.target import Target
from ecospec.harness.training.drafter import DrafterShape, draft_vocabulary, head_config, save_head
from ecospec.harness.training.target import TargetShape, build_target, train_tokenizer
from ecospec.predictors.backbone import backbone_config
from ecospec.predictors.checkpoint import save_predictor, target_geometry
from ecospec.predictors.learned import KIND, ExpertPredictor, saved_tensors
from ecospec.predictors.token_frequency import build_table, save_table

SHAPE = TargetShape(
    vocab_size=320,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=8,
    top_k=2,
    expert_size=8,
    context=4096,
)
HEAD = DrafterShape(draft_vocab_size=64, intermediate_size=48, heads=4, kv_heads=2, feature_layers=(0, 1, 2))


@dataclass(frozen=True)
class Checkpoints:
    """Folders of one target and what belongs to it."""

    target: Path
    drafter: Path
    learned: Path
    token_frequency: Path


def write_checkpoints(folder: Path, seed: int = 0) -> Checkpoints:
    """Write a random target with its tokenizer, an EAGLE-3 head and both predictors."""
    paths = Checkpoints(folder / "target", folder / "drafter", folder / "learned", folder / "token-frequency")
    texts = ["Question: Sam has 3 pens and buys 4 more.\nAnswer: Sam has 3 + 4 = 7 pens.\n#### 7"] * 4
    tokenizer = train_tokenizer(texts, SHAPE.vocab_size)
    tokenizer.save_pretrained(paths.target)
    torch.manual_seed(seed)
    model = build_target(SHAPE, tokenizer, experts_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(paths.target)
    raw = head_config(HEAD, model.config, SHAPE.hidden_size, HEAD.draft_vocab_size)
    head = Eagle3Head(Eagle3Config.from_dict(raw))
    counts = np.random.default_rng(seed).integers(0, 9, SHAPE.vocab_size)
    save_head(head, raw, draft_vocabulary(counts, HEAD.draft_vocab_size), SHAPE.vocab_size, paths.drafter)
    view = target_view(Target(model))
    backbone = backbone_config(width=16, layers=1, heads=2, context=SHAPE.context)
    predictor = ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, backbone)
    save_predictor(
        paths.learned,
        {"kind": KIND, "target": target_geometry(view), "backbone": backbone},
        saved_tensors(predictor),
    )
    table = np.random.default_rng(seed).integers(0, 9, (view.vocab_size, view.moe_layers, view.experts))
    save_table(paths.token_frequency, build_table(table, view.top_k), view)
    return paths
