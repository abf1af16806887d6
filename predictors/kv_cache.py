"""A preallocated KV memory that is written in place and rolls back to any subset of the last rows.

One object serves the target, the drafter and the predictor. A forward pass over n tokens writes its keys
and values behind the kept ones; the caller then says which of the n rows to keep. Nothing is allocated or
concatenated while decoding, and a rejected row needs no clean-up: it is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """KV memory of one sequence for ``num_layers`` attention layers and at most ``capacity`` tokens.

    It is a transformers `Cache`: attention modules call `update`, mask builders ask for lengths. Keys and
    values are [1, kv_heads, capacity, head_dim], allocated by each layer's first pass in its own dtype and
    device.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write n rows behind the kept ones; returns views [1, kv_heads, length + n, head_dim]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys, values = self._allocate(layer_idx, key_states, value_states)
            self._keys[layer_idx], self._values[layer_idx] = keys, values
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            raise RuntimeError(f"KV memory of {self.capacity} tokens cannot take {end}")
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def _allocate(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        return memory_for(key_states, 1, self.capacity), memory_for(value_states, 1, self.capacity)

    def advance(self, count: int) -> None:
        """Keep the first ``count`` rows of the last pass."""
        self.length += count

    @torch.inference_mode()  # the memory belongs to the inference passes that wrote it
    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows`` (strictly increasing indices into the last pass), packed behind the kept ones."""
        if list(rows) != list(range(len(rows))):
            for memory in (*self._keys, *self._values):
                if memory is not None:
                    index = torch.tensor(rows, device=memory.device) + self.length
                    memory[:, :, self.length : self.length + len(rows)] = memory[:, :, index]
        self.length += len(rows)

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length

    def kept(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views [1, kv_heads, length, head_dim] of what is kept."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            raise ValueError(f"layer {layer_idx} has not been written")
        return keys[:, :, : self.length], values[:, :, : self.length]

    # What transformers' mask builders ask of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of kept tokens."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(number of keys, offset of the first key) of a pass over ``query_length`` tokens."""
        return self.length + int(query_length), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The capacity in tokens."""
        return self.capacity

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets."""
        return [False] * len(self._keys)


def memory_for(states: Tensor, rows: int, capacity: int) -> Tensor:
    """Empty memory [rows, kv_heads, capacity, head_dim] for states [1, kv_heads, n, head_dim]."""
    return states.new_zeros(rows, states.shape[1], capacity, states.shape[-1])


def tree_mask(ancestors: Tensor, past: int) -> Tensor:
    """The 4-D mask of a pass over tree nodes: each sees all ``past`` tokens and its own ancestors.

    Args:
        ancestors: bool [n, n], row i true at i and at its ancestors.
        past: number of kept tokens.

    Returns:
        bool [1, 1, n, past + n].
    """
    n = ancestors.shape[0]
    seen = torch.ones(n, past, dtype=torch.bool, device=ancestors.device)
    return torch.cat((seen, ancestors), dim=1)[None, None]
