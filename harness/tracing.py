"""Collecting a routing trace: the target runs over suites or texts, and what it routed where is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecospec.errors import UserError
from ecospec.harness.chat import chat_of
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.config import RunConfig
from ecospec.harness.decoding import Stream, decode_ar_batch
from ecospec.harness.loading import LoadedTarget, check_experts, target_view
from ecospec.harness.manifest import checkpoint_hash, prompts_hash
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import check_options, data_of, eos_ids, load_target_of, resolve_device
from ecospec.harness.requests import Renderer, Request
from ecospec.harness.several import named_suites
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target
from ecospec.predictors.traces import TracedText, TraceWriter, pack_routing
from ecospec.suites import load_suite
from ecospec.suites.rows import read_rows

TEXT = "text"
"""What the ids of a text file's pieces begin with, as those of a suite's with its name."""
PIECE = 2048
"""A longer text is traced in pieces of so many tokens, or of the target's context where that is shorter."""


@dataclass(frozen=True)
class Source:
    """Texts of one kind: a suite's requests, which the target answers, or the pieces of a text file.

    Attributes:
        facts: what the manifest says of it.
        requests: of a suite.
        texts: (id, tokens) of a file.
    """

    facts: dict[str, Any]
    renderer: Renderer | None = None
    requests: tuple[Request, ...] = ()
    texts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def count(self) -> int:
        """How many texts it gives."""
        return len(self.requests) + len(self.texts)


class Tracer:
    """A trace that is ready to be collected: everything loaded and checked, nothing written yet."""

    def __init__(
        self, config: RunConfig, suites: Sequence[str], text: Path | None, plugins: Plugins | None = None
    ) -> None:
        """Load and check.

        Args:
            config: the target, the data and how answers are written; nothing about methods is used.
            suites: names or paths; none with ``text``.
            text: JSON lines with a column ``text``.

        Raises:
            UserError: an option, a suite, the data or the target does not fit.
        """
        plugins = plugins or load_plugins()
        check_options(config, drafter=False)
        names = named_suites(config, suites, plugins)
        if text is not None and TEXT in names.values():
            raise UserError(f"--text {text} and a suite that is called {TEXT}; expected one of them, or another name")
        device, dtype = resolve_device(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.loaded, self.bundle = load_target_of(config, device, dtype)
        check_experts(self.loaded.target, "a trace")
        self.sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
        self.eos = eos_ids(self.loaded.target.model, self.loaded.tokenizer)
        self.chat = chat_of(
            self.loaded.tokenizer, mode=config.chat_template, thinking=config.thinking, system=config.system_prompt
        )
        self.sources = [self._suite(suite, plugins) for suite in suites]
        if text is not None:
            self.sources.append(_text_source(text, self.loaded, config.limit))

    def _suite(self, name: str, plugins: Plugins) -> Source:
        config, loaded = self.config, self.loaded
        suite = load_suite(
            name, data=data_of(config), limit=config.limit, revision=config.revision, more=plugins.suites.paths
        )
        renderer = Renderer(loaded.tokenizer, loaded.target.geometry, loaded.name, config.max_new_tokens, self.chat)
        requests = tuple(renderer.first(problem) for problem in suite.problems)
        facts = {
            "suite": suite.name,
            "source": suite.source,
            "data_sha256": suite.data_sha256,
            "prompts": len(requests),
            "prompts_sha256": prompts_hash(request.ids for request in requests),
        }
        return Source(facts, renderer, requests)

    @property
    def count(self) -> int:
        """How many texts the trace is to have."""
        return sum(source.count for source in self.sources)

    def facts(self) -> dict[str, Any]:
        """What the manifest says besides the target's geometry; all of it decides what the trace holds."""
        config, folder = self.config, Path(self.loaded.name)
        return {
            "target_name": "embedded" if config.target is None else config.target,
            "checkpoint_sha256": checkpoint_hash(self.bundle / "target" if self.bundle else folder)
            if self.bundle or folder.is_dir()
            else None,
            "dtype": str(self.loaded.target.embedding.dtype).removeprefix("torch."),
            "sources": [source.facts for source in self.sources],
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": config.seed,
            "chat_template": "off" if self.chat is None else "on",
            "chat_switches": {} if self.chat is None else dict(self.chat.switches),
            "system_prompt": config.system_prompt,
        }

    def collect(self, folder: Path, on_text: Callable[[TracedText], None] | None = None) -> TraceWriter:
        """Write the trace, or what is left of it.

        Raises:
            UserError: see `TraceWriter`.
        """
        view = target_view(self.loaded.target)
        with TraceWriter(folder, self.facts(), view, resume=self.config.resume) as writer:
            for source in self.sources:
                for text in self._texts(source, writer.done):
                    writer.append(text)
                    if on_text is not None:
                        on_text(text)
        return writer

    def _texts(self, source: Source, done: set[str]) -> Iterator[TracedText]:
        target = self.loaded.target
        for name, tokens in source.texts:
            if name not in done:
                yield traced(target, name, tokens, len(tokens))
        todo = [request for request in source.requests if request.problem.id not in done]
        for at in range(0, len(todo), self.config.batch_size):
            for request, answer in self._answered(source, todo[at : at + self.config.batch_size]):
                yield traced(target, request.problem.id, [*request.ids, *answer], len(request.ids))

    def _answered(self, source: Source, group: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        """Each request with the target's answer; of a conversation the last, which holds all of it."""
        assert source.renderer is not None
        finished: dict[str, tuple[Request, list[int]]] = {}
        turns = list(group)
        while turns:
            generations = decode_ar_batch(self.loaded.target, [self._stream(request) for request in turns])
            following = []
            for request, generation in zip(turns, generations, strict=True):
                finished[request.problem.id] = (request, generation.tokens)
                further = source.renderer.follow(request, generation.text)
                if further is not None:
                    following.append(further)
            turns = following
        yield from (finished[request.problem.id] for request in group)

    def _stream(self, request: Request) -> Stream:
        stop = request.problem.stop if self.chat is None else request.problem.chat_stop
        rule = StopRule(self.loaded.tokenizer, request.limit, self.eos, stop)
        return Stream(request.ids, TokenChooser(self.sampling, request.id), rule)


def traced(target: Target, name: str, tokens: Sequence[int], prompt_tokens: int) -> TracedText:
    """The routing of a whole text, by one pass over it."""
    routing = target.new_session(len(tokens)).prefill(tokens).routing.cpu().numpy()
    packed = pack_routing(routing, target.geometry.experts)
    return TracedText(name, np.asarray(tokens, dtype=np.int32), prompt_tokens, packed)


def _text_source(path: Path, loaded: LoadedTarget, limit: int | None) -> Source:
    rows, digest = read_rows(path, {"text": "string"})
    piece = min(PIECE, loaded.target.context)
    texts = []
    for number, row in enumerate(rows[:limit]):
        ids = tuple(loaded.tokenizer(row["text"])["input_ids"])
        if not ids:
            raise UserError(f"data file {str(path)!r}, text {number}: it has no tokens for the target's tokenizer")
        pieces = [ids[start : start + piece] for start in range(0, len(ids), piece)]
        texts += [(f"{TEXT}-{number}" + (f".{i}" if len(pieces) > 1 else ""), part) for i, part in enumerate(pieces)]
    return Source({"text": str(path), "data_sha256": digest, "texts": len(texts)}, texts=tuple(texts))
