"""A model of which each process, or each device, holds a part: what it is as a whole.

Parameters that are split over processes are DTensors, whose shape and size are the whole tensor's; their plain parts
are seen inside a layer's forward only. Parameters that are offloaded are on ``meta`` between passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecospec.errors import UserError

_OWNED = 1 << 32
"""Marks, in a sum over processes, that one of them owns the expert."""


@dataclass(frozen=True)
class ExpertShard:
    """The experts of one layer that this process holds: whole ones, of consecutive numbers.

    Attributes:
        group: the processes that hold the layer's experts together.
        rank: which of them this is.
        size: how many there are.
        local: experts here.
    """

    group: Any
    rank: int
    size: int
    local: int

    def whole(self, local_ids: Tensor) -> Tensor:
        """Expert numbers in the whole layer, the same in every process.

        Args:
            local_ids: int64, any shape; this process's own numbers, ``local`` or more for an expert elsewhere. All
                processes hold the same tokens.

        Raises:
            UserError: a token's expert is in no process, or in several: their routers have parted.
        """
        here = (local_ids >= 0) & (local_ids < self.local)
        ids = torch.where(here, local_ids + (self.rank * self.local + _OWNED), 0)
        dist.all_reduce(ids, group=self.group)
        if not bool((ids >> 32 == 1).all()):
            raise UserError(
                "the processes have parted: they route the same tokens to different experts; "
                "expected devices that are alike"
            )
        return ids - _OWNED


def expert_shard(module: nn.Module) -> ExpertShard | None:
    """What this process holds of an experts module that is split by expert; None where it holds a part of each."""
    for parameter in module.parameters(recurse=False):
        placements = getattr(parameter, "placements", None)
        if placements and parameter.dim() >= 3 and placements[0].is_shard(0):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            return ExpertShard(mesh.get_group(), mesh.get_local_rank(), mesh.size(), parameter.shape[0] // mesh.size())
    return None


def expert_count(module: nn.Module) -> int:
    """Routed experts of a layer over all processes; the module itself counts those it holds."""
    shard = expert_shard(module)
    return int(module.num_experts) * (shard.size if shard else 1)  # type: ignore[arg-type]


def is_offloaded(module: nn.Module) -> bool:
    """Whether a module's weights are brought in for each pass and given up after it."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def is_split(model: nn.Module) -> bool:
    """Whether each process holds a part of the model."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def is_spread(model: nn.Module) -> bool:
    """Whether layers run on, or are fetched from, several devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


@torch.no_grad()
def whole_embedding(model: Any) -> Tensor | None:
    """The input embedding [V, H] where the model's own is no plain tensor that stays; None where it is one."""
    module = model.get_input_embeddings()
    weight = module.weight
    if hasattr(weight, "placements"):
        found: Tensor = weight.full_tensor()
        return found
    if weight.device.type != "meta":
        return None
    from accelerate.utils import align_module_device

    with align_module_device(module):
        copied: Tensor = module.weight.detach().clone()
        return copied


def stored_bytes(model: Any) -> tuple[int, int]:
    """(bytes of all parameters, bytes of an untied input embedding) of the whole model; a tied one counts in the first.

    Offloading makes two tensors of a tied one, which is still read once.
    """
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    size = embedding.numel() * embedding.element_size()
    if head is embedding:
        return total, 0
    if getattr(model.config, "tie_word_embeddings", False):
        return total - size, 0
    return total, size
