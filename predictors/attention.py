"""Scaled-dot-product attention that never copies the KV memory.

With grouped queries and a mask, the library's own SDPA path repeats keys and values for every query head:
at a thousand tokens that costs more than the attention. Folding the heads of a group into the query axis
gives the same numbers from the memory as it lies. Registered with transformers as ``ecospec_sdpa``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ecospec.errors import UserError
from ecospec.predictors.packing import PACKING, Packing
from ecospec.predictors.pass_mask import FIRST
from ecospec.predictors.sight import ATTENTION as ATTENTION
from ecospec.predictors.sight import note_attention
from ecospec.predictors.sinks import attention_with_sinks

_CHANGING = ("position_bias", "indexer_scores", "alibi")
"""What a model may ask of an attention function that changes its numbers and is not done here."""
MOST_FOLDED = 64
"""Longest pass whose mask is folded: it is copied for every head of a group."""


def grouped_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention with G query heads per key head.

    Args:
        query: [B, heads, n, D]. key, value: [B, kv_heads, t, D].
        mask: bool or additive [B or 1, 1, n, t]; None means causal, with the n queries last. The mask of a
            `PackedPass` says which of B rows each of N queries [1, heads, N, D] belongs to; one that begins at a
            later key says so, see `sight.FIRST`.
        sinks, softcap: see `attention_with_sinks`.

    Returns:
        As ``query``.
    """
    packing: Packing | None = getattr(mask, PACKING, None)
    if packing is not None:
        query = packing.spread(query)
    first: int = getattr(mask, FIRST, 0)
    if first:
        key, value = key[:, :, first:], value[:, :, first:]
    if sinks is not None or softcap is not None:
        out = attention_with_sinks(query, key, value, mask, scaling, sinks=sinks, softcap=softcap)
    else:
        out = _fused(query, key, value, mask, scaling)
    return out if packing is None else packing.pack(out)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    batch, heads, n, size = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    if mask is None and n > 1:
        if n == total:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
            )
        mask = torch.ones(n, total, dtype=torch.bool, device=query.device).tril(total - n)[None, None]
    if n > MOST_FOLDED:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads
        )
    group = heads // kv_heads
    folded = query.reshape(batch, kv_heads, group * n, size)
    if mask is not None:
        mask = _folded(mask, group, query.dtype)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, n, value.shape[-1])


def _folded(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A mask for folded queries, additive: [.., n, t] to [.., group · n, t].

    All layers of a pass get the same mask object, so the result is kept on it for the next layer.
    """
    kept: tuple[int, torch.dtype, Tensor] | None = getattr(mask, "_ecospec_folded", None)
    if kept is not None and kept[:2] == (group, dtype):
        return kept[2]
    additive = mask
    if mask.dtype == torch.bool:
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    if group > 1:
        additive = additive.repeat(1, 1, group, 1)
    mask._ecospec_folded = (group, dtype, additive)  # type: ignore[attr-defined]
    return additive


def _attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name in _CHANGING:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} asks for attention with {name}, which is not supported")
    note_attention(module, attention_mask)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    out = grouped_sdpa(query, key, value, attention_mask, scaling, sinks=sinks, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention_forward)
