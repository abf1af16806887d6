"""Files of pytest-benchmark side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec.harness.comparing.benchmarks import FEWEST_ROUNDS, median_ratio
from ecospec.harness.comparing.timings import is_slower

MACHINE = {
    "node": "a",
    "machine": "x86_64",
    "system": "Linux",
    "python_version": "3.11.7",
    "cpu": {"brand_raw": "a processor", "count": 2, "hz_actual": [2_000_000_000, 0]},
}


def seconds(seed: int, factor: float = 1.0, rounds: int = 160) -> list[float]:
    """Rounds on a machine with stretches in which everything takes longer."""
    rng = np.random.default_rng(seed)
    stretches = np.repeat(np.exp(rng.normal(0, 0.03, rounds // 20 or 1)), 20)[:rounds]
    return [float(each) for each in 1e-4 * factor * stretches * np.exp(rng.normal(0, 0.05, len(stretches)))]


def write(path: Path, found: dict[str, list[float]], **machine: Any) -> Path:
    raw = {
        "machine_info": {**MACHINE, **machine},
        "benchmarks": [{"fullname": name, "stats": {"data": data}} for name, data in found.items()],
    }
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.15, 1), (0.5, 0)])
def test_what_is_15_percent_slower_fails(command: Callable[..., Any], tmp_path: Path, factor: float, code: int) -> None:
    write(tmp_path / "base.json", {"one": seconds(1), "two": seconds(2)})
    write(tmp_path / "new.json", {"one": seconds(3), "two": seconds(4, factor)})
    ran = command("compare", "base.json", "new.json", "--json", "found.json")
    assert (ran.code, ran.err) == (code, "")
    plain = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert plain["passes"] == (code == 0)
    assert [each["verdict"] for each in plain["timings"]] == ["ok", "slower" if code else "ok"]
    by_hand = np.median(seconds(4, factor)) / np.median(seconds(2))
    assert plain["timings"][1]["ratio"]["value"] == pytest.approx(by_hand)
    assert ("REGRESSION two: median" in ran.out) == bool(code)
    assert command("compare", "base.json", "new.json", "--slower", 0.5).code == 0


def test_two_files_of_the_same_pass_and_a_slower_one_is_found() -> None:
    """Over 100 pairs of three benchmarks."""
    alarms = found = 0
    for seed in range(100):
        ratios = [median_ratio(seconds(6 * seed + i), seconds(6 * seed + i + 3), 1 - 0.05 / 3) for i in range(3)]
        slow = median_ratio(seconds(6 * seed), seconds(6 * seed + 3, 1.15), 1 - 0.05 / 3)
        alarms += any(is_slower(ratio, 0.1) for ratio in ratios)
        found += is_slower(slow, 0.1)
    assert alarms == 0
    assert found >= 90


def test_rounds_that_follow_each_other_are_not_independent() -> None:
    """Three stretches of eight are slower; over single rounds the interval would have no width."""
    stretches = [1.0] * 100 + [1.2] * 60
    found = median_ratio(stretches, stretches, 0.95)
    assert found.interval is not None
    assert found.interval.high - found.interval.low > 0.15


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "arm64"}, "machine = 'x86_64' in BASE and 'arm64' in NEW"),
        ({"cpu": {"brand_raw": "another", "count": 2}}, "cpu brand_raw = 'a processor' in BASE and 'another' in NEW"),
    ],
)
def test_another_machine_gates_nothing(
    command: Callable[..., Any], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    write(tmp_path / "base.json", {"one": seconds(1)})
    write(tmp_path / "new.json", {"one": seconds(1, 3.0)}, **change)
    ran = command("compare", "base.json", "new.json")
    assert ran.code == 0
    assert said in ran.out
    assert "not gated: another machine" in ran.out
    write(tmp_path / "new.json", {"one": seconds(1, 3.0)}, node="b")  # its name is nothing
    assert command("compare", "base.json", "new.json").code == 1


def test_few_rounds_are_not_gated_and_missing_benchmarks_fail(command: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "base.json", {"one": seconds(1, rounds=1), "few": [1.0] * (FEWEST_ROUNDS - 1)})
    write(tmp_path / "new.json", {"one": seconds(1, 2.0, rounds=1), "few": [2.0] * FEWEST_ROUNDS, "more": [1.0]})
    ran = command("compare", "base.json", "new.json")
    assert ran.code == 0
    assert "not gated: 1 rounds" in ran.out
    assert "in NEW alone, not judged: more" in ran.out
    ran = command("compare", "new.json", "base.json")
    assert ran.code == 1
    assert "REGRESSION more: missing in NEW" in ran.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"machine_info": {}, "benchmarks": []}, "not the rounds of benchmarks"),
        ({"machine_info": {}, "benchmarks": [{"fullname": "a", "stats": {"median": 1}}]}, "--benchmark-json"),
        ({"machine_info": {}, "benchmarks": [{"fullname": "a", "stats": {"data": [0.0]}}]}, "without rounds"),
    ],
)
def test_a_file_without_rounds_is_one_line(
    command: Callable[..., Any], tmp_path: Path, content: Any, said: str
) -> None:
    write(tmp_path / "base.json", {"one": seconds(1)})
    (tmp_path / "new.json").write_text(json.dumps(content), encoding="utf-8")
    ran = command("compare", "base.json", "new.json")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert said in ran.err


def test_a_run_and_benchmarks_are_not_compared(command: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "base.json", {"one": seconds(1)})
    (tmp_path / "base.jsonl").write_text('{"ecospec_baseline": 1}\n', encoding="utf-8")
    assert "expected two files of pytest-benchmark, or two runs" in command("compare", "base.json", "base.jsonl").err
    assert command("compare", "base.json", "--save", "file").code == 2
    write(tmp_path / "other.json", {"two": seconds(1)})
    assert "no benchmark in common" in command("compare", "base.json", "other.json").err


def test_what_pytest_benchmark_writes_can_be_read(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(benchmark):\n    benchmark.pedantic(sum, args=(range(1000),), rounds=32)\n", encoding="utf-8"
    )
    arguments = ("-q", "-p", "no:cacheprovider", "--benchmark-json=found.json", "test_it.py")
    # Not as a part of the session that this test may be run by several processes of.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, check=True, capture_output=True, env=environment
    )
    ran = command("compare", "found.json", "found.json")
    assert (ran.code, ran.err) == (0, "")
    assert "test_it.py::test_it" in ran.out
    assert "32, 32" in ran.out
