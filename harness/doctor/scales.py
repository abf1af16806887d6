"""Whether the scales of an FP8 checkpoint go with its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ecospec.harness.doctor.findings import Diagnosis
from ecospec.harness.doctor.headers import Header
from ecospec.predictors.pretrained import SCALES

FP8 = ("F8_E4M3", "F8_E5M2")
SCALE = "_scale_inv"
FLOATS = ("F32", "BF16", "F16")


def look_at_scales(said: Diagnosis, label: str, headers: Mapping[str, Header], quantization: Mapping[str, Any]) -> None:
    """Name the first weight without scales, scales of another grid, and scales that no config speaks of."""
    if not quantization:
        left = sorted(name for name in headers if name.endswith(SCALES))
        if left:
            said.problem(
                f"{label}: {left[0]}, and {len(left) - 1} more tensors, are scales of quantised weights which nothing "
                "uses; expected the quantization_config in config.json that goes with them"
            )
        return
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not block:
        return
    stored = {name: header for name, header in headers.items() if header.dtype in FP8 and len(header.shape) == 2}
    missing = sorted(name for name in stored if f"{name}{SCALE}" not in headers)
    if missing:
        said.problem(f"{label}: {missing[0]} is FP8, and there is no {missing[0]}{SCALE}; {len(missing)} such weights")
    for name, header in sorted(stored.items()):
        scales = headers.get(f"{name}{SCALE}")
        grid = tuple(math.ceil(size / each) for size, each in zip(header.shape, block, strict=True))
        if scales is not None and scales.dtype in FLOATS and scales.shape != grid:
            said.problem(
                f"{label}: {name}{SCALE} has shape {scales.shape}, expected {grid} for blocks of {list(block)}"
            )
            return
