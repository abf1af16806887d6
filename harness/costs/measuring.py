"""The measurement: forced passes and real decodes in turn, in an order that changes from round to round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.costs.forcing import Cell, forced_routing
from ecospec.harness.costs.saved import StepRest
from ecospec.harness.costs.text import PairCounts, TreeObserver, add_text
from ecospec.harness.decoding import Generation, Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.loading import LoadedTarget
from ecospec.harness.requests import Request
from ecospec.harness.steps import unique_pairs
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target
from ecospec.harness.timing import stopwatch_for, wait_for
from ecospec.policies import DraftTree

WARM_UP_ROUNDS = 1
Note = Callable[[], None]
"""Called after every pass of the sweep and every decode."""


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: what a pass or a phase takes on a machine that does nothing else.

    Other load only ever adds. On a machine at rest this is the median but for a per cent or so; on a busy one the
    median is mostly of the others.
    """
    return float(np.quantile(seconds, 0.25))


class Sweep:
    """Forced passes over one KV memory.

    Attributes:
        seconds: of every pass that counts, by cell.
    """

    def __init__(self, target: Target, cells: Sequence[Cell], prompt: Sequence[int], seed: int = 0) -> None:
        """Fill the memory.

        Args:
            prompt: tokens that stand in it; further ones of it, from the beginning, are verified.
        """
        self._target = target
        self._cells = list(cells)
        self._rng = np.random.default_rng(seed)
        self._prompt = np.asarray(prompt, dtype=np.int64)
        most = max(cell.tokens for cell in cells)
        self._session = target.new_session(len(prompt) + most)
        self._session.prefill(list(prompt))
        self._watch = stopwatch_for(target.device)
        self.seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}

    @property
    def passes(self) -> int:
        """Passes in a round."""
        return len(self._cells)

    def round(self, note: Note, *, counts: bool = True) -> None:
        """Every cell once, in random order; a first one is for warming up and does not count.

        Raises:
            UserError: a pass did not go to the experts that it was forced to.
        """
        for index in self._rng.permutation(len(self._cells)):
            cell = self._cells[index]
            seconds, pairs = self._time(cell)
            wanted = cell.active_experts * self._target.geometry.moe_layers
            if pairs != wanted:
                raise UserError(
                    f"{type(self._target.model).__name__}: a pass that was forced to {wanted} (layer, expert) pairs "
                    f"went to {pairs}; its experts cannot be profiled"
                )
            if counts:
                self.seconds[cell].append(seconds)
            note()

    def _time(self, cell: Cell) -> tuple[float, int]:
        """Seconds of one verification pass as a run makes it, and the pairs it went to."""
        target, n = self._target, cell.tokens
        geometry = target.geometry
        pattern = forced_routing(cell, geometry.moe_layers, geometry.experts, geometry.top_k, self._rng)
        forced = torch.from_numpy(pattern).to(target.device)
        tree = _tree(np.resize(np.roll(self._prompt, -int(self._rng.integers(len(self._prompt)))), n))
        with target.forcing(forced):
            wait_for(target.device)
            self._watch.start()
            step = self._session.verify(tree, np.arange(n))
            self._watch.mark("verify")
            seconds = self._watch.finish()["verify"]
        return seconds, unique_pairs(step.routing, geometry.experts)


def _tree(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> DraftTree:
    """A tree in which every node has two children, as far as they go."""
    nodes = np.arange(len(tokens))
    return DraftTree(tokens, (nodes + 1) // 2 - 1, np.where(nodes == 0, 1.0, 0.5))


@dataclass(frozen=True)
class TextPass:
    """A verification pass of a real decode."""

    tokens: int
    expert_pairs: int
    seconds: float


@dataclass
class Decodes:
    """What real decodes by one method came to."""

    generations: list[Generation] = field(default_factory=list)

    def passes(self) -> list[TextPass]:
        """Its verification passes."""
        return [
            TextPass(step.selected, step.expert_pairs, step.seconds["verify"])
            for generation in self.generations
            for step in generation.steps
        ]

    def phase(self, name: str) -> float:
        """Seconds of one phase of a step, `typical` of all steps."""
        return typical([step.seconds[name] for each in self.generations for step in each.steps])

    def rest(self) -> StepRest:
        """A step's phases but verification, each `typical` of all steps.

        What no phase has is the mean over a request's steps, and `typical` of the requests.
        """
        outside = [
            (each.decode_seconds - sum(sum(step.seconds.values()) for step in each.steps)) / len(each.steps)
            for each in self.generations
            if each.steps
        ]
        named = {phase: self.phase(phase) for phase in ("draft", "predict", "select", "commit")}
        return StepRest(**named, outside=max(0.0, typical(outside)))


class TextRuns:
    """Real decodes of some requests, for what cannot be forced."""

    def __init__(
        self,
        loaded: LoadedTarget,
        requests: Sequence[Request],
        methods: Mapping[str, Speculation],
        eos: frozenset[int],
        *,
        chat: bool,
    ) -> None:
        """Nothing is decoded yet.

        Args:
            methods: by label; plain decoding goes without saying.
            chat: whether the prompts are messages.
        """
        self._chat = chat
        self._loaded, self._requests, self._eos = loaded, list(requests), eos
        self._methods: dict[str | None, Speculation | None] = {None: None}
        self._methods.update(methods)
        self.decodes: dict[str | None, Decodes] = {label: Decodes() for label in self._methods}

    def warm_up(self) -> None:
        """Decode the first request by every method; nothing of it counts."""
        for label in self._methods:
            self._decode(self._requests[0], label)

    def round(self, number: int, note: Note) -> None:
        """One request by every method, in an order that starts one further on with every round."""
        labels = list(self._methods)
        shift = number % len(labels)
        for label in labels[shift:] + labels[:shift]:
            self.decodes[label].generations.append(self._decode(self._requests[number % len(self._requests)], label))
            note()

    def texts(self) -> Iterator[list[int]]:
        """The requests that were decoded with what plain decoding made of them, each once."""
        made = self.decodes[None].generations
        for request, generation in zip(self._requests, made, strict=False):
            yield [*request.ids, *generation.tokens]

    def text_pairs(self, most: int) -> PairCounts:
        """Unique pairs of consecutive tokens of these texts."""
        counts, target = PairCounts(most), self._loaded.target
        for tokens in self.texts():
            routing = target.new_session(len(tokens)).prefill(tokens).routing.cpu().numpy()
            add_text(counts, routing, target.geometry.experts)
        return counts

    def tree_pairs(self, label: str, most: int, requests: int) -> PairCounts:
        """Unique pairs of the most confident nodes of draft trees, in a decode that is not timed."""
        method = self._methods[label]
        assert method is not None
        observer = TreeObserver(self._loaded.target.geometry.experts, most)
        for request in self._requests[:requests]:
            decode_speculative_batch(self._loaded.target, method, [self._stream(request)], observer)
        return observer.counts

    def _decode(self, request: Request, label: str | None) -> Generation:
        method, stream = self._methods[label], self._stream(request)
        if method is None:
            return decode_ar_batch(self._loaded.target, [stream])[0]
        return decode_speculative_batch(self._loaded.target, method, [stream])[0]

    def _stream(self, request: Request) -> Stream:
        stop = request.problem.chat_stop if self._chat else request.problem.stop
        rule = StopRule(self._loaded.tokenizer, request.limit, self._eos, stop)
        return Stream(request.ids, TokenChooser(Sampling(), request.id), rule)
