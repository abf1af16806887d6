"""Where a step's time goes: a stopwatch that marks phase ends.

On a CPU a mark reads the clock. On CUDA it records an event, and the one synchronisation of a step is at
its end. Time spent inside `excluded` (the oracle's extra pass) belongs to no phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ecospec.harness.records import PHASES


class Stopwatch:
    """Seconds per phase of one step, by `time.perf_counter`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.excluded_seconds = 0.0
        self._last = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.excluded_seconds = 0.0
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def finish(self) -> dict[str, float]:
        """End the step."""
        return self.seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here belongs to no phase and to no total."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.excluded_seconds += spent
            self._last += spent


class CudaStopwatch(Stopwatch):
    """The same by CUDA events on the current stream; `finish` synchronises once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []

    def _record(self, phase: str | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def start(self) -> None:
        """Begin a step."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.excluded_seconds = 0.0
        self._marks.clear()
        self._record(None)

    def mark(self, phase: str) -> None:
        """Record an event; the time since the last one belongs to ``phase``."""
        self._record(phase)

    def finish(self) -> dict[str, float]:
        """Synchronise and read all events."""
        torch.cuda.synchronize(self._device)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                self.seconds[phase] += before.elapsed_time(after) / 1e3
        return self.seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here belongs to no phase and to no total."""
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            self.excluded_seconds += time.perf_counter() - began
            self._record(None)


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch that tells the truth on a device."""
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch()


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
