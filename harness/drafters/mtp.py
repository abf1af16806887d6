"""The multi-token-prediction layer of DeepSeek-V3, run step after step as a drafter.

    h' = norm(block(eh_proj([enorm(embedding of token t+1), hnorm(h of token t)]))),  logits = head(h')

h is the target's last state *behind* its final norm, and in further steps the layer's own h', also behind its norm
(``shared_head.norm``): ``hnorm`` was trained on normed states, and a norm's weight, unlike its scale, does not cancel.
This is what transformers, SGLang and vLLM do by now; vLLM once fed back the state before the norm, which cost
acceptance at every step but the first. The published model was trained for one step; that the same layer drafts
several is the engines' custom. The first entry's embedding is not masked (vLLM masks it, the others do not).

The decoder block is the library's own, on a copy of the target's config: its attention, its rotary positions, its
router. Its experts are the drafter's and are counted nowhere.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from ecospec.harness.drafters.experts import DRAFTER_EXPERTS
from ecospec.predictors.attention import ATTENTION
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.packing import PackedPass

MODEL_TYPE = "deepseek_v3"


def layer_config(config: Any) -> Any:
    """A target's config made that of its one further layer: always with experts, and first in its own KV memory."""
    own = deepcopy(config)
    own.num_hidden_layers, own.first_k_dense_replace = 1, 0
    own._attn_implementation = ATTENTION
    own._experts_implementation = DRAFTER_EXPERTS
    return own


class MtpHead(nn.Module):
    """The layer as a `DraftHead`. Its recurrent state is the normed one."""

    own_embedding: Tensor | None

    def __init__(self, config: Any, vocab_size: int, *, own_head: bool) -> None:
        """Make it without weights.

        Args:
            config: of `layer_config`.
            vocab_size: V, the target's.
            own_head: whether it has a language-model head of its own; else `use_head` lends it one.
        """
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.draft_vocab_size = vocab_size
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps), DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, 0)
        self.norm = DeepseekV3RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, vocab_size, bias=False) if own_head else None
        self._lent: tuple[Any, ...] = ()
        parameters = inspect.signature(DeepseekV3DecoderLayer.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.register_buffer("own_embedding", None, persistent=False)

    def use_head(self, head: Any) -> None:
        """Take the target's language-model head; it stays the target's."""
        self._lent = (head,)  # in a tuple, so that it does not become a part of this module

    def place_rotary(self, config: Any, device: torch.device) -> None:
        """Make the rotary embedding, whose frequencies are computed and in no file."""
        self.rotary = DeepseekV3RotaryEmbedding(config).to(device)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last states as they are."""
        return features

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: SlotCache | PackedPass,
        mask: Tensor | None,
    ) -> Tensor:
        """Normed states [B, n, H] of n entries: (embedding of token t+1, normed state of token t)."""
        inputs = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(hidden)), dim=-1))
        states = self.block(inputs, attention_mask=mask, position_embeddings=rotary, **{self._cache_argument: cache})
        normed: Tensor = self.norm(states)
        return normed

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of normed states."""
        out: Tensor = self._lent[0](states) if self.lm_head is None else self.lm_head(states)
        return out

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """They are the target's."""
        return draft_ids
