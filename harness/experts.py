"""The experts of a verification pass: one read per *activated* expert, and a record of the routing.

Every MoE family of transformers sends its routed experts through one interface,
``forward(experts_module, hidden_states, top_k_index, top_k_weights)``. `install` puts ours there: it notes
``top_k_index`` (so the routing is that of exactly this pass, and no router logits are asked for) and hands
over to `union_experts_forward` on a CPU, or to the library's ``grouped_mm`` on an accelerator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.errors import UserError
from ecospec.harness.sharding import ExpertShard, expert_count, expert_shard, is_offloaded
from ecospec.predictors.layout import pays, stored_by_input

EXPERTS = "ecospec"


@dataclass
class RoutingTap:
    """Where the experts modules of one model leave their routing: one [tokens, K] tensor a MoE layer."""

    modules: list[nn.Module]
    indices: list[Tensor | None] = field(default_factory=list)
    shard: ExpertShard | None = None
    """What this process holds of every layer, where the experts are split over several."""

    def clear(self) -> None:
        """Forget the last pass."""
        self.indices = [None] * len(self.modules)

    @property
    def reported(self) -> bool:
        """Whether any layer has reported since `clear`."""
        return any(index is not None for index in self.indices)

    def read(self) -> Tensor:
        """int64 [MoE layers, tokens, K] of the last pass.

        Raises:
            RuntimeError: a MoE layer did not report.
        """
        missing = [i for i, index in enumerate(self.indices) if index is None]
        if missing:
            raise RuntimeError(f"no routing was captured for MoE layer(s) {missing}")
        first = self.indices[0]
        assert first is not None
        routing = torch.stack([index.to(first.device) for index in self.indices if index is not None])
        return routing if self.shard is None else self.shard.whole(routing)


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model, in layer order: those that dispatch through the experts interface."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "is_transposed")]


def install(model: nn.Module) -> RoutingTap:
    """Route a model's experts through this file and return the tap.

    Raises:
        UserError: the model has no routed experts that go through the interface.
    """
    modules = find_experts(model)
    if not modules:
        raise UserError(
            f"{type(model).__name__} has no routed experts behind the transformers experts interface; "
            "expected a Mixture-of-Experts causal LM"
        )
    tap = RoutingTap(modules, shard=expert_shard(modules[0]))
    for layer, module in enumerate(modules):
        if is_plain_swiglu(module):
            _lay_out(module)
        module._ecospec = (tap, layer)  # type: ignore[assignment]
        module._ecospec_offloaded = is_offloaded(module)  # type: ignore[assignment]
        module.config._experts_implementation = EXPERTS  # type: ignore[union-attr]
    tap.clear()
    return tap


def expert_bytes(module: nn.Module) -> int:
    """Bytes of one routed expert's weights as stored, biases included."""
    experts = expert_count(module)
    stored = sum(p.numel() * p.element_size() for p in module.parameters() if p.shape[:1] == (experts,))
    return stored // experts


def is_plain_swiglu(module: Any) -> bool:
    """Whether weights lie as [E, 2I, H] and [E, H, I] with a gate and nothing else."""
    return bool(
        module.has_gate
        and module.is_concatenated
        and not module.is_transposed
        and not module.has_bias
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)  # not there before transformers 5.18
    )


@dataclass(frozen=True)
class _Blocks:
    """The weights of one experts module as p blocks each, one for every thread: views, nothing is copied.

    Attributes:
        source: addresses of the parameters that the views are of.
        gate_up: per expert [p, H, 2I/p], blocks of output columns.
        down: per expert [p, I/p, H], blocks of the inner dimension, whose products are summed.
    """

    source: tuple[int, int]
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    count: int


