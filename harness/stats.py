"""Ratios over prompts and how far to trust them: a ratio of sums with a paired-bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap, trim_mean

CONFIDENCE = 0.95
RESAMPLES = 9_999
VALUES_PER_BATCH = 1 << 20
"""Resampled values held in memory at once, per array."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Ratio:
    """A ratio over prompts.

    Attributes:
        value: None when there is nothing to divide by.
        interval: None when the prompts cannot say how far the ratio varies.
        why: why the value or the interval is missing; None when neither is.
    """

    value: float | None
    interval: Interval | None = None
    why: str | None = None


def paired_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    numerator_per: Sequence[float] | None = None,
    denominator_per: Sequence[float] | None = None,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """Ratio of sums over prompts, with its paired-bootstrap percentile interval.

        ratio = (Σ numerator / Σ numerator_per) / (Σ denominator / Σ denominator_per)

    Element i of every array belongs to prompt i, and a resample draws whole prompts. With AR's seconds and
    tokens above and a method's below, the ratio is the method's speed-up. It is not the mean of the
    prompts' own ratios: a prompt weighs as much as the time it took.

    Args:
        numerator, denominator: [n] what is summed, none negative.
        numerator_per, denominator_per: [n] what each sum is divided by; without them, 1.

    Raises:
        ValueError: the arrays differ in length.
    """
    top, bottom = _array(numerator), _array(denominator)
    top_per = np.full(len(top), 1 / max(1, len(top))) if numerator_per is None else _array(numerator_per)
    bottom_per = np.full(len(bottom), 1 / max(1, len(bottom))) if denominator_per is None else _array(denominator_per)
    lengths = [len(array) for array in (top, bottom, top_per, bottom_per)]
    if len(set(lengths)) > 1:
        raise ValueError(f"paired arrays must have one length, but have {lengths}")
    if not len(top):
        return Ratio(None, why="no prompt to compare")
    if top_per.sum() <= 0 or bottom.sum() <= 0 or bottom_per.sum() <= 0:
        return Ratio(None, why="nothing to divide by")
    value = float(_ratio(top, top_per, bottom, bottom_per))
    if len(top) == 1:
        return Ratio(value, why="a single prompt or batch")
    if min(top_per.min(), bottom.min(), bottom_per.min()) <= 0:
        return Ratio(value, why="a prompt with nothing to divide by")
    found = bootstrap(
        (top, top_per, bottom, bottom_per),
        _ratio,
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, VALUES_PER_BATCH // len(top)),
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    interval = Interval(float(found.low), float(found.high))
    if interval.high - interval.low <= 1e-12 * abs(value):
        return Ratio(value, why="the same ratio for every prompt")
    return Ratio(value, interval)


def _array(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _ratio(top: Any, top_per: Any, bottom: Any, bottom_per: Any, axis: int = -1) -> Any:
    sums = [array.sum(axis=axis) for array in (top, top_per, bottom, bottom_per)]
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def typical_ratio(
    ratios: Sequence[float], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio:
    """The ratio of typical prompts: exp of the mean of the middle half of the logs, with its percentile interval.

    On a shared machine a few prompts take several times as long in one run alone. They decide a ratio of sums; here
    the quarter of the prompts with the largest ratios and the quarter with the smallest do not count.

    Args:
        ratios: [n] of each prompt, above 0.
    """
    if not len(ratios):
        return Ratio(None, why="no prompt to compare")
    logs = np.log(_array(ratios))
    value = float(np.exp(_middle_half(logs)))
    if len(logs) == 1:
        return Ratio(value, why="a single prompt or batch")
    if np.ptp(logs) <= 1e-12:
        return Ratio(value, why="the same ratio for every prompt")
    found = bootstrap(
        (logs,),
        _middle_half,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, VALUES_PER_BATCH // len(logs)),
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Ratio(value, Interval(float(np.exp(found.low)), float(np.exp(found.high))))


def _middle_half(values: Any, axis: int = -1) -> Any:
    return trim_mean(values, 0.25, axis=axis)
