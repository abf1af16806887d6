"""Routed experts of a drafter: each activated expert is read once, and no target's routing record sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.harness.experts import is_plain_swiglu, union_experts_forward

DRAFTER_EXPERTS = "ecospec_drafter"
"""Name under which transformers knows it; set in the config of a drafter's own layers."""


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if hidden_states.device.type == "cpu" and is_plain_swiglu(module) and not torch.is_grad_enabled():
        return union_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    result: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(DRAFTER_EXPERTS, _experts_forward)
