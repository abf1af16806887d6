"""Times of two runs: what is slower is found, and the machine's noise is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compared_runs import METHODS, changed, records, run_of

from ecospec.harness.comparing.comparison import compare_runs
from ecospec.harness.comparing.figures import tolerances_of
from ecospec.harness.comparing.timings import (
    ABSOLUTE,
    FEWEST_UNITS,
    NOT_GATED,
    OK,
    RELATIVE,
    SLOWER,
    Series,
    Unit,
    is_slower,
    judge,
    series_of,
)
from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.stats import Interval, Ratio, typical_ratio

LABELS = [method.label for method in METHODS]


def slower(found: Sequence[PromptRecord], factor: float, method: str = "marginal-cost") -> list[PromptRecord]:
    return changed(found, lambda r: {"decode_seconds": r.decode_seconds * factor}, method)


def relative(base: Sequence[PromptRecord], new: Sequence[PromptRecord]) -> list[Series]:
    runs = run_of(base), run_of(new)
    return [each for label in LABELS for each in series_of(*runs, label, None, absolute=False) if each.kind == RELATIVE]


def fails(base: Sequence[PromptRecord], new: Sequence[PromptRecord]) -> list[str]:
    """The methods that are judged slower, at the command's own 10 %."""
    return [each.method for each in judge(relative(base, new), 0.10, resamples=499) if each.verdict == SLOWER]


def middle_half(values: Sequence[float]) -> float:
    """By hand: without the quarter of the largest and of the smallest, a quarter rounded down."""
    logs, cut = sorted(math.log(value) for value in values), len(values) // 4
    kept = logs[cut : len(logs) - cut]
    return math.exp(sum(kept) / len(kept))


def test_a_typical_ratio_is_that_of_the_middle_half() -> None:
    ratios = [1.0, 1.1, 0.9, 50.0, 1.2, 0.01, 1.3]
    found = typical_ratio(ratios)
    assert found.value == pytest.approx(middle_half(ratios))
    assert found.interval is not None
    assert found.value in found.interval
    wider = typical_ratio(ratios, confidence=0.999).interval
    assert wider is not None
    assert wider.low <= found.interval.low <= found.interval.high <= wider.high
    for few, value in (([], None), ([1.5], 1.5), ([1.5, 1.5], 1.5)):
        none = typical_ratio(few)
        assert none.interval is None
        assert none.why
        assert none.value == (None if value is None else pytest.approx(value))


def test_the_interval_of_a_typical_ratio_is_that_of_a_bootstrap_written_out() -> None:
    rng = np.random.default_rng(3)
    ratios = np.exp(rng.normal(0.05, 0.1, 30))
    drawn = [middle_half(ratios[rng.integers(0, 30, 30)]) for _ in range(4000)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    found = typical_ratio(ratios).interval
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(low, abs=0.006), pytest.approx(high, abs=0.006))


def test_a_timing_is_the_double_ratio_of_seconds_per_token() -> None:
    base, new = records(noise=0.05), slower(records(noise=0.05, seed=1), 1.3)
    timing = next(each for each in judge(relative(base, new), 0.1) if each.method == "marginal-cost")

    def seconds(found: Sequence[PromptRecord], method: str) -> list[float]:
        return [record.decode_seconds for record in found if record.method == method]

    four = [seconds(found, method) for found in (new, base) for method in ("marginal-cost", AR)]
    by_hand = (sum(four[0]) / sum(four[1])) / (sum(four[2]) / sum(four[3]))
    assert timing.sums.value == pytest.approx(by_hand)
    ratios = [(a / b) / (c / d) for a, b, c, d in zip(*four, strict=True)]
    assert timing.typical.value == pytest.approx(middle_half(ratios))
    assert (timing.units, timing.verdict) == (24, SLOWER)


def test_a_machine_that_is_half_as_fast_is_no_regression_but_where_seconds_are_gated() -> None:
    base = records(noise=0.03)
    new = [replace(r, decode_seconds=r.decode_seconds * 2) for r in records(noise=0.03, seed=1)]
    assert fails(base, new) == []
    runs = [run_of(base)], [run_of(new)]
    found = compare_runs(*runs, tolerances_of(()), slower=0.1, absolute=False)
    assert found.regressions == []
    seconds = [each for each in found.timings if each.kind == ABSOLUTE]
    assert [each.method for each in seconds] == LABELS  # they are shown all the same
    assert {each.verdict for each in seconds} == {NOT_GATED}
    assert all(each.sums.value == pytest.approx(2, abs=0.5) for each in seconds)
    found = compare_runs(*runs, tolerances_of(()), slower=0.1, absolute=True)
    assert {each.verdict for each in found.timings if each.kind == ABSOLUTE} == {SLOWER}
    assert len(found.regressions) == 4


@pytest.mark.parametrize(
    ("value", "low", "fails"),
    [(1.11, 1.034, True), (1.11, 1.033, False), (1.09, 1.05, False), (1.1, 1.05, False), (1.11, None, True)],
)
def test_what_is_slower_is_beyond_both_bounds(value: float, low: float | None, fails: bool) -> None:
    assert is_slower(Ratio(value, None if low is None else Interval(low, 1.5)), 0.1) == fails
    assert not is_slower(Ratio(None), 0.1)


