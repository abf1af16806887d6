"""An EAGLE-3 head: three target states, one decoder layer, its own vocabulary.

The module's parameter names are those of the published checkpoints (``midlayer.*``), so that loading is a
plain state-dict load in which every tensor is used or named in an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ecospec.errors import UserError
from ecospec.predictors.attention import grouped_sdpa
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.packing import PackedPass

# Variants of the published layout that this module does not compute; ignoring one costs most of the acceptance.
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config:
    """What a head's ``config.json`` says.

    Attributes:
        llama: sizes of the one decoder layer, as a LlamaConfig.
        target_hidden_size: Ht, size of one target state.
        draft_vocab_size: D, tokens the head can propose.
        feature_layers: indices of the target layers whose outputs are read; None when the file names none.
    """

    llama: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] | None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Eagle3Config:
        """Read the published layout.

        Raises:
            ValueError: it asks for what is not supported; LlamaConfig raises errors of its own.
        """
        eagle = raw.get("eagle_config") or {}
        for flag in UNSUPPORTED:
            if raw.get(flag) or eagle.get(flag):
                raise ValueError(f"{flag} is not supported yet")
        if raw.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers is {raw['num_hidden_layers']}, expected 1")
        llama = LlamaConfig(**{k: v for k, v in raw.items() if k not in ("eagle_config", "draft_vocab_size")})
        layers = eagle.get("eagle_aux_hidden_state_layer_ids")
        return cls(
            llama=llama,
            target_hidden_size=int(raw.get("target_hidden_size") or llama.hidden_size),
            draft_vocab_size=int(raw.get("draft_vocab_size") or llama.vocab_size),
            feature_layers=None if layers is None else tuple(int(i) for i in layers),
        )


def default_feature_layers(target_layers: int) -> tuple[int, int, int]:
    """Outputs of a low, a middle and a high layer: 1, L/2 − 1, L − 4, as the published heads use."""
    return (1, target_layers // 2 - 1, target_layers - 4)


class Eagle3Attention(nn.Module):
    """Attention whose input is twice the hidden size: [embedding, hidden state]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)

    def project(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, n, D], rotated keys and values [B, kv_heads, n, D]."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            layer(states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return query, key, value

    def combine(self, attended: Tensor) -> Tensor:
        """[B, heads, n, D] to [B, n, H]."""
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class Eagle3Layer(nn.Module):
    """The decoder layer: norms of embedding and hidden state, attention, feed-forward, two residuals."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[B, n, 2H]: the normed embedding first, then the normed hidden state."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residuals and feed-forward; [B, n, H], before the final norm."""
        hidden = hidden + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The head. Its recurrent state is the layer's output before the final norm."""

    d2t: Tensor
    own_embedding: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        llama = config.llama
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, llama.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(llama)
        self.norm = nn.RMSNorm(llama.hidden_size, eps=llama.rms_norm_eps)
        self.lm_head = nn.Linear(llama.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        # Offset from a draft id to its target id; zero when the vocabularies are one.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long), persistent=False)
        # The head's own embedding [V, H], where its checkpoint brings one; else the target's is used.
        self.register_buffer("own_embedding", None, persistent=False)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: SlotCache | PackedPass,
        mask: Tensor | None,
    ) -> Tensor:
        """States [B, n, H] of n entries: (embedding of token t+1, hidden state of token t).

        ``rotary`` holds the cosines and sines [B, n, head_dim] of the entries' positions.
        """
        layer = self.midlayer
        query, key, value = layer.self_attn.project(layer.attention_input(embeddings, hidden), rotary)
        key, value = cache.update(key, value, 0)
        attended = layer.self_attn.combine(grouped_sdpa(query, key, value, mask, None))
        return layer.finish(hidden, attended)

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., D]."""
        out: Tensor = self.lm_head(self.norm(states))
        return out

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids."""
        return draft_ids + self.d2t[draft_ids]


