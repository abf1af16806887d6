"""The drafter contract: which tokens may come next?

A drafter is a frozen dataclass, like a policy; its fields are what a user may set. `bind` loads what it needs and
checks that it fits the target, `open` begins a batch of requests. This module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ecospec.policies import DraftTree
from ecospec.policies.spec import summary
from ecospec.predictors.contract import DrafterView, NodeStates


@dataclass(frozen=True)
class DrafterTarget:
    """What a drafter may know of the target.

    Attributes:
        folder: of its checkpoint.
        config: its transformers config.
        vocab_size: V, tokens of its language-model head; what a tree may hold.
        hidden_size: Ht.
        layers: its decoder layers.
        context: longest sequence, prompt and output together, in tokens.
        embedding: its input embedding, a tensor [V, Ht], on the device and in the dtype to run in.
        final_norm: the module before its language-model head; None where the library's decoder names none.
        head: its language-model head, a module from [..., Ht] to [..., V].
        tokenizer: its tokenizer, of the transformers library; None where there is none.
        bundle: folder of the drafter that belongs to this target, used when the user names none.
    """

    folder: Path
    config: Any
    vocab_size: int
    hidden_size: int
    layers: int
    context: int
    embedding: Any
    final_norm: Any
    head: Any
    tokenizer: Any = None
    bundle: Path | None = None


class DraftBatch(ABC):
    """Requests that are drafted for together. ``index`` counts those that are still there."""

    @abstractmethod
    def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
        """Take in one request's prompt; called once for each that has anything to draft.

        Args:
            tokens: n + 1 ids, those of the prompt and the bonus token.
            features: a tensor [n, F · Ht], the target's states of the n tokens of the prompt, as
                `BoundDrafter.features` asks for them.
        """

    @abstractmethod
    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
        """Take in what every request has emitted.

        Args:
            blocks: the emitted ids, at least one each; the last is the new bonus token.
            features: tensors [n, F · Ht]; the i-th row is the target's state of the token *before* the i-th of
                the block.
        """

    @abstractmethod
    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> Sequence[DraftTree]:
        """A tree for every request; what has been taken in stays as it is.

        Args:
            bonuses: the bonus token of each, which is the root of its tree.
            depths: the most edges between the root and a node; 0 asks for the root alone.
            top_k: children of an expanded node. A tree has at most 1 + k + (s − 1)·k² nodes, s the run's
                ``--draft-steps`` and k this; it may have fewer, down to the root alone.
        """

    @abstractmethod
    def leave(self, index: int) -> None:
        """Drop the request at ``index``; those behind it move up."""

    def node_states(self, index: int) -> Callable[[DraftTree], NodeStates] | None:
        """What gives the hidden states of the tree drafted last for the request that is now at ``index``.

        It is asked for once, when the batch is opened, and must serve that request wherever it moves. None where
        there are no states, as here.
        """
        return None


class BoundDrafter(ABC):
    """A drafter with its weights loaded for one target."""

    features: tuple[int | str, ...] = ()
    """The target's states that it reads: indices of decoder layers whose outputs are meant, or "final" for the state
    behind the final norm. They come joined in this order."""
    view: DrafterView | None = None
    """What a predictor that is trained on its states must know of it; None where none is."""

    @abstractmethod
    def open(self, capacities: Sequence[int]) -> DraftBatch:
        """Begin a batch of requests, with the most tokens, draft nodes included, that each can come to."""

    def note_positions(self, count: int, request: str) -> None:  # noqa: B027 - most have nothing to say
        """Told before a request is opened how many tokens it may come to; a place for a warning."""


class Drafter(ABC):
    """A way to draft. Subclass it as a frozen dataclass, name it, and write `bind`."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.description = summary(cls)

    @abstractmethod
    def bind(self, target: DrafterTarget) -> BoundDrafter:
        """Load for one target.

        Raises:
            UserError: nothing to load, or it does not fit the target.
        """
