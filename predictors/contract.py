"""The predictor contract: which experts will each draft token touch?

A predictor is a frozen dataclass, like a policy; its fields are what a user may set. `bind` loads what it
needs and checks that it fits the target, `start` opens one request. This module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ecospec.policies import DraftTree
from ecospec.policies.spec import summary

Routing = npt.NDArray[np.int64]
"""[MoE layers, N, K]: the experts of N tree nodes, as `ExpertSets.from_topk` takes them."""


@dataclass(frozen=True)
class DrafterView:
    """What a predictor may know of the drafter.

    Attributes:
        hidden_size: H, the size of its hidden states.
        folder: of its checkpoint.
    """

    hidden_size: int
    folder: Path


@dataclass(frozen=True)
class TargetView:
    """What a predictor may know of the target.

    Attributes:
        embedding: the target's input embedding, a tensor [V, Ht], on the device and in the dtype to run in.
        bundle: folder of the predictor that belongs to this target, used when the user names none.
        drafter: None where nothing is drafted, or by what has no states to train on.
        stateless: the name of such a drafter.
        stateless_facts: gives what tells it from others of its name, to be written down as JSON; it may read files.
    """

    moe_layers: int
    experts: int
    top_k: int
    vocab_size: int
    hidden_size: int
    embedding: Any
    bundle: Path | None = None
    drafter: DrafterView | None = None
    stateless: str | None = None
    stateless_facts: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class NodeStates:
    """The drafter's hidden states for the nodes of a draft tree.

    Attributes:
        states: a tensor [M, H], those of the M nodes that were expanded; others have none.
        rows: int64 [N], which of them belongs to each node: its own where it was expanded, else that of its parent,
            from which it was drafted. The root has its own.
        own: bool [N], which of the two.
        entropies: gives a tensor [M], the entropies in nats of the drafter's next-token distributions at these M nodes;
            None where it keeps no distributions. Worked out when it is called.
    """

    states: Any
    rows: npt.NDArray[np.int64]
    own: npt.NDArray[np.bool_]
    entropies: Callable[[], Any] | None = None


@dataclass(frozen=True)
class PredictionRequest:
    """What a predictor gets of one request as it is opened.

    Attributes:
        prompt: token ids without the bonus token.
        capacity: the most tokens, draft nodes included, that the request can come to.
        true_routing: the target's own routing of a whole tree; costs a forward pass, and only a predictor that sets
            ``oracle`` may call it.
        drafter_states: the drafter's states for the nodes of the tree that is being predicted; they are there
            already and cost nothing.
    """

    prompt: Sequence[int]
    capacity: int
    true_routing: Callable[[DraftTree], Routing]
    drafter_states: Callable[[DraftTree], NodeStates]


class PredictorSession(ABC):
    """One request: its prompt, then alternately `predict` for a tree and `commit` of the accepted path."""

    @abstractmethod
    def predict(self, tree: DraftTree) -> Routing:
        """The top-K experts of every MoE layer for every node of the tree, [L, N, K]."""

    @abstractmethod
    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the accepted path of the last tree: node indices, root first, ascending."""


class PredictorBatch(ABC):
    """Several requests that are decoded together. All methods take one entry for each that is still there."""

    @abstractmethod
    def predict(self, trees: Sequence[DraftTree]) -> list[Routing]:
        """As `PredictorSession.predict`, for every request."""

    @abstractmethod
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """As `PredictorSession.commit`, for every request."""

    @abstractmethod
    def leave(self, index: int) -> None:
        """Drop the request at ``index``; those behind it move up."""


class EachAlone(PredictorBatch):
    """A batch that asks its requests' sessions one after another."""

    def __init__(self, sessions: Sequence[PredictorSession]) -> None:
        self.sessions = list(sessions)

    def predict(self, trees: Sequence[DraftTree]) -> list[Routing]:
        """One after another."""
        return [session.predict(tree) for session, tree in zip(self.sessions, trees, strict=True)]

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """One after another."""
        for session, kept in zip(self.sessions, nodes, strict=True):
            session.commit(kept)

    def leave(self, index: int) -> None:
        """Drop a session."""
        del self.sessions[index]


class BoundPredictor(ABC):
    """A predictor with its weights loaded for one target."""

    @abstractmethod
    def start(self, request: PredictionRequest) -> PredictorSession:
        """Open a request."""

    def start_batch(self, requests: Sequence[PredictionRequest]) -> PredictorBatch:
        """Open several requests that are decoded together.

        A predictor that can serve them in one pass overrides this.
        """
        return EachAlone([self.start(request) for request in requests])


class Predictor(ABC):
    """A way to predict expert sets. Subclass it as a frozen dataclass, name it, and write `bind`."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    oracle: ClassVar[bool] = False
    """Whether it looks at the target's true routing: its time is excluded, its speed-up not reported."""
    description: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.description = summary(cls)

    @abstractmethod
    def bind(self, target: TargetView) -> BoundPredictor:
        """Load for one target.

        Raises:
            UserError: nothing to load, or it does not fit the target.
        """
