"""Several sequences in one forward pass, without padding: their tokens stand one behind the other.

Every layer but attention treats tokens alike, so a pass over N tokens of several sequences is one over a
single row [1, N]: the experts module sees exactly the real tokens, and each activated expert is read once for
all of them. Only attention has to know which sequence a token belongs to; there, queries are laid out as
[rows, n] with gaps, against KV memories that lie in one tensor. See `grouped_sdpa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ecospec.predictors.kv_cache import SlotCache, memory_for

PACKING = "_ecospec_packing"
"""The attribute by which a mask tells attention of its `Packing`."""


@dataclass(frozen=True)
class Packing:
    """Where the N tokens of a pass stand among the rows that attention sees.

    Attributes:
        rows: rows of memory that the pass reads, A.
        width: most tokens of one row, n.
        places: int64 [N], row · n + slot of each token; None where all A · n places are taken in order.
    """

    rows: int
    width: int
    places: Tensor | None

    def to(self, device: torch.device) -> Packing:
        """The same for tokens on another device."""
        return Packing(self.rows, self.width, None if self.places is None else self.places.to(device))

    def spread(self, packed: Tensor) -> Tensor:
        """[1, heads, N, D] to [A, heads, n, D]; places without a token hold zeros."""
        tokens: Tensor = packed[0].transpose(0, 1)
        if self.places is not None:
            spread = tokens.new_zeros(self.rows * self.width, *tokens.shape[1:])
            spread[self.places] = tokens
            tokens = spread
        return tokens.view(self.rows, self.width, *tokens.shape[1:]).transpose(1, 2)

    def pack(self, spread: Tensor) -> Tensor:
        """[A, heads, n, D] to [1, heads, N, D], the inverse of `spread`."""
        tokens: Tensor = spread.transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            tokens = tokens[self.places]
        return tokens.transpose(0, 1)[None]


class PooledCache(SlotCache):
    """The memory of one sequence in a pool; alone it is used like any `SlotCache`."""

    def __init__(self, pool: SlotPool, num_layers: int, capacity: int, row: int) -> None:
        super().__init__(num_layers, capacity)
        self.row = row
        self._pool = pool

    def _allocate(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._pool.memory(layer_idx, key_states, value_states)
        return keys[self.row : self.row + 1], values[self.row : self.row + 1]

    def move(self, row: int) -> None:
        """Look at another row of the pool, to which the contents have been copied."""
        self.row = row
        self._keys, self._values = [None] * len(self._keys), [None] * len(self._values)
        for layer, memory in self._pool.written():
            self._keys[layer], self._values[layer] = (half[row : row + 1] for half in memory)


class SlotPool:
    """KV memories of several sequences as the rows of one tensor a layer.

    Attributes:
        caches: of the sequences that are still there, in their order; they fill the first rows, in any order.
    """

    def __init__(self, num_layers: int, capacity: int, rows: int) -> None:
        self.capacity = capacity
        self._size = rows
        self._memory: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.caches = [PooledCache(self, num_layers, capacity, row) for row in range(rows)]

    def memory(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, capacity, head_dim] of a layer, allocated by its first pass."""
        found = self._memory[layer_idx]
        if found is None:
            keys, values = (memory_for(states, self._size, self.capacity) for states in (key_states, value_states))
            found = self._memory[layer_idx] = (keys, values)
        return found

    def written(self) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        """The layers that have been written, with their keys and values."""
        return [(layer, memory) for layer, memory in enumerate(self._memory) if memory is not None]

    @torch.inference_mode()
    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """As `SlotCache.keep`, for every sequence: the rows of its part of the last pass that stay."""
        moves = [
            (cache.row, cache.length + source, cache.length + target)
            for cache, rows in zip(self.caches, kept, strict=True)
            for target, source in enumerate(rows)
            if source != target
        ]
        if moves:
            facts: dict[torch.device, Tensor] = {}  # layers may lie on several devices
            for half in [half for _, memory in self.written() for half in memory]:
                if half.device not in facts:
                    facts[half.device] = torch.tensor(moves, device=half.device)
                row, source, target = facts[half.device].unbind(1)
                half[row, :, target] = half[row, :, source]
        for cache, rows in zip(self.caches, kept, strict=True):
            cache.length += len(rows)

    @torch.inference_mode()
    def leave(self, index: int) -> None:
        """Drop the sequence at ``index`` of `caches`; another takes its row where there would be a gap."""
        gone = self.caches.pop(index)
        last = next((cache for cache in self.caches if cache.row == len(self.caches)), None)
        if last is None:
            return
        for _, memory in self.written():
            for half in memory:
                half[gone.row, :, : last.length] = half[last.row, :, : last.length]
        last.move(gone.row)


