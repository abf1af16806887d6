"""Tables on terminals of several widths: nothing is cut off, and no figure is broken."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared_runs import records, write_run
from report_records import records as report_records
from report_records import summary
from rich.console import Console

from ecospec.harness.fitted_tables import Cell, Column, Kind, fitted_tables
from ecospec.harness.pairs import Pair, pairs_tables
from ecospec.harness.recording.comparing import Replayed, ReplayRow, replay_tables
from ecospec.harness.stats import Interval, Ratio
from ecospec.harness.summary import summary_tables

COLUMNS = [
    Column("run", Kind.NAME),
    Column("method", Kind.NAME),
    Column("ratio of sums"),
    Column("E"),
    Column("", Kind.WORDS),
]
ROWS: list[list[Cell]] = [
    ["gsm8k", "confidence", ("1.234", "(1.111–1.345)"), "12.25", "not gated: 3 prompts, fewer than 16"],
    ["gsm8k", "marginal-cost", ("0.987", "(0.901–1.076)"), "11.50", "ok"],
]
FIGURES = ("1.234", "(1.111–1.345)", "12.25", "0.987", "(0.901–1.076)", "11.50")


def printed(tables: Sequence[Any], width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for table in tables:
        console.print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def lines_at(width: int) -> list[str]:
    return printed(fitted_tables("title", COLUMNS, ROWS, width), width)


def test_with_room_a_line_is_one_line() -> None:
    lines = lines_at(100)
    assert lines[2].split() == ["run", "method", "ratio", "of", "sums", "E"]
    assert lines[4].split() == [
        "gsm8k",
        "confidence",
        *FIGURES[:3],
        "not",
        "gated:",
        "3",
        "prompts,",
        "fewer",
        "than",
        "16",
    ]


def test_with_less_room_an_interval_stands_below_its_ratio() -> None:
    lines = lines_at(74)
    first = next(number for number, line in enumerate(lines) if "1.234" in line)
    assert "confidence" in lines[first]
    assert "(1.111–1.345)" in lines[first + 1]
    assert "12.25" in lines[first]


def test_then_the_columns_move_together() -> None:
    (line,) = (line for line in lines_at(66) if "0.987" in line)
    assert " marginal-cost         0.987 11.50 ok" in line


def test_then_the_names_are_one_cell() -> None:
    columns = [*COLUMNS[:2], Column("figure", Kind.NAME), *COLUMNS[2:]]
    rows: list[list[Cell]] = [[*row[:2], "active-experts", *row[2:]] for row in ROWS]
    lines = printed(fitted_tables("title", columns, rows, 70), 70)
    first = next(number for number, line in enumerate(lines) if "1.234" in line)
    assert [line.split()[0] for line in lines[first : first + 3]] == ["gsm8k", "confidence", "active-experts"]
    assert "continued" not in "\n".join(lines)


def test_a_long_name_is_folded_before_a_figure_is() -> None:
    columns = [Column("benchmark", Kind.NAME), Column("seconds")]
    name, figure = "tests/of_something.py::test_of_it", "0.1234567890123456789 s"
    lines = printed(fitted_tables("title", columns, [[name, figure]], 50), 50)
    assert sum(figure in line for line in lines) == 1
    cells = [line.replace(figure, "").strip() for line in lines[4:]]
    assert "".join(cells) == name


def test_at_last_there_are_several_tables_of_the_same_names() -> None:
    lines = lines_at(44)
    tables = sum("title" in line for line in lines)
    assert tables > 1
    assert sum("title, continued" in line for line in lines) == tables - 1
    assert sum("marginal-cost" in line for line in lines) == tables


@pytest.mark.parametrize("width", range(31, 120))
def test_at_any_width_every_figure_is_whole_and_no_line_too_long(width: int) -> None:
    lines = lines_at(width)
    text = "\n".join(lines)
    assert "…" not in text
    for figure in FIGURES:
        assert figure in text
    assert max(map(len, lines)) <= width
    for word in ("gated:", "prompts,", "fewer", "16"):
        assert word in text


@pytest.mark.parametrize("width", [8, 12, 20])
def test_on_the_narrowest_figures_are_broken_and_nothing_is_lost(width: int) -> None:
    text = "".join(re.sub(r"\s", "", line) for line in lines_at(width))
    assert "…" not in text
    for sign in "1234":
        assert text.count(sign) >= "".join(FIGURES).count(sign)


def ratio(value: float) -> Ratio:
    return Ratio(value, Interval(value - 0.11, value + 0.11))


def replayed() -> Replayed:
    rows = [
        ReplayRow(
            label,
            budget,
            False,
            100,
            2.125 + index / 10,
            18.25 + index,
            18.25 + index,
            3.75,
            0.8125,
            ratio(1.205 + index / 10),
            ratio(0.905 + index / 10),
            {"optimal": 0.25, "clairvoyant": 0.125},
        )
        for index, (label, budget) in enumerate(
            [("AR", None), ("confidence", 4), ("marginal-cost:epsilon=2 with learned:path=a/long/folder", 4)]
        )
    ]
    return Replayed(None, tuple(rows), (), (), "a large model on a device")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_replay_keeps_its_intervals(width: int) -> None:
    lines = printed(replay_tables(replayed(), width), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for row in replayed().rows:
        for each in (row.speedup, row.over_confidence):
            assert each is not None
            assert each.interval is not None
            assert f"({each.interval.low:.3f}–{each.interval.high:.3f})" in text
            assert f"{each.value:.3f}" in text
    assert text.count("clairvoyant 12 %") == 3
    assert text.count("optimal 25 %") == 3


@pytest.mark.parametrize("width", [80, 140])
def test_methods_over_each_other_keep_their_intervals(width: int) -> None:
    names = ["AR", "confidence", "marginal-cost", "adaptive", "throughput"]
    pairs = [
        Pair(name, over, ratio(1 + index / 10 + at / 100))
        for index, name in enumerate(names)
        for at, over in enumerate(names[:index])
    ]
    lines = printed(pairs_tables(pairs, width), width)
    assert max(map(len, lines)) <= width
    for pair in pairs:
        interval = pair.ratio.interval
        assert interval is not None
        assert f"({interval.low:.3f}–{interval.high:.3f})" in "\n".join(lines)


def test_a_comparison_keeps_its_intervals_at_80_columns(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = records(noise=0.02)
    worse = [
        replace(each, expert_pairs=each.expert_pairs + index % 3, decode_seconds=each.decode_seconds * 1.2)
        if each.method == "marginal-cost"
        else each
        for index, each in enumerate(records(noise=0.02, seed=1))
    ]
    base, new = write_run(tmp_path / "base", found), write_run(tmp_path / "new", worse)
    monkeypatch.setenv("COLUMNS", "80")
    ran = command("compare", str(base), str(new), "--json", "out.json")
    assert ran.code == 1, ran.err
    tables = ran.out.split("REGRESSION")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in ran.out
    said = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    ratios = [each[key] for each in said["timings"] for key in ("sums", "typical")]
    ratios += [each["change"] for each in said["figures"] if each["verdict"] != "same" and each["change"]]
    assert len(ratios) > 5
    for each in ratios:
        interval = each["interval"]
        assert f"[{interval['low']:.3f}, {interval['high']:.3f}]" in tables


def test_several_runs_keep_their_figures_at_80_columns() -> None:
    names = ("gsm8k-t0-b1-g4", "amc-t0-b1-g4")
    lines = printed(summary_tables({name: summary(report_records()) for name in names}, True, 80), 80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "\n".join(lines)
    cells = [line.split() for line in lines[lines.index("marginal") : lines.index("oracle")]]
    figures = ["1.875", "2.400", "2.00", "3.00", "1.500", "1.9", "–"]
    for name in names:
        assert [name, *figures, "3", "exact"] in cells
    assert ["average", *figures] in cells
