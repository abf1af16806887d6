"""Bytes of a routed expert: as its checkpoint stores it, by tensor headers or else by what the config declares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from ecospec.harness.doctor.headers import Header
from ecospec.harness.experts import find_experts

MXFP4_GROUP = 32
"""Weights that share a scale of one byte."""
FP8_BLOCK = (128, 128)
"""Weights that share a float32 scale, where the config does not say."""


@dataclass(frozen=True)
class ExpertStorage:
    """One routed expert of a checkpoint.

    Attributes:
        format: bf16, float32, fp8, mxfp4 and so on.
        source: ``headers`` or ``config``.
        weights, biases: numbers of parameters.
        weight_bytes, scale_bytes, bias_bytes: as stored.
    """

    format: str
    source: str
    weights: int
    biases: int
    weight_bytes: int
    scale_bytes: int
    bias_bytes: int

    @property
    def stored_bytes(self) -> int:
        """All that is stored of it."""
        return self.weight_bytes + self.scale_bytes + self.bias_bytes

    @property
    def nominal_bytes(self) -> float:
        """As the paper's Table 13 counts: every parameter, biases included, at its weights' width, without scales."""
        return (self.weights + self.biases) * self.weight_bytes / self.weights


def quantization_of(config: Any) -> dict[str, Any]:
    """The checkpoint's ``quantization_config`` as a dict; empty where it is not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def checkpoint_tensors(model: Any, under: str = "") -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this model has, for parameters whose own names begin with ``under``."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(under)}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def stored_experts(headers: Mapping[str, Header], names: Iterable[str], module: Any, kind: str) -> ExpertStorage | None:
    """One expert of a layer by the headers; None where they have none of its tensors.

    Args:
        names: of all the layer's expert tensors in a checkpoint that is not quantised.
        kind: what the config calls the format; empty for the tensors' own type.
    """
    stems = tuple(name.removesuffix("weight") for name in names)
    found = {name: header for name, header in headers.items() if name.startswith(stems)}
    if not found:
        return None
    sums = {"weight": 0, "scale": 0, "bias": 0}
    types = set()
    for name, header in found.items():
        last = name.rpartition(".")[2]
        part = "scale" if "scale" in last else "bias" if "bias" in last else "weight"
        sums[part] += header.bytes
        if part == "weight":
            types.add(header.dtype)
    experts = int(module.num_experts)
    if not sums["weight"]:
        return None
    weights, biases = _parameters(module)
    return ExpertStorage(
        kind or "/".join(sorted(types)).lower(),
        "headers",
        weights,
        biases,
        sums["weight"] // experts,
        sums["scale"] // experts,
        sums["bias"] // experts,
    )


def declared_experts(module: Any, quantization: Mapping[str, Any], dtype: torch.dtype) -> ExpertStorage | None:
    """One expert by the config; None for a format whose layout it does not settle.

    Args:
        dtype: of what is not quantised.
    """
    weights, biases = _parameters(module)
    method = str(quantization.get("quant_method") or "")
    matrices = [tuple(p.shape[1:]) for name, p in module.named_parameters() if "bias" not in name]
    if method == "fp8":
        rows, columns = quantization.get("weight_block_size") or FP8_BLOCK
        # A stored gate and up projection are two matrices, which transformers joins.
        halves = [half for shape in matrices for half in _unjoined(module, shape)]
        blocks = sum(math.ceil(a / rows) * math.ceil(b / columns) for a, b in halves)
        return ExpertStorage("fp8", "config", weights, biases, weights, 4 * blocks, biases * dtype.itemsize)
    if method == "mxfp4":
        scales = weights // MXFP4_GROUP
        return ExpertStorage("mxfp4", "config", weights, biases, weights // 2, scales, biases * torch.bfloat16.itemsize)
    if method:
        return None
    name = str(dtype).removeprefix("torch.")
    return ExpertStorage(name, "config", weights, biases, weights * dtype.itemsize, 0, biases * dtype.itemsize)


def declared_bytes(model: Any, experts: ExpertStorage | None, dtype: torch.dtype) -> int:
    """Bytes of a whole checkpoint by its config: an estimate, as the config does not name every exception.

    Args:
        experts: how one routed expert is stored; None for no such experts.
        dtype: of what is not quantised.
    """
    quantization = quantization_of(model.config)
    routed: list[Any] = list(find_experts(model))
    inside = {id(p) for module in routed for p in module.parameters()}
    kept = tuple(quantization.get("modules_to_not_convert") or ())
    rows, columns = quantization.get("weight_block_size") or FP8_BLOCK
    head = model.get_output_embeddings()
    total = 0
    for name, module in model.named_modules():
        fp8 = quantization.get("quant_method") == "fp8" and type(module) is nn.Linear and module is not head
        fp8 = fp8 and not any(skipped in name for skipped in kept)
        for parameter in module.parameters(recurse=False):
            if id(parameter) in inside:
                continue
            if fp8 and parameter.dim() == 2:
                a, b = parameter.shape
                total += parameter.numel() + 4 * math.ceil(a / rows) * math.ceil(b / columns)
            else:
                total += parameter.numel() * dtype.itemsize
    if experts is not None:
        total += sum(int(module.num_experts) for module in routed) * experts.stored_bytes
    return total


def _unjoined(module: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    rows, columns = shape
    if not module.has_gate or shape != tuple(module.gate_up_proj.shape[1:]):
        return [(rows, columns)]
    return [(rows, columns // 2)] * 2 if module.is_transposed else [(rows // 2, columns)] * 2


def _parameters(module: nn.Module) -> tuple[int, int]:
    """Weights and biases of one expert."""
    experts = int(module.num_experts)  # type: ignore[arg-type]
    sizes = [("bias" in name, p.numel() // experts) for name, p in module.named_parameters()]
    return sum(size for bias, size in sizes if not bias), sum(size for bias, size in sizes if bias)
