"""Drafters that go on from a state of the target: an EAGLE-3 head, or any other `DraftHead`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch, DrafterTarget
from ecospec.harness.drafting import DrafterBatch, DraftHead
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.eagle3_loading import load_eagle3
from ecospec.policies import DraftTree
from ecospec.predictors.contract import DrafterView, NodeStates
from ecospec.predictors.placing import place


class HeadBatch(DraftBatch):
    """A `DrafterBatch`: an entry is a token and the state of the one before it, so the first token has none."""

    def __init__(self, batch: DrafterBatch) -> None:
        self._batch = batch

    def start(self, index: int, tokens: Sequence[int], features: Tensor) -> None:
        """Add the prompt's entries."""
        self._batch.start(index, tokens[1:], features)

    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        """Add committed entries."""
        self._batch.extend(blocks, features)

    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> list[DraftTree]:
        """A dynamic tree for every request."""
        return self._batch.draft(bonuses, depths, top_k)

    def leave(self, index: int) -> None:
        """Drop a session."""
        self._batch.leave(index)

    def node_states(self, index: int) -> Callable[[DraftTree], NodeStates]:
        """The session's own, which stays with the request."""
        return self._batch.sessions[index].node_states


class BoundHead(BoundDrafter):
    """A head beside the target whose embedding it may read."""

    def __init__(
        self, head: DraftHead, embedding: Tensor, features: tuple[int | str, ...], view: DrafterView | None = None
    ) -> None:
        self.head, self.embedding, self.features, self.view = head, embedding, features, view

    def open(self, capacities: Sequence[int]) -> DraftBatch:
        """One pass a level for all of them."""
        return HeadBatch(DrafterBatch(self.head, self.embedding, capacities))


class BoundEagle3(BoundHead):
    """An EAGLE-3 head."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, embedding: Tensor, view: DrafterView | None = None) -> None:
        super().__init__(head, embedding, head.config.feature_layers or (), view)

    def note_positions(self, count: int, request: str) -> None:
        """Warn, once, of positions that the head was not made for."""
        self.head.note_positions(count, request)


def bind_eagle3(folder: Path, target: DrafterTarget) -> BoundEagle3:
    """Load a head for a target.

    Raises:
        UserError: it does not fit the target.
    """
    head = load_eagle3(
        folder, target_vocab=target.vocab_size, target_hidden=target.hidden_size, target_layers=target.layers
    )
    embedding: Tensor = target.embedding
    view = DrafterView(head.config.llama.hidden_size, folder)
    return BoundEagle3(place(head, embedding.device, embedding.dtype), embedding, view)
