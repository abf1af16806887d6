"""Requests that the target decodes together: one pass a step over the tokens of all of them.

The experts module sees the tokens of all requests at once, so the pass reads the union of their experts, each
once. Requests may differ in length, in the nodes that are verified and in how many of them are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ecospec.harness.target import Pass, Target, TargetSession
from ecospec.policies import DraftTree
from ecospec.predictors.packing import PackedPass, SlotPool


@dataclass(frozen=True)
class BatchPass:
    """What one pass over a batch gave.

    Attributes:
        whole: all requests' tokens one behind the other; its routing is that of the pass.
        counts: tokens of each request.
    """

    whole: Pass
    counts: tuple[int, ...]

    def parts(self) -> list[Pass]:
        """The pass as each request sees it."""
        whole = self.whole
        if len(self.counts) == 1:
            return [whole]
        logits, features = whole.logits.split(self.counts), whole.features.split(self.counts)
        routing = whole.routing.split(self.counts, dim=1)
        return [Pass(*each) for each in zip(logits, features, routing, strict=True)]


class TargetBatch:
    """The KV memories of several requests. With a single one it is that one's `TargetSession`.

    Attributes:
        sessions: of the requests that are still there, in their order.
    """

    def __init__(self, target: Target, capacities: Sequence[int]) -> None:
        """Open requests of at most so many tokens each."""
        self.target = target
        self._pool: SlotPool | None = None
        if len(capacities) == 1:
            self.sessions = [target.new_session(capacities[0])]
        else:
            self._pool = SlotPool(target.geometry.layers, max(capacities), len(capacities))
            self.sessions = [TargetSession(target, cache) for cache in self._pool.caches]

    def decode(self, tokens: Sequence[int]) -> BatchPass:
        """Process one token of every request and keep it: an AR step."""
        if self._pool is None or len(self.sessions) == 1:
            return BatchPass(self.sessions[0].decode(tokens[0]), (1,))
        ones = np.ones((len(tokens), 1, 1), dtype=bool)
        lengths = np.array([session.length for session in self.sessions])
        step = self._forward(self._pool, np.array(tokens), lengths, [1] * len(tokens), ones)
        for session in self.sessions:
            session.cache.advance(1)
        return step

    def verify(self, trees: Sequence[DraftTree], selected: Sequence[npt.NDArray[np.int64]]) -> BatchPass:
        """Process the selected nodes of every request's tree in one pass; nothing is kept.

        Each request's part is as `TargetSession.verify` describes it.
        """
        if self._pool is None or len(self.sessions) == 1:
            return BatchPass(self.sessions[0].verify(trees[0], selected[0]), (len(selected[0]),))
        counts = [len(nodes) for nodes in selected]
        seen = np.zeros((len(trees), max(counts), max(counts)), dtype=bool)
        for row, (tree, nodes) in enumerate(zip(trees, selected, strict=True)):
            seen[row, : len(nodes), : len(nodes)] = tree.ancestors[np.ix_(nodes, nodes)]
        pairs = list(zip(trees, selected, strict=True))
        tokens = np.concatenate([tree.tokens[nodes] for tree, nodes in pairs])
        positions = np.concatenate(
            [tree.depths[nodes] + session.length for session, (tree, nodes) in zip(self.sessions, pairs, strict=True)]
        )
        return self._forward(self._pool, tokens, positions, counts, seen)

    @torch.inference_mode()
    def _forward(
        self,
        pool: SlotPool,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        counts: list[int],
        seen: npt.NDArray[np.bool_],
    ) -> BatchPass:
        device = self.target.device
        packed = PackedPass(pool, counts, torch.from_numpy(seen).to(device))
        ids, places = (torch.from_numpy(array).to(device) for array in (tokens, positions))
        return BatchPass(self.target.forward(packed, ids, places, packed.mask), tuple(counts))

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path of every request; see `TargetSession.commit`."""
        if self._pool is None:
            self.sessions[0].commit(kept[0])
        else:
            self._pool.keep(kept)

    def leave(self, index: int) -> None:
        """Drop the request at ``index``; those behind it move up."""
        del self.sessions[index]
        if self._pool is not None:
            self._pool.leave(index)
