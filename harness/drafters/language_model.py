"""A small causal language model with the target's vocabulary as a drafter.

It has read the prompt and everything emitted, the bonus token included; a draft node's children are the likeliest next
tokens by its own softmax. What serves as a node's state is the row of logits that its token gave: whatever the library
does between the last hidden state and the logits of a family is then done. Rows of draft nodes are dropped from its
KV memory after drafting.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ecospec.errors import UserError, one_line
from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch, DrafterTarget
from ecospec.harness.drafting import draft_trees
from ecospec.policies import DraftTree
from ecospec.predictors.attention import ATTENTION
from ecospec.predictors.backbone import UnusableBackboneError, check_config, check_tree_passes, reach
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.packing import PackedPass, SlotPool
from ecospec.predictors.placing import place
from ecospec.predictors.pretrained import UNLOADABLE, check_complete, check_folder

WHAT = "drafter 'lm'"


class DraftModel:
    """A causal LM as a `Proposer`: states are rows of logits."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name
        self.layers, self.reach = int(model.config.num_hidden_layers), reach(model.config)
        self.draft_vocab_size = int(model.get_output_embeddings().weight.shape[0])
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cache: SlotCache | PackedPass,
        mask: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Logits [m, V] of a pass over tokens [N]; of all of them, or of those in ``rows``, int64 [m]."""
        keep = {"logits_to_keep": rows} if self._keeps and rows is not None else {}
        found: Tensor = self.model(
            input_ids=tokens[None],
            position_ids=None if positions is None else positions[None],
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
            **keep,
        ).logits[0]
        return found if keep or rows is None else found[rows]

    def logits(self, states: Tensor) -> Tensor:
        """The states themselves."""
        return states

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """They are the target's."""
        return draft_ids

    def check_reach(self, tokens: int) -> None:
        """Refuse what it has no positions for.

        Raises:
            UserError: a sequence of so many tokens is too long.
        """
        if tokens > self.reach:
            raise UserError(
                f"{WHAT}: {self.name} reads at most {self.reach} tokens, and a prompt with its output and draft has "
                f"come to {tokens}; expected shorter ones, or another drafter"
            )


class LanguageModelBatch(DraftBatch):
    """Requests at one model: one pass a level over the draft nodes of all of them."""

    def __init__(self, model: DraftModel, device: torch.device, capacities: Sequence[int]) -> None:
        self._model, self._device = model, device
        capacity = max(capacities)
        self._pool = SlotPool(model.layers, capacity, len(capacities)) if len(capacities) > 1 else None
        self._caches: list[SlotCache] = (
            [SlotCache(model.layers, capacity)] if self._pool is None else list(self._pool.caches)
        )
        self._roots: list[Tensor | None] = [None] * len(capacities)

    @torch.inference_mode()
    def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
        """Read the prompt and the bonus token."""
        self._read(index, tokens)

    def _read(self, index: int, tokens: Sequence[int]) -> None:
        cache, count = self._caches[index], len(tokens)
        base = cache.length
        self._model.check_reach(base + count)
        ids = torch.tensor(list(tokens), device=self._device)
        mask = None
        if base and count > 1:
            mask = torch.ones(count, base + count, dtype=torch.bool, device=self._device).tril(base)[None, None]
        positions = torch.arange(base, base + count, device=self._device)
        last = torch.tensor([count - 1], device=self._device)
        self._roots[index] = self._model.run(ids, positions, cache, mask, last)
        cache.advance(count)

    @torch.inference_mode()
    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
        """Read what was emitted."""
        if self._pool is None or len(blocks) == 1:
            for index, block in enumerate(blocks):
                self._read(index, block)
            return
        counts = [len(block) for block in blocks]
        starts = [cache.length for cache in self._caches]
        places = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        self._model.check_reach(max(places) + 1)
        width = max(counts)
        causal = torch.ones(width, width, dtype=torch.bool, device=self._device).tril().expand(len(counts), -1, -1)
        packed = PackedPass(self._pool, counts, causal)
        ids = torch.tensor([token for block in blocks for token in block], device=self._device)
        positions = torch.tensor(places, device=self._device)
        ends = torch.from_numpy(np.cumsum(counts) - 1).to(self._device)
        states = self._model.run(ids, positions, packed, packed.mask, ends)
        self._roots = list(states.split(1))
        for cache, count in zip(self._caches, counts, strict=True):
            cache.advance(count)

    @torch.inference_mode()
    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> list[DraftTree]:
        """A dynamic tree for every request; see `draft_trees`."""
        bases = [cache.length for cache in self._caches]
        self._model.check_reach(max(bases) + max(0, max(depths) - 1))
        roots = torch.cat([root for root in self._roots if root is not None])
        ends = torch.tensor(bases, device=self._device)

        def run(tokens: Tensor, hidden: Tensor, depth: int, seen: Tensor) -> Tensor:
            width = seen.shape[1]
            positions = (ends + (depth - 1)).repeat_interleave(width)
            if self._pool is None or len(bases) == 1:
                past = seen.new_ones(width, bases[0])
                mask = torch.cat((past, seen[0]), dim=1)[None, None]
                states = self._model.run(tokens, positions, self._caches[0], mask, None)
            else:
                packed = PackedPass(self._pool, [width] * len(bases), seen)
                states = self._model.run(tokens, positions, packed, packed.mask, None)
            for cache in self._caches:
                cache.advance(width)
            return states

        grown = draft_trees(self._model, roots, bonuses, depths, top_k, run)
        for cache, base in zip(self._caches, bases, strict=True):
            cache.truncate(base)
        return [tree for tree, _ in grown]

    def leave(self, index: int) -> None:
        """Drop the request's memory."""
        del self._roots[index]
        del self._caches[index]
        if self._pool is not None:
            self._pool.leave(index)


