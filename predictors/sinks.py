"""Attention whose scores are capped, or share their softmax with a sink: what the fused kernel cannot do.

A sink is one more score for every head, which takes part in the softmax and has no value: what it takes is lost. The
scores are worked out in float32, for some queries at a time, straight from the KV memory as it lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERIES_AT_ONCE = 256
"""Queries whose scores are held at the same time; bounds the memory of a long prompt."""


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap · tanh(q·k · scaling / cap) and the sinks) · v, with G query heads per key head.

    Args:
        query: [B, heads, n, D]. key, value: [B, kv_heads, t, D].
        mask: bool or additive [B or 1, 1, n, t]; None means causal, with the n queries last.
        scaling: None means 1 / √D.
        sinks: [heads], one score each. softcap: the cap; None for no cap.

    Returns:
        [B, heads, n, value's D], in the values' dtype.
    """
    n, total = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, n, QUERIES_AT_ONCE):
        end = min(n, start + QUERIES_AT_ONCE)
        if mask is None:
            seen = total - n + end  # keys behind are in nobody's past
            some = None
            if end - start > 1:
                some = torch.ones(end - start, seen, dtype=torch.bool, device=query.device)
                some = some.tril(seen - (end - start))[None, None]
        else:
            seen, some = total, mask[:, :, start:end]
        part = query[:, :, start:end]
        parts.append(_some(part, key[:, :, :seen], value[:, :, :seen], some, scaling, sinks, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _some(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    batch, heads, n, size = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * n, size)
    scores = (folded @ key.transpose(2, 3)).float() * (size**-0.5 if scaling is None else scaling)
    scores = scores.view(batch, kv_heads, heads // kv_heads, n, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        by_group = mask[:, :, None]
        scores = scores.masked_fill(~by_group, float("-inf")) if mask.dtype == torch.bool else scores + by_group
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, kv_heads, -1, 1, 1)
        most = torch.maximum(scores.amax(-1, keepdim=True), sink)
        parts = (scores - most).exp()
        shares = parts / (parts.sum(-1, keepdim=True) + (sink - most).exp())
    out: Tensor = shares.to(value.dtype).flatten(2, 3) @ value
    return out.reshape(batch, heads, n, value.shape[-1])
