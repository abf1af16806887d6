"""Grouped attention against the formula written out."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from ecospec.predictors.attention import grouped_sdpa


def naive(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """softmax(q·k·scaling) v, one head at a time; query head h reads key head h // group."""
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head] @ key[batch, head // group].T * scaling
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[batch, head] = weights @ value[batch, head // group]
    return out


def drawn(heads: int, kv_heads: int, n: int, total: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(heads * 100 + n * 10 + total)
    return (
        torch.randn(batch, heads, n, 8),
        torch.randn(batch, kv_heads, total, 8),
        torch.randn(batch, kv_heads, total, 8),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 9), (5, 5), (5, 9)])
def test_without_a_mask_it_is_causal_with_the_queries_last(heads: int, kv_heads: int, n: int, total: int) -> None:
    query, key, value = drawn(heads, kv_heads, n, total)
    visible = torch.tensor([[j <= total - n + i for j in range(total)] for i in range(n)])
    torch.testing.assert_close(grouped_sdpa(query, key, value, None, None), naive(query, key, value, visible, 8**-0.5))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_applies_to_every_head_of_a_group(heads: int, kv_heads: int, additive: bool) -> None:
    query, key, value = drawn(heads, kv_heads, 5, 9)
    visible = torch.rand(5, 9) < 0.5
    visible[:, 0] = True
    mask = torch.zeros(5, 9).masked_fill(~visible, float("-inf")) if additive else visible
    torch.testing.assert_close(
        grouped_sdpa(query, key, value, mask[None, None], 0.3), naive(query, key, value, visible, 0.3)
    )


def test_rows_of_a_batch_can_have_masks_of_their_own() -> None:
    query, key, value = drawn(4, 2, 3, 6)
    mask = torch.rand(2, 1, 3, 6) < 0.5
    mask[..., 0] = True
    together = grouped_sdpa(query, key, value, mask, None)
    for row in range(2):
        alone = naive(query[row : row + 1], key[row : row + 1], value[row : row + 1], mask[row, 0], 8**-0.5)
        torch.testing.assert_close(together[row : row + 1], alone)


def test_a_library_model_gives_the_same_under_it() -> None:
    plain, ours = tiny_model("llama"), tiny_model("llama")
    ours.set_attn_implementation("ecospec_sdpa")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, atol=1e-4, rtol=0)


def test_values_may_have_a_size_of_their_own() -> None:
    query, key, value = drawn(4, 2, 3, 7)
    wide = torch.cat((value, value * 2), dim=-1)
    narrow = grouped_sdpa(query, key, value, None, None)
    torch.testing.assert_close(grouped_sdpa(query, key, wide, None, None), torch.cat((narrow, narrow * 2), dim=-1))