class BoundLanguageModel(BoundDrafter):
    """A model beside the target whose vocabulary it shares; it reads nothing of the target."""

    def __init__(self, model: DraftModel, device: torch.device) -> None:
        self.model, self._device = model, device

    def open(self, capacities: Sequence[int]) -> DraftBatch:
        """Empty memories."""
        return LanguageModelBatch(self.model, self._device, capacities)


def bind_language_model(name: str, target: DrafterTarget) -> BoundLanguageModel:
    """Load a causal LM that can draft for a target.

    Args:
        name: a checkpoint folder or a hub name.

    Raises:
        UserError: there is nothing that can be loaded without running code of its own, its vocabulary is another, or
            draft trees do not come out right in it.
    """
    check_folder(WHAT, name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_config(config, target.context)
        _check_size(name, int(config.vocab_size), target)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, with the tensor's name
            output_loading_info=True,
        )
        model.config._attn_implementation = ATTENTION
        check_complete(WHAT, name, report)
        _check_size(name, int(model.get_output_embeddings().weight.shape[0]), target)
        table = model.get_input_embeddings().weight
        if table.shape[1] != model.config.hidden_size:
            raise UnusableBackboneError(
                f"its embeddings are {table.shape[1]} wide, its states {model.config.hidden_size}; expected one width"
            )
        check_tree_passes(model.base_model)
    except UnusableBackboneError as error:
        raise UserError(f"{WHAT}: {name}: {error}") from error
    except (*UNLOADABLE, ImportError) as error:
        reason = one_line(error) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it runs code of its own, which is never done here"
        raise UserError(
            f"{WHAT}: {name}: not loadable as a causal LM with a tokenizer ({reason}); "
            "expected a local checkpoint folder or a hub name that is cached or reachable"
        ) from error
    check_tokenizer(name, tokenizer, target.tokenizer)
    embedding: Tensor = target.embedding
    return BoundLanguageModel(DraftModel(place(model, embedding.device, embedding.dtype), name), embedding.device)


def _check_size(name: str, found: int, target: DrafterTarget) -> None:
    if found != target.vocab_size:
        raise UserError(
            f"{WHAT}: {name}: its vocabulary has {found} tokens, the target's {target.vocab_size}; expected a model "
            "with the target's vocabulary"
        )


def check_tokenizer(name: str, tokenizer: Any, expected: Any) -> None:
    """Compare the two vocabularies token by token: ids that mean other texts would only ever draft nonsense."""
    if expected is None:
        raise UserError(f"{WHAT}: {name}: the target has no tokenizer to compare its vocabulary with")
    own, expected = tokenizer.get_vocab(), expected.get_vocab()
    for token in sorted(own.keys() | expected.keys()):
        if own.get(token) != expected.get(token):
            ids = [f"id {each[token]}" if token in each else "no token" for each in (own, expected)]
            raise UserError(
                f"{WHAT}: {name}: its tokenizer has another vocabulary than the target's: {token!r} is {ids[0]}, in "
                f"the target's {ids[1]}; expected a model with the target's vocabulary"
            )
