"""Grouped attention against the formula written out."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from ecospec.errors import UserError
from ecospec.predictors import sinks as sinks_module
from ecospec.predictors.attention import MOST_FOLDED, _attention_forward, grouped_sdpa
from ecospec.predictors.pass_mask import FIRST


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q·k·scaling) v, one head at a time; query head h reads key head h // group.

    The scores may be capped, and a sink is one more key of the softmax, without a value.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head] @ key[batch, head // group].T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(len(scores), 1)), dim=1)
            weights = scores.softmax(-1)[:, : key.shape[2]]
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


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "QUERIES_AT_ONCE", 4)


def causal(n: int, total: int) -> Tensor:
    return torch.tensor([[j <= total - n + i for j in range(total)] for i in range(n)])


@pytest.mark.parametrize("given", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize(("n", "total"), [(1, 7), (5, 5), (5, 9), (11, 30)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("capped", "sunk"), [(False, True), (True, False), (True, True)])
def test_sinks_and_capped_scores(
    given: bool,
    n: int,
    total: int,
    heads: int,
    kv_heads: int,
    capped: bool,
    sunk: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks_module, "QUERIES_AT_ONCE", 4)
    query, key, value = drawn(heads, kv_heads, n, total)
    visible = causal(n, total)
    if given:
        visible = visible & (torch.rand(n, total) < 0.6)
        visible[:, 0] = True
    sinks, softcap = torch.randn(heads) if sunk else None, 1.5 if capped else None
    found = grouped_sdpa(query, key, value, visible[None, None] if given else None, 0.7, sinks=sinks, softcap=softcap)
    torch.testing.assert_close(found, naive(query, key, value, visible, 0.7, sinks, softcap))


def test_a_query_that_sees_nothing_gives_all_to_the_sink() -> None:
    query, key, value = drawn(4, 2, 3, 6)
    visible = torch.ones(3, 6, dtype=torch.bool)
    visible[1] = False
    found = grouped_sdpa(query, key, value, visible[None, None], None, sinks=torch.zeros(4))
    assert (found[:, :, 1] == 0).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("sunk", [False, True])
def test_a_mask_may_begin_at_a_later_key(sunk: bool) -> None:
    query, key, value = drawn(4, 2, 3, 9)
    visible = torch.rand(3, 9) < 0.5
    visible[:, :4], visible[:, 5] = False, True
    cut = visible[None, None, :, 4:].clone()
    setattr(cut, FIRST, 4)
    sinks = torch.randn(4) if sunk else None
    found = grouped_sdpa(query, key, value, cut, 0.3, sinks=sinks)
    torch.testing.assert_close(found, naive(query, key, value, visible, 0.3, sinks))


def test_a_long_pass_with_a_mask_is_the_same_as_a_short_one() -> None:
    n = MOST_FOLDED + 7
    query, key, value = drawn(4, 2, n, n + 9)
    visible = causal(n, n + 9) & (torch.rand(n, n + 9) < 0.5)
    visible[:, 0] = True
    torch.testing.assert_close(
        grouped_sdpa(query, key, value, visible[None, None], 0.3), naive(query, key, value, visible, 0.3)
    )


def test_what_is_not_done_here_is_refused() -> None:
    query, key, value = drawn(4, 2, 3, 9)
    with pytest.raises(UserError, match="Linear asks for attention with position_bias, which is not supported"):
        _attention_forward(torch.nn.Linear(1, 1), query, key, value, None, position_bias=torch.zeros(1))
