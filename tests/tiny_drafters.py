"""A drafter that does as it is told, and a tiny target to bind one to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_models import tiny_target

from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch, Drafter
from ecospec.harness.drafters.loading import load_drafter
from ecospec.harness.loading import LoadedTarget
from ecospec.policies import DraftTree

PROMPT = [1, 2, 3]


def target_of(drafter: Drafter, vocab: int = 8) -> tuple[Any, BoundDrafter]:
    target = tiny_target(vocab_size=vocab, feature_layers=())
    return target, load_drafter(drafter, LoadedTarget(target, None, "target", 1, Path("target")), None)


class Batch(DraftBatch):
    """Right, but for what it is told to do."""

    def __init__(self, draft: Callable[..., Any], **acts: Callable[..., Any]) -> None:
        self._draft, self._acts = draft, acts

    def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
        self._acts.get("start", lambda: None)()

    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
        self._acts.get("extend", lambda: None)()

    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> Any:
        return self._draft(bonuses, depths)

    def leave(self, index: int) -> None:
        self._acts.get("leave", lambda: None)()


class Bound(BoundDrafter):
    def __init__(self, opened: Callable[[], Any]) -> None:
        self._opened = opened

    def open(self, capacities: Sequence[int]) -> Any:
        return self._opened()


def chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree.chain(tokens, [1.0] + [0.5] * (len(tokens) - 1))


def right(bonuses: Sequence[int], depths: Sequence[int]) -> list[DraftTree]:
    return [chain([bonus, 1][: 1 + depth]) for bonus, depth in zip(bonuses, depths, strict=True)]
