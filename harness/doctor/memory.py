"""How much memory a run needs for its weights and KV caches, and how much there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ecospec.harness.doctor.drafter_part import DrafterPart
from ecospec.harness.doctor.findings import Diagnosis, size_text
from ecospec.harness.doctor.predictor_part import PredictorPart
from ecospec.harness.doctor.target_part import TargetPart

PART = "memory"


@dataclass(frozen=True)
class Load:
    """What a run holds at once.

    Attributes:
        devices: over which the target's weights and KV cache are spread.
        context: tokens of every request, prompt and output together.
    """

    device: str
    devices: int
    dtype: torch.dtype
    context: int
    batch_size: int


def look_at_memory(
    said: Diagnosis,
    load: Load,
    target: TargetPart,
    drafter: DrafterPart | None,
    predictors: Sequence[PredictorPart],
) -> None:
    """Add up, and compare with what is free."""
    width = load.dtype.itemsize
    rows = load.batch_size * load.context
    at = f"{load.batch_size} × {load.context:,} tokens"
    spread = [("target's weights", target.run_bytes, f"{size_text(target.run_bytes)}")]
    if target.kv_bytes_per_token is not None:
        per_token = target.kv_bytes_per_token
        said.fact(PART, "KV cache per token", per_token, f"{size_text(per_token)} (measured)")
        spread.append(("target's KV cache", per_token * rows, f"{size_text(per_token * rows)} ({at})"))
    whole = []
    if drafter is not None:
        kv = drafter.kv_elements_per_token * width * rows
        whole.append(("drafter's weights", drafter.elements * width, size_text(drafter.elements * width)))
        whole.append(("drafter's KV cache", kv, f"{size_text(kv)} ({at})"))
    for predictor in predictors:
        size = predictor.elements * width + (predictor.host_bytes if load.device == "cpu" else 0)
        if size:
            whole.append((f"predictor {predictor.label}", size, size_text(size)))
    for name, size, text in (*spread, *whole):
        said.fact(PART, name, size, text)
    total = sum(size for _, size, _ in (*spread, *whole))
    said.fact(PART, "total", total, f"{size_text(total)}, and what passes need while they run")
    # The first device has the drafter and the predictors too.
    most = sum(size for _, size, _ in spread) // load.devices + sum(size for _, size, _ in whole)
    if load.devices > 1:
        text = f"{size_text(most)} of {load.devices} devices (an estimate: the target spread evenly)"
        said.fact(PART, "most on one device", most, text)
    free = free_bytes(load.device)
    said.fact(PART, "free", free, f"{size_text(free)} on {load.device}")
    if most > free:
        said.problem(
            f"memory: {size_text(most)} are needed on one device for {at}, and {size_text(free)} are free on "
            f"{load.device}; try --max-context, a smaller --batch-size or --dtype"
            + (", or --device-map auto" if load.devices == 1 and torch.cuda.device_count() > 1 else "")
        )


def free_bytes(device: str) -> int:
    """Memory that is free now, on a GPU or in this machine."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + _reclaimable()


def _reclaimable() -> int:
    """Memory that holds cached files, and that the system gives back when it is needed; 0 where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    except (OSError, ValueError, IndexError):
        return 0
    return 1024 * max(0, kilobytes.get("MemAvailable", 0) - kilobytes.get("MemFree", 0))