def test_a_ratio_that_is_far_from_certain_passes() -> None:
    """Half of the prompts are faster by a quarter, half slower by four fifths: 1.16, and it could be anything."""
    units = tuple(Unit(base=1.0, new=ratio, base_ar=1.0, new_ar=1.0) for ratio in (0.75, 1.8) * 10)
    (found,) = judge([Series("gsm8k", "mine", RELATIVE, units, None)], 0.1)
    assert found.typical.value == pytest.approx(math.sqrt(0.75 * 1.8))
    assert found.typical.interval is not None
    assert found.typical.interval.low < 1
    assert found.verdict == OK


def test_a_method_that_is_faster_passes() -> None:
    assert fails(records(noise=0.03), slower(records(noise=0.03, seed=1), 0.5)) == []


def test_too_few_prompts_are_shown_and_not_gated() -> None:
    for prompts, verdict in ((FEWEST_UNITS - 1, NOT_GATED), (FEWEST_UNITS, SLOWER)):
        series = relative(records(prompts), slower(records(prompts), 2.0))
        found = next(each for each in judge(series, 0.1) if each.method == "marginal-cost")
        assert (found.verdict, found.units) == (verdict, prompts)
        assert (found.why is None) == (verdict == SLOWER)


def test_prompts_of_a_batch_are_one_unit_and_prompts_without_a_step_none() -> None:
    def batched(found: list[PromptRecord]) -> list[PromptRecord]:
        first = {r.prompt_id: f"gsm8k-{int(r.prompt_id.split('-')[1]) // 4 * 4}" for r in found}
        found = [replace(r, batch=first[r.prompt_id], step_share=r.steps / 4) for r in found]
        return [replace(r, steps=0, decode_seconds=0.0) if r.prompt_id == "gsm8k-3" else r for r in found]

    series = relative(batched(records()), batched(records()))
    assert {len(each.units) for each in series} == {6}


def test_outputs_of_another_length_are_compared_by_the_token() -> None:
    """Half the tokens in half the time is no change."""

    def half(record: PromptRecord) -> dict[str, Any]:
        left = (len(record.tokens) - 1) // 2 + 1
        share = (left - 1) / (len(record.tokens) - 1)
        return {"tokens": record.tokens[:left], "decode_seconds": record.decode_seconds * share}

    for found in judge(relative(records(), changed(records(), half)), 0.1):
        assert found.sums.value == pytest.approx(1)
        assert found.typical.value == pytest.approx(1)


@pytest.mark.parametrize(("noise", "most_alarms", "fewest_found"), [(0.05, 0, 185), (0.10, 1, 110)])
def test_two_runs_of_the_same_pass_and_one_that_is_15_percent_slower_fails(
    noise: float, most_alarms: int, fewest_found: int
) -> None:
    """Over 200 pairs of runs of 32 prompts by three methods. The times of a prompt have a noise of 5 or 10 % each (and
    a double ratio twice that), beside a drift that all methods share. The bounds are a little wider than what is
    found.
    """
    alarms = found = others = 0
    for seed in range(200):
        base = records(32, noise=noise, seed=2 * seed)
        new = records(32, noise=noise, seed=2 * seed + 1)
        alarms += bool(fails(base, new))
        failed = fails(base, slower(new, 1.15))
        found += "marginal-cost" in failed
        others += bool(set(failed) - {"marginal-cost"})
    print(f"noise {noise}: {alarms} false alarms, {found} of 200 found, {others} blamed on others")
    assert alarms <= most_alarms
    assert others <= most_alarms
    assert found >= fewest_found


def test_a_few_prompts_that_the_machine_held_up_decide_nothing() -> None:
    """One time in twenty is two to four times as long, in one run alone."""

    def held_up(found: list[PromptRecord], seed: int) -> list[PromptRecord]:
        rng = np.random.default_rng([seed, 2])
        factors = np.where(rng.random(len(found)) < 0.05, rng.uniform(2, 4, len(found)), 1.0)
        return [replace(r, decode_seconds=r.decode_seconds * float(f)) for r, f in zip(found, factors, strict=True)]

    alarms = found = 0
    for seed in range(100):
        base = held_up(records(40, noise=0.05, seed=2 * seed), 2 * seed)
        new = held_up(records(40, noise=0.05, seed=2 * seed + 1), 2 * seed + 1)
        alarms += bool(fails(base, new))
        found += "marginal-cost" in fails(base, slower(new, 1.15))
    print(f"{alarms} false alarms, {found} of 100 found")
    assert alarms <= 1
    assert found >= 75


def test_gated_intervals_get_wider_with_their_number() -> None:
    base, new = records(noise=0.1), records(noise=0.1, seed=1)
    widths = []
    for count in (1, 3):
        intervals = [each.typical.interval for each in judge(relative(base, new)[:count], 0.1)]
        assert intervals[0] is not None
        widths.append(intervals[0].high - intervals[0].low)
    assert widths[1] > 1.1 * widths[0]


def test_several_runs_are_judged_together_as_well() -> None:
    """Each of two runs has too few prompts by itself."""
    runs = [
        [replace(run_of(records(10, noise=0.02, seed=seed)), name=name) for seed, name in pair]
        for pair in (((0, "amc"), (1, "gsm8k")), ((2, "amc"), (3, "gsm8k")))
    ]
    found = compare_runs(*runs, tolerances_of(()), slower=0.1, absolute=False)
    gated = [each for each in found.timings if each.verdict != NOT_GATED]
    assert [(each.run, each.method, each.units, each.verdict) for each in gated] == [
        ("all runs", label, 20, OK) for label in LABELS[1:]
    ]
