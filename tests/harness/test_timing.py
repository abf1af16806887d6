"""The stopwatch: which phase the time belongs to, and what belongs to none."""

from __future__ import annotations

import time

import pytest
import torch

from ecospec.harness import timing
from ecospec.harness.records import PHASES
from ecospec.harness.timing import CudaStopwatch, Stopwatch, stopwatch_for


class Clock:
    """A clock that is moved by hand."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_time_goes_to_the_phase_that_ends_with_the_mark(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()
    for phase, spent in (("draft", 1.0), ("select", 2.0), ("verify", 4.0), ("draft", 8.0)):
        clock.now += spent
        watch.mark(phase)
    clock.now += 100
    assert watch.finish() == {
        "draft": 9.0,
        "predict": 0.0,
        "estimate": 0.0,
        "select": 2.0,
        "verify": 4.0,
        "commit": 0.0,
    }


def test_excluded_time_belongs_to_no_phase(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()
    clock.now += 1
    with watch.excluded():
        clock.now += 50
    clock.now += 2
    watch.mark("predict")
    clock.now += 4
    watch.mark("verify")
    assert watch.finish() == dict.fromkeys(PHASES, 0.0) | {"predict": 3.0, "verify": 4.0}
    assert watch.excluded_seconds == 50


def test_excluded_time_is_excluded_when_it_fails(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()

    def fails() -> None:
        with watch.excluded():
            clock.now += 50
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    watch.mark("predict")
    assert watch.finish()["predict"] == 0


def test_a_step_starts_from_nothing(clock: Clock) -> None:
    watch = Stopwatch()
    for _ in range(2):
        clock.now += 10
        watch.start()
        with watch.excluded():
            clock.now += 5
        clock.now += 1
        watch.mark("commit")
        assert watch.finish() == dict.fromkeys(PHASES, 0.0) | {"commit": 1.0}
        assert watch.excluded_seconds == 5


def test_a_cpu_reads_the_clock() -> None:
    assert type(stopwatch_for(torch.device("cpu"))) is Stopwatch
    timing.wait_for(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_time_is_the_devices() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    watch = stopwatch_for(device)
    assert isinstance(watch, CudaStopwatch)
    big = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        watch.start()
        watch.mark("draft")
        for _ in range(20):
            big @ big
        watch.mark("verify")  # returns long before the device has done its work
        with watch.excluded():
            time.sleep(0.05)
        watch.mark("commit")
        seconds = watch.finish()
    assert seconds["verify"] > 10 * seconds["draft"]
    assert seconds["commit"] < 0.02
    assert watch.excluded_seconds >= 0.05