def load_eagle3(folder: Path, *, target_vocab: int, target_hidden: int, target_layers: int) -> Eagle3Head:
    """Load a head in the ``midlayer.*`` layout and check that it fits the target.

    Where the checkpoint brings its own ``embed_tokens.weight`` the head uses that, else the target's.

    Raises:
        UserError: a file or tensor is missing, left over, or of a shape that does not fit.
    """
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise UserError(f"drafter {folder}: no {path.name}; expected an EAGLE-3 head's folder")
    try:
        raw = json.loads(config_path.read_text(encoding="utf-8"))
        tensors = load_file(weights_path)
    except (ValueError, OSError, RecursionError, SafetensorError) as error:
        raise UserError(f"drafter {folder}: not readable ({error})") from error
    try:
        config = Eagle3Config.from_dict(raw)
        head = Eagle3Head(config)
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,  # sizes below zero or beyond the memory, from torch
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"drafter {folder}: config.json is not that of a supported EAGLE-3 head ({reason})") from error
    if config.feature_layers is None:
        layers = default_feature_layers(target_layers)
        if not 0 <= layers[0] < layers[1] < layers[2] < target_layers:
            raise UserError(
                f"drafter {folder}: its config names no eagle_aux_hidden_state_layer_ids, and the default "
                f"{list(layers)} is no choice for a target of {target_layers} layers"
            )
        config = head.config = replace(config, feature_layers=layers)
    embedding = tensors.pop("embed_tokens.weight", None)
    _check_fit(folder, config, embedding, target_vocab=target_vocab, target_hidden=target_hidden)
    head.own_embedding = embedding
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and config.draft_vocab_size != target_vocab:
        raise UserError(
            f"drafter {folder}: draft vocabulary {config.draft_vocab_size} is smaller than the target's "
            f"{target_vocab}, but there is no d2t tensor to map one to the other"
        )
    expected = {name: tuple(p.shape) for name, p in head.named_parameters()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"drafter {folder}: tensor {name} has shape {found.get(name, 'nothing')}, "
                f"expected {expected.get(name, 'no such tensor')}"
            )
    head.load_state_dict(tensors)
    if d2t is not None:
        _load_map(head, d2t, t2d, folder, target_vocab)
    return head


def _check_fit(
    folder: Path, config: Eagle3Config, embedding: Tensor | None, *, target_vocab: int, target_hidden: int
) -> None:
    facts: dict[str, tuple[object, object]] = {
        "vocab_size": (config.llama.vocab_size, target_vocab),
        "target_hidden_size": (config.target_hidden_size, target_hidden),
    }
    if embedding is None:  # the target's embedding is its input
        facts["hidden_size"] = (config.llama.hidden_size, target_hidden)
    else:
        size = (config.llama.vocab_size, config.llama.hidden_size)
        facts["the shape of embed_tokens.weight"] = (tuple(embedding.shape), size)
    for name, (found, expected) in facts.items():
        if found != expected:
            raise UserError(f"drafter {folder}: {name} is {found}, expected {expected} for this target")
    if len(config.feature_layers or ()) != 3:
        raise UserError(f"drafter {folder}: it names {config.feature_layers} feature layers, expected three")
    if config.draft_vocab_size > target_vocab:
        raise UserError(
            f"drafter {folder}: draft vocabulary {config.draft_vocab_size} exceeds the target's {target_vocab}"
        )


def _load_map(head: Eagle3Head, d2t: Tensor, t2d: Tensor | None, folder: Path, target_vocab: int) -> None:
    size = head.config.draft_vocab_size
    if tuple(d2t.shape) != (size,):
        raise UserError(f"drafter {folder}: d2t has shape {tuple(d2t.shape)}, expected {(size,)}")
    ids = torch.arange(size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_vocab or len(ids.unique()) != size:
        raise UserError(
            f"drafter {folder}: d2t must map draft ids to different target ids below {target_vocab} "
            "(it holds offsets: target id = draft id + d2t)"
        )
    if t2d is not None:
        marked = torch.zeros(target_vocab, dtype=torch.bool)
        marked[ids] = True
        if tuple(t2d.shape) != (target_vocab,) or not torch.equal(t2d.bool(), marked):
            raise UserError(f"drafter {folder}: t2d does not mark the target ids that d2t maps to")
    head.d2t = d2t.long()
