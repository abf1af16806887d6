"""Placing a small model for decoding: device, dtype, memory layout; its rotary frequencies are not rounded."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from ecospec.predictors.layout import lay_out_linears

M = TypeVar("M", bound=nn.Module)


def place(module: M, device: torch.device | str, dtype: torch.dtype) -> M:
    """``module.to(device, dtype)`` in evaluation mode, with ``inv_freq`` buffers left in float32.

    In bfloat16 a frequency has three digits, and at position 1000 a rotation would be off by whole radians.
    """
    exact = {
        (owner, name): buffer.float()
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }
    module.to(device, dtype)
    for (owner, name), buffer in exact.items():
        setattr(owner, name, buffer.to(device))
    lay_out_linears(module)
    return module.eval().requires_grad_(False)