class PackedPass(Cache):
    """One forward pass over tokens of all sequences of a pool; given to a model in a cache's place.

    It writes behind each sequence's kept tokens; who made it says afterwards what stays.

    Attributes:
        mask: bool [A, 1, n, t] that goes with it, which carries the `Packing`.
    """

    def __init__(self, pool: SlotPool, counts: Sequence[int], seen: Tensor) -> None:
        """Prepare a pass.

        Args:
            counts: tokens of each sequence in the pass, at least one each.
            seen: bool [A, n, w], n the largest count: which of its own last w tokens each token sees, in the
                pool's order; of these, the last n are those of the pass. It sees all tokens before them.
        """
        super().__init__(layers=[])
        self._pool = pool
        device, (rows, width, window) = seen.device, seen.shape
        order = sorted(range(rows), key=lambda i: pool.caches[i].row)
        in_order = order == list(range(rows))
        starts = [pool.caches[i].length - (window - width) for i in order]
        self._length = max(start + window for start in starts)
        if self._length > pool.capacity:
            raise RuntimeError(f"KV memory of {pool.capacity} tokens cannot take {self._length}")
        flat = [
            (cache.row, cache.length + slot, cache.row * width + slot)
            for cache, count in zip(pool.caches, counts, strict=True)
            for slot in range(count)
        ]
        facts = torch.tensor(flat, device=device)
        self._rows_and_columns, self._places = {device: facts[:, :2]}, facts[:, 2]
        dense = [place for _, _, place in flat] == list(range(rows * width))
        packing = Packing(rows, width, None if dense else self._places)
        first = torch.tensor(starts, device=device)[:, None]
        mask = (torch.arange(self._length, device=device) < first)[:, None].repeat(1, width, 1)
        columns = (first + torch.arange(window, device=device))[:, None].expand(-1, width, -1)
        mask.scatter_(2, columns, seen if in_order else seen[order])
        self.mask = mask[:, None]
        setattr(self.mask, PACKING, packing)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, N, head_dim] to where they belong; returns views [A, kv_heads, t, head_dim]."""
        views = []
        device = key_states.device  # that of this layer
        if device not in self._rows_and_columns:
            self._rows_and_columns[device] = next(iter(self._rows_and_columns.values())).to(device)
        rows, columns = self._rows_and_columns[device].unbind(1)
        for half, states in zip(
            self._pool.memory(layer_idx, key_states, value_states), (key_states, value_states), strict=True
        ):
            half[rows, :, columns] = states[0].transpose(0, 1)
            views.append(half[: len(self._pool.caches), :, : self._length])
        return views[0], views[1]

    def positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where all stand: the queries [A, n] and the keys [A, t], from the positions [N] of the pass's tokens."""
        rows, width = self.mask.shape[0], self.mask.shape[2]
        queries = positions.new_zeros(rows * width)
        queries[self._places] = positions
        keys = torch.arange(self._length, device=positions.device).repeat(rows, 1)
        keys[self._rows_and_columns[positions.device].unbind(1)] = positions
        return queries.view(rows, width), keys

    @property
    def least(self) -> int:
        """Fewest kept tokens of a sequence."""
        return min(cache.length for cache in self._pool.caches)

    # What transformers' mask builders ask of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Most kept tokens of a sequence."""
        return max(cache.length for cache in self._pool.caches)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(number of keys, offset of the first key)."""
        return self._length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The capacity in tokens."""
        return self._pool.capacity

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets."""
        return [False]
