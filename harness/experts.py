"""The experts of a verification pass: one read per *activated* expert, and a record of the routing.

Every MoE family of transformers sends its routed experts through one interface,
``forward(experts_module, hidden_states, top_k_index, top_k_weights)``. `install` puts ours there: it notes
``top_k_index`` (so the routing is that of exactly this pass, and no router logits are asked for) and hands
over to `union_experts_forward` on a CPU, or to the library's ``grouped_mm`` on an accelerator. What does not go
through that interface is in `quantized` and `llama4`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.errors import UserError
from ecospec.harness import llama4, quantized
from ecospec.harness.sharding import ExpertShard, expert_count, expert_shard, is_offloaded
from ecospec.predictors.layout import pays, stored_by_input

EXPERTS = "ecospec"


@dataclass
class RoutingTap:
    """Where the experts modules of one model leave their routing: one [tokens, K] tensor a MoE layer."""

    modules: list[nn.Module]
    names: list[str]
    indices: list[Tensor | None] = field(default_factory=list)
    shard: ExpertShard | None = None
    """What this process holds of every layer, where the experts are split over several."""
    forced: tuple[Tensor, ...] = ()
    """Of each layer the experts [tokens, K] that are used in place of the router's; none outside `forcing`."""

    @contextmanager
    def forcing(self, experts: Tensor) -> Iterator[None]:
        """In this block every pass uses these experts, with the router's weights; what it computes means nothing.

        Args:
            experts: int64 [MoE layers, tokens, K], distinct in each row.

        Raises:
            UserError: the experts are split over processes, so that a token's experts are not named in one.
        """
        if self.shard is not None:
            raise UserError("the experts of a target with --parallel expert cannot be forced; expected one process")
        if len(experts) != len(self.modules):
            raise ValueError(f"experts for {len(experts)} MoE layers, and there are {len(self.modules)}")
        self.forced = experts.unbind()
        try:
            yield
        finally:
            self.forced = ()

    def clear(self) -> None:
        """Forget the last pass."""
        self.indices = [None] * len(self.modules)

    @property
    def reported(self) -> bool:
        """Whether any layer has reported since `clear`."""
        return any(index is not None for index in self.indices)

    def read(self) -> Tensor:
        """int64 [MoE layers, tokens, K] of the last pass; of at least one layer.

        Raises:
            UserError: a MoE layer did not report; the text names it.
        """
        missing = [name for name, index in zip(self.names, self.indices, strict=True) if index is None]
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"no routing was captured for MoE layer {missing[0]}{rest} of {len(self.names)}: its experts are "
                "reached some other way, so that the experts of a pass cannot be counted"
            )
        first = self.indices[0]
        assert first is not None
        routing = torch.stack([index.to(first.device) for index in self.indices if index is not None])
        return routing if self.shard is None else self.shard.whole(routing)


def named_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a model by name, in layer order: those whose routing can be noted."""
    return {
        name: module
        for name, module in model.named_modules()
        if (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")) or quantized.is_mxfp4(module)
    }


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The same without names."""
    return list(named_experts(model).values())


_DECLARED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def declared_experts(config: Any) -> int:
    """The routed experts of a MoE layer that a config speaks of; 0 for a dense model."""
    inner = getattr(config, "ffn_config", None)
    found = [getattr(each, name, None) for each in (config, inner) for name in _DECLARED]
    return max((value for value in found if isinstance(value, int)), default=0)


def _route(module: Any, index: Tensor) -> Tensor:
    """Note the experts of a pass. They are the router's, ``index``, unless others are forced."""
    tap, layer = module._ecospec
    if tap.forced:
        forced = tap.forced[layer]
        if forced.shape != index.shape:
            raise ValueError(f"forced experts of shape {tuple(forced.shape)}, expected {tuple(index.shape)}")
        index = forced.to(index)
    tap.indices[layer] = index
    return index


def install(model: Any) -> RoutingTap:
    """Route a model's experts through this file and return the tap, which has no modules where the model is dense.

    Raises:
        UserError: the model has routed experts whose routing cannot be noted.
    """
    config = model.config.get_text_config(decoder=True)
    llama4.adopt(model, config, _dispatch, _route)
    found = named_experts(model)
    experts = declared_experts(config)
    if not found and experts > 1:
        raise UserError(
            f"{type(model).__name__} has {experts} experts, and not behind the transformers experts interface: the "
            "experts of a verification step could not be counted"
        )
    modules = list(found.values())
    tap = RoutingTap(modules, list(found), shard=expert_shard(modules[0]) if modules else None)
    for layer, (name, module) in enumerate(found.items()):
        module._ecospec = (tap, layer)  # type: ignore[assignment]
        module._ecospec_offloaded = is_offloaded(module)  # type: ignore[assignment]
        if quantized.is_mxfp4(module):
            quantized.note_mxfp4(model.get_submodule(name.rpartition(".")[0]), module, partial(_route, module))
            continue
        if not quantized.is_fp8(module) and is_plain_swiglu(module):
            _lay_out(module)
        module.config._experts_implementation = EXPERTS  # type: ignore[union-attr]
    tap.clear()
    return tap


def expert_bytes(module: nn.Module) -> int:
    """Bytes of one routed expert's weights as stored, with its scales and biases."""
    if quantized.is_mxfp4(module):
        return quantized.mxfp4_bytes(module)
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
    inner = inner.to(hidden_states.dtype)  # some routers weigh in float32
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


def _dispatch(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Multiply with the activated experts, each read once."""
    kind = hidden_states.device.type
    if kind == "meta":
        return torch.empty_like(hidden_states)
    here = module._ecospec[0].shard is None  # else some experts are elsewhere, which the library knows how to leave out
    if here and kind == "cpu" and is_plain_swiglu(module) and not torch.is_grad_enabled():
        return union_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    library = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    result: Tensor = library(module, hidden_states, top_k_index, top_k_weights)
    return result


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _dispatch(module, hidden_states, _route(module, top_k_index), top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)
quantized.register_fp8(EXPERTS, _route)


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
        if quantized.is_mxfp4(module) or quantized.is_fp8(module) or not is_plain_swiglu(module):
            raise UserError(f"{type(module).__name__} cannot be widened: expected plain gated experts")
        experts: Any = module
        with torch.no_grad():
            gate, up = experts.gate_up_proj.chunk(2, dim=1)
            wide = [part.repeat_interleave(factor, dim=1) for part in (gate, up)]
            experts.gate_up_proj = nn.Parameter(torch.cat(wide, dim=1).contiguous(), requires_grad=False)
            narrow = experts.down_proj.repeat_interleave(factor, dim=2) / factor
            experts.down_proj = nn.Parameter(narrow.contiguous(), requires_grad=False)
            experts.intermediate_dim = experts.gate_up_proj.shape[1] // 2
