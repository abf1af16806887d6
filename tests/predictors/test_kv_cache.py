"""The KV memory against a list of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecospec.policies import DraftTree
from ecospec.predictors.kv_cache import SlotCache, tree_mask

LAYERS, KV_HEADS, SIZE = 2, 2, 3


def states(values: list[float]) -> torch.Tensor:
    """[1, KV_HEADS, n, SIZE], a recognisable number in every row."""
    return torch.tensor(values)[None, None, :, None].expand(1, KV_HEADS, -1, SIZE)


def rows_of(memory: torch.Tensor) -> list[float]:
    assert memory.shape[0] == 1
    assert memory.shape[1] == KV_HEADS
    assert memory.shape[3] == SIZE
    assert (memory == memory[:, :1, :, :1]).all()
    return [float(value) for value in memory[0, 0, :, 0]]


def test_any_history_of_passes_keeps_what_a_list_keeps() -> None:
    rng = np.random.default_rng(0)
    cache, kept = SlotCache(LAYERS, capacity=60), []
    written = 0
    for _ in range(200):
        n = int(rng.integers(1, 7))
        if len(kept) + n > cache.capacity:
            cut = int(rng.integers(0, len(kept)))
            cache.truncate(cut)
            kept = kept[:cut]
        new = [float(v) for v in range(written, written + n)]
        written += n
        for layer in range(LAYERS):
            keys, values = cache.update(states([v + 0.25 * layer for v in new]), states([-v for v in new]), layer)
            assert rows_of(keys) == [v + 0.25 * layer for v in (*kept, *new)]
            assert rows_of(values) == [-v for v in (*kept, *new)]
        action = rng.integers(0, 3)
        if action == 0:
            count = int(rng.integers(0, n + 1))
            cache.advance(count)
            kept += new[:count]
        elif action == 1:
            rows = sorted(rng.choice(n, size=int(rng.integers(0, n + 1)), replace=False).tolist())
            cache.keep(rows)
            kept += [new[row] for row in rows]
        assert cache.length == cache.get_seq_length() == cache.get_query_offset() == len(kept)
        for layer in range(LAYERS):
            keys, values = cache.kept(layer)
            assert rows_of(keys) == [v + 0.25 * layer for v in kept]
            assert rows_of(values) == [-v for v in kept]
    assert written > 300


def test_rows_written_in_inference_mode_can_be_kept_outside_it() -> None:
    cache = SlotCache(1, 4)
    with torch.inference_mode():
        cache.update(states([1.0, 2.0, 3.0]), states([1.0, 2.0, 3.0]), 0)
    cache.keep([0, 2])
    assert rows_of(cache.kept(0)[0]) == [1.0, 3.0]


def test_a_full_memory_refuses_another_row() -> None:
    cache = SlotCache(1, 3)
    cache.update(states([1.0, 2.0]), states([1.0, 2.0]), 0)
    cache.advance(2)
    with pytest.raises(RuntimeError, match="KV memory of 3 tokens cannot take 4"):
        cache.update(states([3.0, 4.0]), states([3.0, 4.0]), 0)
    assert rows_of(cache.kept(0)[0]) == [1.0, 2.0]


@pytest.mark.parametrize("length", [-1, 3])
def test_truncating_to_a_length_it_does_not_have_is_an_error(length: int) -> None:
    cache = SlotCache(1, 3)
    cache.update(states([1.0, 2.0]), states([1.0, 2.0]), 0)
    cache.advance(2)
    with pytest.raises(ValueError, match=f"cannot truncate 2 tokens to {length}"):
        cache.truncate(length)


def test_a_layer_that_was_not_written_has_nothing_to_give() -> None:
    with pytest.raises(ValueError, match="layer 1 has not been written"):
        SlotCache(2, 3).kept(1)


def test_mask_builders_are_told_of_kept_and_new_tokens() -> None:
    cache = SlotCache(1, 8)
    cache.advance(5)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.get_max_cache_shape() == 8
    assert cache.is_sliding == [False]


def test_a_tree_node_sees_the_past_and_its_own_ancestors() -> None:
    tree = DraftTree(np.arange(4), np.array([-1, 0, 0, 1]), np.ones(4))
    mask = tree_mask(torch.tensor(tree.ancestors), past=2)
    assert mask.shape == (1, 1, 4, 6)
    assert mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]
