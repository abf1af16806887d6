"""Several sequences in one pass, against each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ecospec.predictors.attention import grouped_sdpa
from ecospec.predictors.kv_cache import SlotCache, tree_mask
from ecospec.predictors.packing import PACKING, PackedPass, PooledCache, SlotPool

LAYERS, HEADS, KV_HEADS, SIZE, CAPACITY = 2, 4, 2, 8, 40


def random_ancestors(rng: np.random.Generator, size: int) -> Tensor:
    """bool [n, n], the ancestors of a tree of any shape."""
    seen = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        seen[node] |= seen[int(rng.integers(0, node))]
    return seen


def padded(blocks: list[Tensor]) -> Tensor:
    width = max(len(block) for block in blocks)
    seen = torch.zeros(len(blocks), width, width, dtype=torch.bool)
    for row, block in enumerate(blocks):
        seen[row, : len(block), : len(block)] = block
    return seen


def random_states(count: int, heads: int) -> Tensor:
    return torch.randn(1, heads, count, SIZE)


def filled(lengths: list[int]) -> tuple[SlotPool, list[SlotCache]]:
    """A pool, and caches by themselves, with the same random contents of these lengths."""
    pool, alone = SlotPool(LAYERS, CAPACITY, len(lengths)), [SlotCache(LAYERS, CAPACITY) for _ in lengths]
    for pooled, own, length in zip(pool.caches, alone, lengths, strict=True):
        for layer in range(LAYERS):
            keys, values = random_states(length, KV_HEADS), random_states(length, KV_HEADS)
            for cache in (pooled, own):
                cache.update(keys, values, layer)
        pooled.advance(length)
        own.advance(length)
    return pool, alone


def assert_same_contents(pool: SlotPool, alone: list[SlotCache]) -> None:
    assert len(pool.caches) == len(alone)
    assert sorted(cache.row for cache in pool.caches) == list(range(len(alone)))
    for pooled, own in zip(pool.caches, alone, strict=True):
        assert pooled.length == own.length
        for layer in range(LAYERS):
            for ours, theirs in zip(pooled.kept(layer), own.kept(layer), strict=True):
                assert torch.equal(ours, theirs)


def one_pass(pool: SlotPool, alone: list[SlotCache], blocks: list[Tensor]) -> None:
    """The same tokens into the pool at once and into each cache alone, with the same attention."""
    counts = [len(block) for block in blocks]
    packed = PackedPass(pool, counts, padded(blocks))
    for layer in range(LAYERS):
        query, key, value = (random_states(sum(counts), heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        keys, values = packed.update(key, value, layer)
        ours = grouped_sdpa(query, keys, values, packed.mask, None)
        theirs = []
        parts = zip(*(states.split(counts, dim=2) for states in (query, key, value)), strict=True)
        for cache, block, (one_query, one_key, one_value) in zip(alone, blocks, parts, strict=True):
            own_keys, own_values = cache.update(one_key, one_value, layer)
            theirs.append(grouped_sdpa(one_query, own_keys, own_values, tree_mask(block, cache.length), None))
        torch.testing.assert_close(ours, torch.cat(theirs, dim=2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_a_pool_is_that_of_its_sequences_alone(seed: int) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pool, alone = filled([int(n) for n in rng.integers(1, 9, int(rng.integers(2, 6)))])
    while len(alone) > 1:
        for _ in range(3):
            blocks = [random_ancestors(rng, int(rng.integers(1, 6))) for _ in alone]
            one_pass(pool, alone, blocks)
            kept = [sorted(rng.choice(len(b), int(rng.integers(0, len(b))), replace=False).tolist()) for b in blocks]
            pool.keep(kept)
            for cache, rows in zip(alone, kept, strict=True):
                cache.keep(rows)
            assert_same_contents(pool, alone)
        gone = int(rng.integers(0, len(alone)))
        pool.leave(gone)
        del alone[gone]
        assert_same_contents(pool, alone)


def test_nodes_drafted_before_are_part_of_what_a_window_says() -> None:
    """The levels of a draft tree: each pass has two tokens, which see some of the four of this and the last."""
    torch.manual_seed(0)
    pool, alone = filled([3, 5])
    first = torch.eye(2, dtype=torch.bool)
    one_pass(pool, alone, [first, first])
    for cache in (*pool.caches, *alone):
        cache.advance(2)
    window = torch.tensor([[[1, 0, 1, 0], [1, 0, 0, 1]], [[0, 1, 1, 0], [1, 0, 0, 1]]], dtype=torch.bool)
    packed = PackedPass(pool, [2, 2], window)
    query, key, value = (random_states(4, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    ours = grouped_sdpa(query, *packed.update(key, value, 0), packed.mask, None)
    theirs = []
    for row, cache in enumerate(alone):
        rows = slice(2 * row, 2 * row + 2)
        keys, values = cache.update(key[:, :, rows], value[:, :, rows], 0)
        mask = torch.cat((torch.ones(2, cache.length - 2, dtype=torch.bool), window[row]), dim=1)[None, None]
        theirs.append(grouped_sdpa(query[:, :, rows], keys, values, mask, None))
    torch.testing.assert_close(ours, torch.cat(theirs, dim=2))


def test_a_pass_with_every_place_taken_needs_no_gathering() -> None:
    pool, _ = filled([3, 5, 2])
    dense = PackedPass(pool, [2, 2, 2], padded([torch.eye(2, dtype=torch.bool)] * 3))
    ragged = PackedPass(pool, [2, 1, 2], padded([torch.eye(n, dtype=torch.bool) for n in (2, 1, 2)]))
    assert getattr(dense.mask, PACKING).places is None
    assert getattr(ragged.mask, PACKING).places.tolist() == [0, 1, 2, 4, 5]
    assert dense.mask.shape == (3, 1, 2, 5 + 2)


def test_a_pool_refuses_more_than_it_can_hold() -> None:
    pool, _ = filled([CAPACITY - 1, 3])
    with pytest.raises(RuntimeError, match="KV memory of 40 tokens cannot take 41"):
        PackedPass(pool, [2, 2], padded([torch.eye(2, dtype=torch.bool)] * 2))


def test_a_row_that_moves_takes_its_tokens_along() -> None:
    pool, alone = filled([3, 5, 2])
    last: PooledCache = pool.caches[2]
    pool.leave(0)
    assert last.row == 0
    assert_same_contents(pool, alone[1:])


def test_what_mask_builders_ask_of_a_pass() -> None:
    pool, _ = filled([3, 5])
    packed = PackedPass(pool, [1, 1], torch.ones(2, 1, 1, dtype=torch.bool))
    assert packed.get_seq_length() == packed.get_query_offset() == 5
    assert packed.get_mask_sizes(2) == (6, 0)
    assert packed.get_max_cache_shape() == CAPACITY
    assert packed.is_sliding == [False]
