"""Two files of pytest-benchmark side by side: ratios of medians, gated as the times of runs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from ecospec.errors import UserError
from ecospec.harness.comparing.timings import NOT_GATED, OK, SLOWER, is_slower
from ecospec.harness.run_folder import first_difference
from ecospec.harness.stats import CONFIDENCE, RESAMPLES, Interval, Ratio

SCHEMA = 1
FEWEST_ROUNDS = 16
BLOCKS = 8
"""Rounds that follow each other share what else the machine does, so that what is resampled are stretches of them."""
SAME_MACHINE = (
    *("machine", "system", "processor", "python_implementation", "python_version"),
    *("cpu brand_raw", "cpu count", "cpu arch"),
)


@dataclass(frozen=True)
class Benchmark:
    """Seconds of each round, in order."""

    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class BenchmarkFile:
    """What pytest-benchmark's ``--benchmark-json`` has written."""

    machine: Mapping[str, Any]
    benchmarks: Mapping[str, Benchmark]


@dataclass(frozen=True)
class BenchmarkTiming:
    """One benchmark in two files; ``ratio`` is NEW / BASE of the medians, above 1 is slower."""

    name: str
    base_seconds: float
    new_seconds: float
    ratio: Ratio
    rounds: tuple[int, int]
    verdict: str
    why: str | None = None


@dataclass(frozen=True)
class BenchmarkComparison:
    """What differs between two files; see `Comparison`."""

    timings: tuple[BenchmarkTiming, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> list[str]:
        """What fails, in words, one a line."""
        slower = [
            f"{each.name}: median {each.base_seconds:.3g} s -> {each.new_seconds:.3g} s, NEW / BASE = "
            f"{each.ratio.value:.3f}"
            for each in self.timings
            if each.verdict == SLOWER
        ]
        return [*(f"{name}: missing in NEW" for name in self.missing), *slower]


def is_benchmarks(raw: object) -> bool:
    """Whether a JSON value is pytest-benchmark's."""
    return isinstance(raw, dict) and {"machine_info", "benchmarks"} <= set(raw)


def read_benchmarks(path: Path, raw: Mapping[str, Any]) -> BenchmarkFile:
    """The benchmarks of a file.

    Raises:
        UserError: it does not hold each round.
    """
    try:
        info, cpu = raw["machine_info"], raw["machine_info"].get("cpu", {})
        flat = {**info, **{f"cpu {key}": value for key, value in cpu.items()}}
        found = {
            str(each["fullname"]): Benchmark(
                str(each["fullname"]), tuple(float(seconds) for seconds in each["stats"]["data"])
            )
            for each in raw["benchmarks"]
        }
        if not found or not all(each.seconds and min(each.seconds) > 0 for each in found.values()):
            raise ValueError("a benchmark without rounds, or none at all")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: not the rounds of benchmarks ({type(error).__name__}: {error}); expected what pytest writes with "
            "--benchmark-json, or with --benchmark-save and --benchmark-save-data"
        ) from error
    return BenchmarkFile({key: flat.get(key) for key in SAME_MACHINE}, found)


def compare_benchmarks(base: BenchmarkFile, new: BenchmarkFile, *, slower: float) -> BenchmarkComparison:
    """Compare the benchmarks of one name.

    Raises:
        UserError: there is none.
    """
    common = [name for name in base.benchmarks if name in new.benchmarks]
    if not common:
        raise UserError("no benchmark in common")
    difference = first_difference(base.machine, new.machine, SAME_MACHINE)
    other = None if difference is None else difference.replace(", now it is ", " in BASE and ") + " in NEW"
    pairs = [(base.benchmarks[name].seconds, new.benchmarks[name].seconds) for name in common]
    reasons = ["another machine" if other else _too_few(*pair) for pair in pairs]
    confidence = 1 - (1 - CONFIDENCE) / max(1, sum(reason is None for reason in reasons))
    timings = [
        _timing(name, *pair, reason, slower, confidence)
        for name, pair, reason in zip(common, pairs, reasons, strict=True)
    ]
    return BenchmarkComparison(
        tuple(timings),
        tuple(name for name in base.benchmarks if name not in new.benchmarks),
        tuple(name for name in new.benchmarks if name not in base.benchmarks),
        () if other is None else (f"another machine: {other}",),
    )


def _too_few(base: Sequence[float], new: Sequence[float]) -> str | None:
    rounds = min(len(base), len(new))
    return f"{rounds} rounds, fewer than {FEWEST_ROUNDS}" if rounds < FEWEST_ROUNDS else None


def _timing(
    name: str, base: Sequence[float], new: Sequence[float], reason: str | None, slower: float, confidence: float
) -> BenchmarkTiming:
    medians = float(np.median(base)), float(np.median(new))
    ratio = median_ratio(base, new, confidence)
    verdict = NOT_GATED
    if reason is None:
        verdict = SLOWER if is_slower(ratio, slower) else OK
    return BenchmarkTiming(name, *medians, ratio, (len(base), len(new)), verdict, reason)


def median_ratio(base: Sequence[float], new: Sequence[float], confidence: float) -> Ratio:
    """Median of the new rounds over that of the old, with a percentile interval over stretches of rounds."""
    value = float(np.median(new) / np.median(base))
    if min(len(base), len(new)) < 2:
        return Ratio(value, why="a single round")
    blocks = [
        np.array([np.median(part) for part in np.array_split(side, min(BLOCKS, len(side)))]) for side in (base, new)
    ]
    if all(np.ptp(side) == 0 for side in blocks):
        return Ratio(value, why="the same time in every stretch of rounds")
    found = bootstrap(
        blocks,
        lambda old, now, axis=-1: np.median(now, axis=axis) / np.median(old, axis=axis),
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(value, Interval(float(found.low), float(found.high)))


def benchmarks_json(comparison: BenchmarkComparison) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    return {
        "schema": SCHEMA,
        "passes": not comparison.regressions,
        "regressions": comparison.regressions,
        **asdict(comparison),
    }
