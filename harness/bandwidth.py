"""How fast this device copies memory: the yardstick for the bytes that a verification step reads."""

from __future__ import annotations

import statistics
import time

import torch

BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
REPEATS = 5


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by copying one large buffer to another; median of five.

    The buffers are far larger than the caches of common devices. Where memory is short, half as large
    ones are tried, down to 16 MiB.
    """
    kind = torch.device(device).type
    size = BUFFER_BYTES[kind]
    while True:
        try:
            source = torch.ones(size, dtype=torch.uint8, device=device)
            destination = torch.empty_like(source)
            break
        except (torch.OutOfMemoryError, RuntimeError):
            if size <= 16 << 20:
                raise
            size //= 2
    seconds = []
    for _ in range(REPEATS + 1):
        _wait(kind)
        began = time.perf_counter()
        destination.copy_(source)
        _wait(kind)
        seconds.append(time.perf_counter() - began)
    return 2 * size / statistics.median(seconds[1:])  # the first copy also maps the pages


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
