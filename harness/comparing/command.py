"""``ecospec-bench compare``, once the command line has been read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ecospec.errors import UserError
from ecospec.harness.app import console_width
from ecospec.harness.comparing.baseline import MARK, read_baseline, save_baseline
from ecospec.harness.comparing.benchmarks import (
    BenchmarkFile,
    benchmarks_json,
    compare_benchmarks,
    is_benchmarks,
    read_benchmarks,
)
from ecospec.harness.comparing.comparison import compare_runs, comparison_json
from ecospec.harness.comparing.runs import Run, read_run_folders
from ecospec.harness.comparing.tables import print_benchmarks, print_comparison
from ecospec.harness.writing import write_json

EXIT_PASSES, EXIT_REGRESSION = 0, 1


def compare_command(
    base: Path,
    new: Path,
    tolerances: Mapping[str, float],
    *,
    slower: float,
    absolute: bool,
    elsewhere: Mapping[str, float] | None = None,
    output: Path | None = None,
) -> int:
    """Compare, print and write; returns the exit code.

    Raises:
        UserError: one side cannot be read, or the two cannot be compared.
    """
    sides = [read_side(path) for path in (base, new)]
    console = Console(width=console_width())
    if isinstance(sides[0], BenchmarkFile) and isinstance(sides[1], BenchmarkFile):
        benchmarks = compare_benchmarks(sides[0], sides[1], slower=slower)
        plain, failed = benchmarks_json(benchmarks), benchmarks.regressions
        print_benchmarks(benchmarks, console)
    elif isinstance(sides[0], BenchmarkFile) or isinstance(sides[1], BenchmarkFile):
        raise UserError(f"{base} and {new}: expected two files of pytest-benchmark, or two runs")
    else:
        comparison = compare_runs(sides[0], sides[1], tolerances, slower=slower, absolute=absolute, elsewhere=elsewhere)
        plain, failed = comparison_json(comparison), comparison.regressions
        print_comparison(comparison, console)
    if output is not None:
        write_json(output, plain)
    return EXIT_REGRESSION if failed else EXIT_PASSES


def save_command(path: Path, run: Path) -> None:
    """Save a run's deterministic figures as a baseline.

    Raises:
        UserError: it is no finished run.
    """
    found = read_side(run)
    if isinstance(found, BenchmarkFile):
        raise UserError(f"--save {path}: {run} is a file of pytest-benchmark, which can be kept as it is")
    save_baseline(path, found)
    outputs = sum(len(each) for one in found for each in one.outputs.values())
    print(f"{path}: {outputs} outputs of {len(found)} run{'s' if len(found) != 1 else ''}, {path.stat().st_size} bytes")


def read_side(path: Path) -> list[Run] | BenchmarkFile:
    """A run folder, a folder of several, a saved baseline, or a file of pytest-benchmark.

    Raises:
        UserError: it is none of these, or damaged.
    """
    if path.is_dir():
        return read_run_folders(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not readable ({reason}); expected a run folder or a file of --save") from error
    if isinstance(_json(text.partition("\n")[0]), dict) and MARK in _json(text.partition("\n")[0]):
        return read_baseline(path, text)
    whole = _json(text)
    if is_benchmarks(whole):
        return read_benchmarks(path, whole)
    raise UserError(f"{path}: expected a run folder, a file of --save, or one of pytest-benchmark's --benchmark-json")


def _json(text: str) -> Any:
    """What a text says as JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