@torch.no_grad()
def _lay_out(module: Any) -> None:
    """Store the experts' weights for products with a few rows, where that pays."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        if pays(weight):
            setattr(module, name, nn.Parameter(stored_by_input(weight), requires_grad=weight.requires_grad))


def _blocks(module: Any) -> _Blocks:
    gate_up, down = module.gate_up_proj, module.down_proj
    source = (gate_up.data_ptr(), down.data_ptr())
    blocks: _Blocks | None = getattr(module, "_ecospec_blocks", None)
    if blocks is None or blocks.source != source:
        inner = down.shape[2]
        most = min(torch.get_num_threads(), os.cpu_count() or 1)  # more threads than cores gain nothing
        count = max(p for p in range(1, most + 1) if inner % p == 0)
        blocks = _Blocks(
            source,
            tuple(gate_up.detach().transpose(1, 2).unflatten(2, (count, -1)).transpose(1, 2).unbind()),
            tuple(down.detach().transpose(1, 2).unflatten(1, (count, -1)).unbind()),
            count,
        )
        if not getattr(module, "_ecospec_offloaded", False):  # whose weights are to be given up after the pass
            module._ecospec_blocks = blocks
    return blocks


def union_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts forward that reads each activated expert once; the twin of the library's ``eager``.

    Token-expert pairs are sorted by expert, each expert multiplies its rows, and the routing weight is
    applied to the inner activation (the down-projection is linear). Shapes: hidden_states [T, H],
    top_k_index and top_k_weights [T, K]; returns [T, H].
    """
    tokens, top_k = top_k_index.shape
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    source = torch.div(order, top_k, rounding_mode="floor")
    rows = hidden_states[source]
    blocks = _blocks(module)
    runs = _runs(expert_ids.tolist())
    # A product with one weight matrix is too small for the library to use more than one thread; a batch
    # of p products with its p blocks is not.
    spread = rows.expand(blocks.count, -1, -1)
    products = [torch.bmm(spread[:, start:end], blocks.gate_up[expert]) for expert, start, end in runs]
    projected = torch.cat(products, dim=1).transpose(0, 1).flatten(1)
    inner = module._apply_gate(projected) * top_k_weights.reshape(-1)[order, None]
    parted = inner.unflatten(1, (blocks.count, -1)).transpose(0, 1)
    products = [torch.bmm(parted[:, start:end], blocks.down[expert]) for expert, start, end in runs]
    out = torch.cat(products, dim=1).sum(0)
    if tokens == 1:
        return out.sum(0, keepdim=True)
    slots = torch.empty_like(out)
    slots[order] = out
    return slots.view(tokens, top_k, -1).sum(1)


def _runs(sorted_ids: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, past-the-last row) for every run of equal ids."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(sorted_ids) + 1):
        if i == len(sorted_ids) or sorted_ids[i] != sorted_ids[start]:
            runs.append((sorted_ids[start], start, i))
            start = i
    return runs


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    tap, layer = module._ecospec
    tap.indices[layer] = top_k_index
    here = tap.shard is None  # else some tokens' experts are elsewhere, which the library knows how to leave out
    if here and hidden_states.device.type == "cpu" and is_plain_swiglu(module) and not torch.is_grad_enabled():
        return union_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    library = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    result: Tensor = library(module, hidden_states, top_k_index, top_k_weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)


def widen_experts(model: nn.Module, factor: int) -> None:
    """Make every routed expert ``factor`` times wider without changing the function (Net2Net).

    Each inner neuron is repeated ``factor`` times and its down-projection column divided by ``factor``, so
    the sum over the copies is what the one neuron gave. The model then reads ``factor`` times the bytes per
    expert: a small model comes closer to being bound by memory, as a large one is.

    Raises:
        UserError: the experts are not plain gated ones (no bias, [gate; up] concatenated), factor < 1, or
            they would not fit into this machine's memory.
    """
    if factor < 1:
        raise UserError(f"widening factor {factor}: expected an integer of at least 1")
    if factor == 1:
        return
    wanted = factor * sum(p.numel() * p.element_size() for m in find_experts(model) for p in m.parameters())
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > present:
        raise UserError(
            f"widening factor {factor}: the experts would take {wanted / 1e9:,.0f} GB, and this machine has "
            f"{present / 1e9:,.0f} GB; expected a smaller factor"
        )
    for module in find_experts(model):
        if not is_plain_swiglu(module):
            raise UserError(f"{type(module).__name__} cannot be widened: expected plain gated experts")
        experts: Any = module
        with torch.no_grad():
            gate, up = experts.gate_up_proj.chunk(2, dim=1)
            wide = [part.repeat_interleave(factor, dim=1) for part in (gate, up)]
            experts.gate_up_proj = nn.Parameter(torch.cat(wide, dim=1).contiguous(), requires_grad=False)
            narrow = experts.down_proj.repeat_interleave(factor, dim=2) / factor
            experts.down_proj = nn.Parameter(narrow.contiguous(), requires_grad=False)
            experts.intermediate_dim = experts.gate_up_proj.shape[1] // 2
