"""Llama 4: its experts behind the experts interface, and the scale of its queries by true positions.

The library multiplies every token by every expert and adds zeros; it has no experts interface here, and would read
all weights whatever is verified. In this file each activated expert is read once, as elsewhere. A Llama 4 expert gets
its token scaled by the router's sigmoid, not its result: so a token goes there once for each of its experts, scaled,
with the weight 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Dispatch = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""An experts forward: (experts module, hidden states [T, H], experts [T, K], weights [T, K]) to [T, H]."""

NOTED = "_ecospec_noted"
"""The attribute by which an experts module says that its routing is noted elsewhere."""


Route = Callable[[Any, Tensor], Tensor]
"""(experts module, its router's experts [T, K]) to those that are to be used; notes them."""


def adopt(model: nn.Module, config: Any, dispatch: Dispatch, route: Route) -> None:
    """Give the Llama 4 layers of a model, if it has any, an experts interface and true positions.

    Args:
        dispatch: multiplies with the activated experts.
        route: is given each experts module and the experts [tokens, K] of a pass, and says which are used.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Llama4TextMoe":
            _adopt_experts(module, config, dispatch, route)
        elif kind == "Llama4TextDecoderLayer":
            attention: Any = module.self_attn
            if attention.attn_temperature_tuning and not attention.use_rope:
                module.register_forward_pre_hook(_by_position, with_kwargs=True)


def _gate(experts: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner: Tensor = experts.act_fn(gate) * up
    return inner


def _adopt_experts(moe: Any, config: Any, dispatch: Dispatch, route: Route) -> None:
    experts = moe.experts
    if hasattr(experts, "_apply_gate"):
        return
    experts.config = config
    experts._apply_gate = MethodType(_gate, experts)
    experts.has_gate, experts.is_transposed, experts.is_concatenated = True, True, True
    experts.has_bias, experts.has_post_expert_norm, experts._is_expert_parallel = False, False, False
    setattr(experts, NOTED, True)

    def forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden_states.reshape(-1, module.hidden_dim)
        _, logits = module.router(flat)
        values, index = logits.topk(module.top_k, dim=-1)
        index = route(experts, index)
        scale = torch.sigmoid(values.float()).to(flat.dtype)
        rows = (flat[:, None] * scale[:, :, None]).flatten(0, 1)
        routed = dispatch(experts, rows, index.reshape(-1, 1), rows.new_ones(len(rows), 1))
        out = module.shared_expert(flat) + routed.view(len(flat), module.top_k, -1).sum(1)
        return out, logits

    moe.forward = MethodType(forward, moe)


class _AtPositions:
    """A cache that says of its length what makes position i of a pass the true one.

    The attention of layers without rotary positions scales a query by its position, which it takes for the length
    plus the place in the pass; a node of a draft tree stands elsewhere. Only that attention gets to see this.
    """

    def __init__(self, cache: Any, positions: Tensor) -> None:
        self._cache, self._positions = cache, positions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[n], the positions less 0, 1, 2 and so on."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Keys and values go where they belong."""
        return self._cache.update(*args, **kwargs)


def _by_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    positions = kwargs.get("position_ids")
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        if cache is not None and positions is not None:
            return args, {**kwargs, name: _AtPositions(cache, positions[0])}
    return None
