"""Models whose experts stay packed: the library's modules for FP8 and MXFP4, with their kernels written out."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_quantized import FP8_BLOCK, fp8_blocks
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from ecospec.harness.quantized import unpack_blocks


def with_fp8_experts(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with its experts in the library's module for FP8, whose kernel is written out here."""

    def linear(self: Any, states: Tensor, weight: Tensor, scales: Tensor, activation_scale: Any = None) -> Tensor:
        return F.linear(states, unpack_blocks(weight, scales, self.block_size))

    monkeypatch.setattr(FP8Experts, "linear", linear)
    kind = use_experts_implementation(
        experts_class=type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    packed = copy.deepcopy(model)
    for layer in packed.model.layers:
        plain = layer.mlp.experts
        module = kind(plain.config, block_size=(FP8_BLOCK, FP8_BLOCK))
        for name in ("gate_up_proj", "down_proj"):
            each = [fp8_blocks(weight) for weight in getattr(plain, name)]
            stored, scales = (torch.stack(part) for part in zip(*each, strict=True))
            setattr(module, name, torch.nn.Parameter(stored, requires_grad=False))
            setattr(module, f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
            getattr(plain, name).data = unpack_blocks(stored, scales, (FP8_BLOCK, FP8_BLOCK))
        layer.mlp.experts = module
    return packed


class Packed(Mxfp4GptOssExperts):
    """The library's module for MXFP4, whose kernel is written out here."""

    numbers: dict[str, Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Any, top_k_weights: Any, **unused: Any) -> Tensor:
        if not isinstance(top_k_index, Tensor):  # as older versions of the library call it
            top_k_index, top_k_weights = top_k_index.routing
        out = torch.zeros_like(hidden_states)
        for token, (index, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(index.tolist(), weights, strict=True):
                inner = hidden_states[token] @ self.numbers["gate_up_proj"][expert] + self.gate_up_proj_bias[expert]
                gate, up = inner[::2].clamp(max=self.limit), inner[1::2].clamp(-self.limit, self.limit)
                inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
                out[token] += weight * (inner @ self.numbers["down_proj"][expert] + self.down_proj_bias[expert])
        return out


class RoutingData:
    """What older versions of the library tell MXFP4 experts in place of indices."""

    def __init__(self, *routing: Tensor) -> None:
        self.routing = routing


def old_forward(mlp: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """As older versions of the library put it into a module: routing in another form."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits, scores, index = mlp.router(flat)
    return mlp.experts(flat, RoutingData(index, scores), None).view(hidden_states.shape), logits


def with_mxfp4_experts(plain: Any, *, old: bool = False) -> Any:
    """The model with its experts in the library's module for MXFP4.

    Args:
        old: whether its layers tell the experts what older versions of the library do.
    """
    packed = copy.deepcopy(plain)
    for layer in packed.model.layers:
        module, numbers = Packed(plain.config), layer.mlp.experts
        module.numbers = {name: getattr(numbers, name).clone() for name in ("gate_up_proj", "down_proj")}
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, f"{name}_bias").data = getattr(numbers, f"{name}_bias").data.to(torch.bfloat16).float()
        layer.mlp.experts = module
        if old:
            layer.mlp.forward = MethodType(old_forward, layer.mlp)
    return packed
