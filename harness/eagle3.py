"""An EAGLE-3 head: three target states, one decoder layer, its own vocabulary.

The module's parameter names are those of the published checkpoints (``midlayer.*``), so that loading is a
plain state-dict load in which every tensor is used or named in an error.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ecospec.predictors.attention import grouped_sdpa
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.packing import PackedPass

logger = logging.getLogger("ecospec")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of the published layout; each changes what is computed, and ignoring one costs most of the acceptance."""
ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings in which a position's angle depends on nothing but the position."""
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class Eagle3Config:
    """What a head's ``config.json`` says.

    Attributes:
        llama: sizes of the one decoder layer, as a LlamaConfig.
        target_hidden_size: Ht, size of one target state.
        draft_vocab_size: D, tokens the head can propose.
        feature_layers: indices of the target layers that are read, as the file counts them (a loaded head's: whose
            outputs are read); None when the file names none.
        max_positions: longest sequence that the head was made for; None when the file does not say.
        tied: whether ``lm_head`` is the embedding where the checkpoint has none of its own.
        norm_before_residual: the residual starts from the normed hidden state.
        norm_before_fc: the three concatenated target states are normed together.
        fc_norm: each of the three target states is normed by itself.
        norm_output: the recurrent state is the normed one.
    """

    llama: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] | None
    max_positions: int | None = None
    tied: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Eagle3Config:
        """Read the published layout; null is as good as absent.

        Raises:
            ValueError: it asks for what is not supported; LlamaConfig raises errors of its own.
        """
        if "transformer_layer_config" in raw:
            raise ValueError("transformer_layer_config is not supported, expected its keys at the top level")
        if raw.get("model_type", "llama") != "llama":
            raise ValueError(f"model_type is {raw['model_type']!r}, expected 'llama'")
        if raw.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers is {raw['num_hidden_layers']}, expected 1")
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if _stated(raw, "use_aux_hidden_state") is False:
            raise ValueError("use_aux_hidden_state is false, expected a head that reads three target states")
        flags = {name: _stated(raw, name) or False for name in FLAGS}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected true or false")
        llama = _llama_config(raw)
        layers = _stated(raw, "eagle_aux_hidden_state_layer_ids")
        if layers is not None and not all(isinstance(i, int) for i in layers):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids are {layers}, expected integers")
        return cls(
            llama=llama,
            target_hidden_size=int(raw.get("target_hidden_size") or llama.hidden_size),
            draft_vocab_size=int(raw.get("draft_vocab_size") or llama.vocab_size),
            feature_layers=None if layers is None else tuple(layers),
            max_positions=raw.get("max_position_embeddings"),
            tied=bool(raw.get("tie_word_embeddings")),
            **flags,
        )


def _stated(raw: dict[str, Any], name: str) -> Any:
    """What the file says at its top level or in ``eagle_config``; None where it says nothing."""
    places = (raw, raw.get("eagle_config") or {})
    values = [place[name] for place in places if place.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f"{name} is {values[0]} at the top level and {values[1]} in eagle_config")
    return values[0] if values else None


def _llama_config(raw: dict[str, Any]) -> LlamaConfig:
    """The decoder layer's part of the file. Rotary parameters are read as transformers reads them, old and new."""
    given = {name: deepcopy(raw[name]) for name in (*_REQUIRED, *_OPTIONAL) if raw.get(name) is not None}
    scaling = raw.get("rope_scaling")
    if scaling is not None and given.setdefault("rope_parameters", deepcopy(scaling)) != scaling:
        raise ValueError("rope_scaling and rope_parameters differ, expected one of them")
    if any(isinstance(value, dict) for value in given.get("rope_parameters", {}).values()):
        raise ValueError("rope_parameters are given by layer type, expected those of one layer")
    llama = LlamaConfig(**given)
    rotary = llama.rope_parameters
    if rotary["rope_type"] not in ROTARY:
        raise ValueError(f"rope type {rotary['rope_type']!r} is not supported, expected one of {', '.join(ROTARY)}")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rotary['partial_rotary_factor']}, expected none")
    if llama.head_dim % 2:
        raise ValueError(f"head_dim is {llama.head_dim}, expected an even number")
    if llama.num_attention_heads % llama.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads is {llama.num_attention_heads}, expected a multiple of num_key_value_heads, "
            f"{llama.num_key_value_heads}"
        )
    return llama


class Eagle3Attention(nn.Module):
    """Attention whose input is twice the hidden size: [embedding, hidden state]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = config.head_dim
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

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention gets, [B, n, 2H], the normed embedding first; and the residual, [B, n, H]."""
        normed = self.hidden_norm(hidden)
        states = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        return states, normed if self.norm_before_residual else hidden

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residuals and feed-forward; [B, n, H], before the final norm."""
        hidden = residual + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The head. Its recurrent state is the layer's output before the final norm, or behind it with ``norm_output``."""

    d2t: Tensor
    own_embedding: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        llama = config.llama
        self.config = config
        self.beyond_noted = False
        size, eps = config.target_hidden_size, llama.rms_norm_eps
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=eps) for _ in range(3)) if config.fc_norm else None
        self.input_norm = nn.RMSNorm(3 * size, eps=eps) if config.norm_before_fc else None
        self.fc = nn.Linear(3 * size, llama.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(llama, norm_before_residual=config.norm_before_residual)
        self.norm = nn.RMSNorm(llama.hidden_size, eps=llama.rms_norm_eps)
        self.lm_head = nn.Linear(llama.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        # Offset from a draft id to its target id; zero when the vocabularies are one.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long), persistent=False)
        # The head's own embedding [V, H], where its checkpoint brings one; else the target's is used.
        self.register_buffer("own_embedding", None, persistent=False)

    @property
    def draft_vocab_size(self) -> int:
        """D, tokens that it can propose."""
        return self.config.draft_vocab_size

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [..., H] of the target's three states [..., 3·Ht]."""
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features.chunk(3, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        hidden: Tensor = self.fc(features)
        return hidden

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
        states, residual = self.midlayer.enter(embeddings, hidden)
        query, key, value = self.midlayer.self_attn.project(states, rotary)
        key, value = cache.update(key, value, 0)
        return self.recurrent(residual, grouped_sdpa(query, key, value, mask, None))

    def recurrent(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The recurrent state [B, n, H], of a residual and attended values [B, heads, n, D]."""
        out = self.midlayer.leave(residual, self.midlayer.self_attn.combine(attended))
        return self.norm(out) if self.config.norm_output else out

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., D]."""
        normed = states if self.config.norm_output else self.norm(states)
        out: Tensor = self.lm_head(normed)
        return out

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids."""
        return draft_ids + self.d2t[draft_ids]

    def note_positions(self, count: int, request: str) -> None:
        """Say, the first time only, that a request may go beyond the positions that the head was made for.

        Rotary angles have no end, and what is emitted does not depend on the head: only its guesses may get worse.
        """
        limit = self.config.max_positions
        if limit is not None and count > limit and not self.beyond_noted:
            self.beyond_noted = True
            logger.warning(
                "drafter: request %s may take %d positions, the head's max_position_embeddings is %d; "
                "its guesses may be accepted less often beyond",
                request,
                count,
                limit,
            )
