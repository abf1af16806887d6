"""A differentiable experts forward for training small, fine-grained MoE models on a CPU.

The experts interface of transformers multiplies the routing weight into the expert's *output* (hidden
size) and scatters gradients through `index_put`; with 64 experts of width 32 those two cost more than
the matrix products. Here the weight is multiplied into the expert's *inner* activation (same function,
since the down-projection is linear) and gradients are gathered by the inverse permutation.
Registered with transformers as ``ecospec_train``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.harness.experts import find_experts, is_plain_swiglu

TRAIN_EXPERTS = "ecospec_train"


# Rows per expert are padded to a multiple of this: oneDNN compiles one kernel per distinct shape, and
# without padding nearly every product of every step would have a shape of its own.
ROW_MULTIPLE = 64


class _SwiGLUExperts(torch.autograd.Function):
    """y[t] = Σ_k w[t,k] · Down_e(silu(Gate_e x[t]) · Up_e x[t]), e = index[t,k].

    Shapes: x [T, H], gate_up [E, 2I, H], down [E, H, I], index [T, K], weight [T, K]; y [T, H].
    Products run in the dtype of ``x``; gradients of the weights come back in the weights' dtype.
    Padding rows read token 0 with weight 0, so they add nothing to any result or gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        tokens, top_k = index.shape
        inner = down.shape[2]
        flat = index.reshape(-1)
        counts = torch.bincount(flat, minlength=gate_up.shape[0])
        padded = (counts + ROW_MULTIPLE - 1).div(ROW_MULTIPLE, rounding_mode="floor") * ROW_MULTIPLE
        ends = padded.cumsum(0)
        order = torch.argsort(flat, stable=True)
        # the padded row of each (token, choice) slot
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(order.numel(), device=order.device) + shift[flat[order]]
        total = int(ends[-1])
        source = order.new_zeros(total)
        source[row_of] = torch.arange(tokens, device=order.device).repeat_interleave(top_k)
        row_weight = x.new_zeros(total, 1)
        row_weight[row_of, 0] = weight.reshape(-1).to(x.dtype)

        gate_up_low, down_low = gate_up.to(x.dtype), down.to(x.dtype)
        bounds = _bounds(ends.tolist())
        rows = x[source]
        projected = x.new_empty(total, 2 * inner)
        for expert, start, end in bounds:
            torch.mm(rows[start:end], gate_up_low[expert].t(), out=projected[start:end])
        gate, up = projected[:, :inner], projected[:, inner:]
        weighted = F.silu(gate) * up * row_weight
        out = x.new_empty(total, x.shape[1])
        for expert, start, end in bounds:
            torch.mm(weighted[start:end], down_low[expert].t(), out=out[start:end])
        ctx.save_for_backward(rows, projected, weighted, row_weight, gate_up_low, down_low, source, row_of, index)
        ctx.bounds, ctx.weight_dtypes = bounds, (gate_up.dtype, down.dtype, weight.dtype)
        return out[row_of].view(tokens, top_k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, projected, weighted, row_weight, gate_up, down, source, row_of, index = ctx.saved_tensors
        tokens, top_k = index.shape
        inner = down.shape[2]
        grad = grads[0].to(rows.dtype)[source]
        grad_weighted = torch.empty_like(weighted)
        grad_down, grad_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        for expert, start, end in ctx.bounds:
            torch.mm(grad[start:end], down[expert], out=grad_weighted[start:end])
            torch.mm(grad[start:end].t(), weighted[start:end], out=grad_down[expert])
        gate, up = projected[:, :inner], projected[:, inner:]
        sigmoid = torch.sigmoid(gate)
        activated = gate * sigmoid
        grad_row_weight = (grad_weighted * activated * up).sum(1)
        grad_inner = grad_weighted * row_weight
        grad_projected = torch.cat(
            (grad_inner * up * (sigmoid + activated * (1 - sigmoid)), grad_inner * activated), dim=1
        )
        grad_rows = torch.empty_like(rows)
        for expert, start, end in ctx.bounds:
            torch.mm(grad_projected[start:end], gate_up[expert], out=grad_rows[start:end])
            torch.mm(grad_projected[start:end].t(), rows[start:end], out=grad_gate_up[expert])
        gate_up_dtype, down_dtype, weight_dtype = ctx.weight_dtypes
        return (
            grad_rows[row_of].view(tokens, top_k, -1).sum(1),
            grad_gate_up.to(gate_up_dtype),
            grad_down.to(down_dtype),
            None,
            grad_row_weight[row_of].view(tokens, top_k).to(weight_dtype),
        )


def _bounds(ends: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, past-the-last row) of every expert that has rows."""
    starts = [0, *ends[:-1]]
    return [(e, start, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def use_training_experts(model: Any) -> None:
    """Send a model's routed experts through `training_experts_forward`.

    Raises:
        ValueError: its experts are not plain SwiGLU ones, which is all that the kernel computes.
    """
    for module in find_experts(model):
        if not is_plain_swiglu(module):
            raise ValueError(f"{type(module).__name__} cannot be trained with: expected plain gated experts")
        module.config._experts_implementation = TRAIN_EXPERTS  # type: ignore[union-attr]


def training_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts-interface forward for SwiGLU experts without biases; differentiable."""
    low = hidden_states
    if torch.is_autocast_enabled(hidden_states.device.type):
        low = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
    out: Tensor = _SwiGLUExperts.apply(  # type: ignore[no-untyped-call]
        low, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights
    )
    return out.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(TRAIN_EXPERTS, training_experts_forward)
