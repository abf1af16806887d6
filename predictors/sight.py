"""What the tokens of a forward pass see of one another, for layers that do not see everything.

A model builds the masks of its layers itself, each kind from a rule over two positions: causal, within a sliding
window, within the same chunk. `_mask_function` is how transformers asks for such a mask where attention is ours. It
puts the tokens' true positions into the rule, so that a node of a draft tree has the window of its depth, not of its
place in the pass, and takes away what is no ancestor. So windows need no list of families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from ecospec.predictors.packing import PACKING, Packing
from ecospec.predictors.pass_mask import FIRST, for_several_devices

ATTENTION = "ecospec_sdpa"
"""The name of our attention, `attention.py`, among transformers' own."""


@dataclass(frozen=True)
class Sight:
    """Who sees whom in one pass over A rows of n tokens, with t keys each.

    Attributes:
        seen: bool [A, 1, n, t], as attention takes it.
        queries: int64 [A, n], the tokens' positions.
        keys: int64 [A, t], the keys' positions.
        least: no token of the pass has a smaller position.
    """

    seen: Tensor
    queries: Tensor
    keys: Tensor
    least: int

    @property
    def packing(self) -> Packing | None:
        """Of a pass over several sequences."""
        packing: Packing | None = getattr(self.seen, PACKING, None)
        return packing


@dataclass
class Passing:
    """One forward pass: what it was given, and what the model made of it.

    Attributes:
        sight: who sees whom; None where every token sees all before it.
        spans: how far the layers that do not see everything look back, in tokens.
        given: the masks that were made for the model.
        attended: the attention modules that came to our attention, each with the mask that it brought.
    """

    sight: Sight | None = None
    spans: set[int] = field(default_factory=set)
    given: list[Tensor] = field(default_factory=list)
    attended: list[tuple[Any, Tensor | None]] = field(default_factory=list)


_PASSING: ContextVar[Passing | None] = ContextVar("ecospec_passing", default=None)


@contextmanager
def passing(sight: Sight | None) -> Iterator[Passing]:
    """In this block a model makes its masks by ``sight``; what it does is noted, also in a block around this one."""
    outer = _PASSING.get()
    current = Passing(sight) if outer is None else Passing(sight, outer.spans, outer.given, outer.attended)
    token = _PASSING.set(current)
    try:
        yield current
    finally:
        _PASSING.reset(token)


def note_attention(module: Any, mask: Tensor | None) -> None:
    """Called by our attention for every layer."""
    current = _PASSING.get()
    if current is not None:
        current.attended.append((module, mask))


def _mask_function(
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    device: Any,
    local_size: int | None = None,
    **unused: Any,
) -> Tensor | None:
    """A mask [A, 1, n, t − first] by the rule ``mask_function(batch, head, query, key)``; None means causal.

    Args:
        local_size: how far back a token sees at most, itself included; None where that is all.
    """
    current = _PASSING.get()
    sight = None if current is None else current.sight
    if local_size is not None and current is not None:
        current.spans.add(local_size)
    plain = mask_function is causal_mask_function or (local_size is not None and kv_length <= local_size)
    if plain:
        return None if sight is None else sight.seen
    none = torch.zeros((), dtype=torch.int64, device=device)
    least = q_offset if sight is None else sight.least
    first = 0 if local_size is None else max(0, least - local_size + 1)
    if sight is None:
        queries = torch.arange(q_length, device=device)[None] + q_offset
        keys = torch.arange(first, kv_length, device=device)[None] + kv_offset
        allowed = mask_function(none, none, queries[:, :, None], keys[:, None, :])[:, None]
    else:
        keys = sight.keys[:, first:].to(device)
        allowed = mask_function(none, none, sight.queries.to(device)[:, :, None], keys[:, None, :])[:, None]
        allowed = allowed & sight.seen[..., first:].to(device)
        if sight.packing is not None:
            setattr(allowed, PACKING, sight.packing)
    setattr(allowed, FIRST, first)
    if current is not None:
        current.given.append(allowed)
    return for_several_devices(allowed)


ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask_function)
