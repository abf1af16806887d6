"""Experts whose weights are stored in fewer bits: their routing, and the bytes of one.

Block-wise FP8 experts (DeepSeek-V3, Qwen3-FP8) go through an experts interface of their own. MXFP4 experts (GPT-OSS)
go through none: they are told the experts of each token, or in older versions of the library a packed form of it, and
then the router is asked beside. Where there is no kernel for them the library unpacks both on loading, and what is
left are ordinary experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, Fp8Dequantize
from transformers.integrations.moe import ExpertsInterface

from ecospec.errors import UserError

MXFP4_BLOCK = 32
"""Weights that share a scale of one byte."""

Route = Callable[[Tensor], Tensor]
"""Takes the experts [tokens, K] of a pass, and gives those that are to be used: the same, unless others are forced."""


def is_mxfp4(module: Any) -> bool:
    """Whether these are experts packed as MXFP4."""
    return hasattr(module, "gate_up_proj_precision_config") and hasattr(module, "num_experts")


def mxfp4_bytes(module: Any) -> int:
    """Bytes of one expert packed as MXFP4: half a byte a weight, a scale for every block, and its biases.

    The kernels keep the weights in objects of their own, so the sizes are those of the format.
    """
    hidden, inner, experts = int(module.hidden_size), int(module.intermediate_size), int(module.num_experts)
    weights = 3 * hidden * inner
    biases = sum(p.numel() * p.element_size() for name, p in module.named_parameters() if name.endswith("_bias"))
    return weights // 2 + weights // MXFP4_BLOCK + int(biases) // experts


def note_mxfp4(mlp: nn.Module, experts: Any, route: Route) -> None:
    """Have the experts of every pass noted.

    Args:
        mlp: the module that holds the experts, and their router as ``router``.
    """

    def told(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        if not (isinstance(index, Tensor) and not index.is_floating_point() and index.dim() == 2):
            return None
        used = route(index)
        if "top_k_index" in kwargs:
            return args, {**kwargs, "top_k_index": used}
        return (args[0], used, *args[2:]), kwargs

    def asked(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        router = module.router
        logits = F.linear(states.reshape(-1, states.shape[-1]), router.weight, router.bias)
        index = logits.topk(router.top_k, dim=-1).indices
        if route(index) is not index:
            raise UserError(
                f"{type(experts).__name__}: this version of transformers tells packed MXFP4 experts no indices, so "
                "that their routing cannot be forced; expected a newer transformers"
            )

    experts.register_forward_pre_hook(told, with_kwargs=True)
    if "forward" in vars(mlp):  # the library has put another forward there, whose experts are not told indices
        mlp.register_forward_pre_hook(asked, with_kwargs=True)


def register_fp8(name: str, route: Callable[[Any, Tensor], Tensor]) -> None:
    """Put an experts function under this name beside the library's for FP8, which asks `route` and hands over to it.

    On an accelerator that is its grouped product; elsewhere its loop over the activated experts.
    """

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k_index = route(module, top_k_index)
        if hidden_states.device.type == "cpu":
            plain: Any = type(module).forward.__wrapped__
            result: Tensor = plain(module, hidden_states, top_k_index, top_k_weights)
            return result
        grouped: Any = ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
        result = grouped(module, hidden_states, top_k_index, top_k_weights)
        return result

    interface: ExpertsInterface = ALL_FP8_EXPERTS_FUNCTIONS
    interface.register(name, forward)


def is_fp8(module: Any) -> bool:
    """Whether these are experts stored in blocks of FP8."""
    weight = getattr(module, "down_proj", None)
    return isinstance(weight, Tensor) and weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _declared(quantization: Any, name: str) -> Any:
    """What a quantization config says, as the library's object or as in the file; None where it says nothing."""
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)


def unpacked_method(declared: Any, model: nn.Module) -> str | None:
    """The checkpoint's quantisation where the library has unpacked its weights on loading, such as ``fp8``.

    Args:
        declared: the ``quantization_config`` of the checkpoint, read apart: the loaded model's no longer has it.
    """
    method = _declared(declared, "quant_method")
    kept = any(is_fp8(module) or is_mxfp4(module) for module in model.modules())
    return None if kept or method is None else str(getattr(method, "value", method))


@torch.no_grad()
def settle(experts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Give unpacked experts the run's dtype: the library unpacks some to bfloat16 whatever it is asked for."""
    for module in experts:
        if not is_fp8(module) and not is_mxfp4(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def unpack_blocks(stored: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The numbers [..., rows, columns], in float32, of FP8 weights whose last blocks may be cut off.

    Args:
        stored: FP8 [..., rows, columns]. scales: [..., ⌈rows / block rows⌉, ⌈columns / block columns⌉].
        block: rows and columns that share a scale.
    """
    rows, columns = stored.shape[-2:]
    wide = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return stored.float() * wide[..., :rows, :columns]


@contextmanager
def whole_blocks() -> Iterator[list[str]]:
    """In this block the library unpacks FP8 weights by the block size that the checkpoint declares.

    By itself it divides the weight evenly among the scales. That is wrong where the last block is cut off, as in
    DeepSeek-V3, whose keys' projection has 576 rows in blocks of 128: it then refuses, or where the numbers happen
    to divide, gives other weights. What is given back is filled with what does not fit: the library's own error does
    not say it.
    """
    wrong: list[str] = []
    library = Fp8Dequantize._dequantize_one

    def dequantize(self: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        found = _declared(self.hf_quantizer.quantization_config, "weight_block_size")
        # Some versions of the library have made the weights wide by now.
        if found is not None and quantized.dtype.is_floating_point and scales.dim() > 1:
            block = (int(found[0]), int(found[1]))
            grid = [-(-size // each) for size, each in zip(quantized.shape[-2:], block, strict=True)]
            if scales.dtype.is_floating_point:
                if list(scales.shape[-2:]) != grid:
                    wrong.append(
                        f"an FP8 weight {list(quantized.shape)} has scales {list(scales.shape)}, expected {grid} for "
                        f"blocks of {list(block)}"
                    )
                    raise ValueError(wrong[-1])
                return unpack_blocks(quantized, scales, block).to(output_dtype or torch.bfloat16)
        result: Tensor = library(self, quantized, scales, output_dtype)
        return result

    Fp8Dequantize._dequantize_one = dequantize
    try:
        yield wrong
    finally:
        Fp8Dequantize._dequantize_one = library
