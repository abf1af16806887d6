"""Ratios of sums over prompts and their paired-bootstrap intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ecospec.harness.stats import RESAMPLES, Interval, Ratio, paired_ratio

pytestmark = pytest.mark.filterwarnings("error")

AR_SECONDS = [4.0, 8.0, 6.0, 3.0, 9.0, 5.0, 7.0, 2.0]
AR_TOKENS = [40, 90, 50, 30, 100, 45, 60, 25]
SECONDS = [3.0, 4.0, 5.0, 2.5, 4.0, 4.5, 3.0, 2.1]
TOKENS = [40, 88, 50, 30, 97, 45, 60, 24]


def brute_force(arrays: Sequence[Sequence[float]], resamples: int, seed: int) -> Interval:
    """The 2.5th and 97.5th percentile, one resample of whole prompts at a time."""
    source = random.Random(seed)
    prompts = range(len(arrays[0]))
    ratios = []
    for _ in range(resamples):
        drawn = source.choices(prompts, k=len(prompts))
        top, top_per, bottom, bottom_per = (sum(array[i] for i in drawn) for array in arrays)
        ratios.append((top / top_per) / (bottom / bottom_per))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(low), float(high))


def test_the_value_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    ratio = paired_ratio([10.0, 2.0], [2.0, 4.0])
    assert ratio.value == pytest.approx(12 / 6)  # the mean of 5 and 0.5 is 2.75


def test_each_sum_is_divided_by_its_own_tokens() -> None:
    ratio = paired_ratio([10.0, 2.0], [2.0, 4.0], numerator_per=[5, 1], denominator_per=[2, 1])
    assert ratio.value == pytest.approx((12 / 6) / (6 / 3))


def test_the_interval_agrees_with_resampling_prompts_one_at_a_time() -> None:
    ratio = paired_ratio(AR_SECONDS, SECONDS, numerator_per=AR_TOKENS, denominator_per=TOKENS)
    twin = brute_force([AR_SECONDS, AR_TOKENS, SECONDS, TOKENS], RESAMPLES, seed=5)
    assert ratio.interval is not None
    assert ratio.interval.low == pytest.approx(twin.low, rel=0.01)
    assert ratio.interval.high == pytest.approx(twin.high, rel=0.01)
    assert ratio.value == pytest.approx((44 / 440) / (28.1 / 434))


def test_without_tokens_the_interval_agrees_as_well() -> None:
    ones = [1.0] * len(SECONDS)
    twin = brute_force([AR_SECONDS, ones, SECONDS, ones], RESAMPLES, seed=6)
    ratio = paired_ratio(AR_SECONDS, SECONDS)
    assert ratio.interval is not None
    assert (ratio.interval.low, ratio.interval.high) == pytest.approx((twin.low, twin.high), rel=0.01)


def test_the_same_seed_gives_the_same_interval_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = paired_ratio(AR_SECONDS, SECONDS)
    monkeypatch.setattr("ecospec.harness.stats.VALUES_PER_BATCH", 800)
    assert paired_ratio(AR_SECONDS, SECONDS) == whole
    assert paired_ratio(AR_SECONDS, SECONDS, seed=1) != whole


def test_prompts_that_all_have_one_ratio_give_no_interval() -> None:
    """Their times differ: a bootstrap that broke the pairs would see a wide spread."""
    ratio = paired_ratio([2 * seconds for seconds in SECONDS], SECONDS)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.interval is None
    assert ratio.why == "the same ratio for every prompt"


def test_equal_prompts_give_no_interval() -> None:
    assert paired_ratio([3.0] * 5, [2.0] * 5) == Ratio(1.5, None, "the same ratio for every prompt")


def test_one_prompt_gives_a_value_alone() -> None:
    assert paired_ratio([3.0], [2.0]) == Ratio(1.5, None, "a single prompt or batch")


@pytest.mark.parametrize(
    ("seconds", "tokens", "why"),
    [
        ([], [], "no prompt to compare"),
        ([0.0, 0.0], [1, 1], "nothing to divide by"),
        ([1.0, 2.0], [0, 0], "nothing to divide by"),
    ],
)
def test_nothing_to_divide_by_is_said_and_not_a_nan(seconds: list[float], tokens: list[int], why: str) -> None:
    ones = [1.0] * len(seconds)
    assert paired_ratio(ones, seconds, denominator_per=tokens) == Ratio(None, None, why)


def test_a_prompt_that_could_be_drawn_alone_and_divide_by_zero_leaves_no_interval() -> None:
    assert paired_ratio([1.0, 2.0], [0.0, 2.0]) == Ratio(1.5, None, "a prompt with nothing to divide by")


def test_arrays_of_different_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one length, but have \[2, 1, 2, 1\]"):
        paired_ratio([1.0, 2.0], [1.0])


def test_an_interval_holds_its_ends() -> None:
    assert 1.0 in Interval(1.0, 1.2)
    assert 1.0 not in Interval(1.001, 1.2)
