"""The forward pass of an EAGLE-3 head, written out entry by entry and head by head from the description of the
published heads; nothing of it comes from the modules under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from eagle3_checkpoints import (
    EPS,
)
from tiny_models import (
    HIDDEN,
    VOCAB,
)
from torch import Tensor

from ecospec.harness.drafting import DrafterSession
from ecospec.harness.eagle3 import FLAGS, Eagle3Head


@dataclass(frozen=True)
class Description:
    """A head as its description has it: sizes, flags, and the frequency of each rotary pair with their scale."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    flags: tuple[str, ...] = ()
    frequencies: list[float] = field(default_factory=lambda: default_frequencies(8))
    scale: float = 1.0


def default_frequencies(head_dim: int, theta: float = 10000.0) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + EPS) * weight


def rotated(x: Tensor, position: int, of: Description) -> Tensor:
    half = of.head_dim // 2
    out = torch.empty_like(x)
    for i, frequency in enumerate(of.frequencies):
        cosine, sine = (of.scale * f(position * frequency) for f in (math.cos, math.sin))
        out[i] = x[i] * cosine - x[i + half] * sine
        out[i + half] = x[i + half] * cosine + x[i] * sine
    return out


def fused(w: dict[str, Tensor], features: Tensor, of: Description) -> Tensor:
    """h [H] of the target's three states [3·Ht]."""
    parts = [features[i * HIDDEN : (i + 1) * HIDDEN] for i in range(3)]
    if "fc_norm" in of.flags:
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    joined = torch.cat(parts)
    if "norm_before_fc" in of.flags:
        joined = rms(joined, w["input_norm.weight"])
    return w["fc.weight"] @ joined


def last_state(
    w: dict[str, Tensor], entries: Sequence[tuple[Tensor, Tensor]], of: Description
) -> tuple[Tensor, Tensor]:
    """Recurrent state [H] and logits [D] of the last of some entries (embedding, hidden state)."""
    query, keys, values = [torch.empty(0)], [], []
    for position, (embedding, hidden) in enumerate(entries):
        x = torch.cat(
            (rms(embedding, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"]))
        )
        projected = {part: w[f"midlayer.self_attn.{part}_proj.weight"] @ x for part in "qkv"}
        query = [rotated(q, position, of) for q in projected["q"].split(of.head_dim)]
        keys.append([rotated(k, position, of) for k in projected["k"].split(of.head_dim)])
        values.append(list(projected["v"].split(of.head_dim)))
    attended = []
    for head in range(of.heads):
        shared = head // (of.heads // of.kv_heads)
        scores = torch.stack([query[head] @ key[shared] / math.sqrt(of.head_dim) for key in keys]).softmax(0)
        attended.append(sum((s * v[shared] for s, v in zip(scores, values, strict=True)), torch.zeros(of.head_dim)))
    hidden = entries[-1][1]
    residual = rms(hidden, w["midlayer.hidden_norm.weight"]) if "norm_before_residual" in of.flags else hidden
    residual = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
    x = rms(residual, w["midlayer.post_attention_layernorm.weight"])
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
    out = residual + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    normed = rms(out, w["norm.weight"])
    return normed if "norm_output" in of.flags else out, w["lm_head.weight"] @ normed


EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
FEATURES = torch.randn(6, 3 * HIDDEN, generator=torch.Generator().manual_seed(6)) * 2
FOLLOWING = [3, 40, 12, 63, 0, 21]


def drafted_by(head: Eagle3Head) -> tuple[list[int], Tensor, Tensor]:
    """A chain of three that a running session drafts, with the states and logits it came from."""
    session = DrafterSession(head.eval().requires_grad_(False), EMBEDDING, 20)
    session.extend(FOLLOWING, FEATURES)
    tree = session.draft(FOLLOWING[-1], 3, 1)
    assert session.drafted is not None
    states = session.drafted[1].states
    with torch.inference_mode():
        logits = head.logits(states)
    return [int(token) for token in tree.tokens[1:]], states, logits


def assert_computes(head: Eagle3Head, tensors: dict[str, Tensor], of: Description) -> None:
    """Its states and logits over three draft steps are those of the description."""
    tokens, states, logits = drafted_by(head)
    w = {name: tensor.float() for name, tensor in tensors.items()}
    table = w.get("embed_tokens.weight", EMBEDDING)
    entries = [(table[t], fused(w, row, of)) for t, row in zip(FOLLOWING, FEATURES, strict=True)]
    for step in range(3):
        state, expected = last_state(w, entries, of)
        torch.testing.assert_close(states[step], state, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[step], expected, atol=1e-3, rtol=1e-3)
        best = int(expected.argmax())
        assert tokens[step] == best + (int(tensors["d2t"][best]) if "d2t" in tensors else 0)
        entries.append((table[tokens[step]], state))


FLAG_SETS = [(), *((flag,) for flag in FLAGS), ("norm_before_residual", "norm_output"), FLAGS]
