"""The multi-token-prediction layer written out: one sequence, everything anew, a loop over heads and tokens."""

from __future__ import annotations

import math
from typing import Any

import tiny_deepseek as tiny
import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 8,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def frequency(i: int, size: int, yarn: bool) -> float:
    """Of pair i: as it is, stretched, or in between by the number of turns within the original positions."""
    plain = 10000.0 ** (-2 * i / size)
    if not yarn:
        return plain

    def pair_of(turns: float) -> float:
        return size * math.log(YARN["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = max(0, math.floor(pair_of(YARN["beta_fast"]))), min(size - 1, math.ceil(pair_of(YARN["beta_slow"])))
    share = min(1.0, max(0.0, (i - low) / (high - low)))
    return plain / YARN["factor"] * share + plain * (1 - share)


def turned(x: Tensor, position: int, yarn: bool) -> Tensor:
    """Pairs of neighbours, each turned by its own frequency."""
    size, out = x.shape[-1], torch.empty_like(x)
    for i in range(size // 2):
        angle = position * frequency(i, size, yarn)
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def attention(w: dict[str, Tensor], x: Tensor, yarn: bool) -> Tensor:
    f = tiny.FACTS
    heads, nope, rope, v = (f[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    a = {name.removeprefix("self_attn."): t for name, t in w.items() if name.startswith("self_attn.")}
    q = norm(x @ a["q_a_proj.weight"].T, a["q_a_layernorm.weight"]) @ a["q_b_proj.weight"].T
    both = x @ a["kv_a_proj_with_mqa.weight"].T
    latent, shared = both[:, : f["kv_lora_rank"]], both[:, f["kv_lora_rank"] :]
    kv = norm(latent, a["kv_a_layernorm.weight"]) @ a["kv_b_proj.weight"].T
    n, out = len(x), []
    shared = torch.stack([turned(shared[t], t, yarn) for t in range(n)])
    scale = (1 + 0.1 * math.log(YARN["factor"])) ** 2 if yarn else 1.0
    for head in range(heads):
        of_q = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
        of_q = torch.cat((of_q[:, :nope], torch.stack([turned(of_q[t, nope:], t, yarn) for t in range(n)])), 1)
        of_kv = kv[:, head * (nope + v) : (head + 1) * (nope + v)]
        of_k = torch.cat((of_kv[:, :nope], shared), 1)
        scores = scale * of_q @ of_k.T / math.sqrt(nope + rope)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        out.append(scores.softmax(-1) @ of_kv[:, nope:])
    return torch.cat(out, 1) @ a["o_proj.weight"].T


def expert(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"mlp.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(w: dict[str, Tensor], x: Tensor) -> Tensor:
    f, rows = tiny.FACTS, []
    for row in x:
        scores = 1 / (1 + torch.exp(-(w["mlp.gate.weight"] @ row)))
        choice = scores + w["mlp.gate.e_score_correction_bias"]
        per = tiny.EXPERTS // f["n_group"]
        groups = [
            float(choice[g * per : (g + 1) * per].sort(descending=True).values[:2].sum()) for g in range(f["n_group"])
        ]
        kept = sorted(range(f["n_group"]), key=lambda g: -groups[g])[: f["topk_group"]]
        open_to = [e for g in kept for e in range(g * per, (g + 1) * per)]
        chosen = sorted(open_to, key=lambda e: -float(choice[e]))[: f["num_experts_per_tok"]]
        total = sum(float(scores[e]) for e in chosen)
        mixed = expert(w, "shared_experts", row)
        for e in chosen:
            mixed = mixed + f["routed_scaling_factor"] * scores[e] / total * expert(w, f"experts.{e}", row)
        rows.append(mixed)
    return torch.stack(rows)


def transcription(w: dict[str, Tensor], embeddings: Tensor, hidden: Tensor, yarn: bool) -> Tensor:
    """Normed states [n, H] of entries (embedding of the next token, normed state)."""
    x = torch.cat((norm(embeddings, w["enorm.weight"]), norm(hidden, w["hnorm.weight"])), 1) @ w["eh_proj.weight"].T
    x = x + attention(w, norm(x, w["input_layernorm.weight"]), yarn)
    x = x + mixture(w, norm(x, w["post_attention_layernorm.weight"]))
    return norm(x, w["shared_head.norm.weight"])
