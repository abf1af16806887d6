"""The copy bandwidth is a rate in bytes per second, of bytes read and written."""

from __future__ import annotations

import pytest
import torch

from ecospec.harness import bandwidth


def test_bytes_read_and_written_over_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 10.0, 11.0, 20.0, 22.0, 30.0, 32.0, 40.0, 42.0, 50.0, 55.0])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setitem(bandwidth.BUFFER_BYTES, "cpu", 1000)
    # after the first copy: 1, 2, 2, 2, 5 seconds
    assert bandwidth.copy_bandwidth("cpu") == 2 * 1000 / 2.0


def test_smaller_buffers_are_tried_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.ones, []

    def ones(size: int, **kwargs: object) -> torch.Tensor:
        asked.append(size)
        if size > 16 << 20:
            raise RuntimeError("not enough memory")
        return real(size, **kwargs)

    monkeypatch.setattr(bandwidth.torch, "ones", ones)
    monkeypatch.setitem(bandwidth.BUFFER_BYTES, "cpu", 64 << 20)
    assert bandwidth.copy_bandwidth("cpu") > 1e8
    assert asked == [64 << 20, 32 << 20, 16 << 20]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_faster_than_100_gb_per_second() -> None:
    assert bandwidth.copy_bandwidth("cuda") > 1e11
