"""Methods against each other over several runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_records import GEOMETRY, METHODS, record

from ecospec.harness.pairs import pair_rows, pairs_markdown, pairs_of
from ecospec.harness.records import AR, PromptRecord, append_records
from ecospec.harness.report import summarise
from ecospec.harness.run_folder import RECORDS
from ecospec.harness.run_reading import RunData


def run(folder: Path, name: str, seconds: dict[str, tuple[float, float]], extra: list[PromptRecord]) -> RunData:
    """Two prompts of 4 and 8 tokens after the first, by three methods that take so long."""
    records = [
        record(prompt, method, tokens, each[at], 2, 4, 8, (0, 0, 0, each[at], 0))
        for method, each in seconds.items()
        for at, (prompt, tokens) in enumerate((("p1", 5), ("p2", 9)))
    ]
    records += extra
    (folder / name).mkdir()
    append_records(folder / name / RECORDS, records)
    methods = [method for method in METHODS if method.label in seconds]
    manifest = {"methods": [m.label for m in methods], "true_routing": [m.label for m in methods if m.true_routing]}
    report = summarise(records, methods=methods, check="all", **GEOMETRY)
    return RunData(name, folder / name, manifest, report, {})


def test_ratios_are_of_sums_over_the_prompts_of_all_runs(tmp_path: Path) -> None:
    first = {AR: (4.0, 8.0), "confidence": (2.0, 4.0), "marginal": (1.0, 4.0), "oracle": (1.0, 1.0)}
    second = {AR: (4.0, 8.0), "confidence": (4.0, 4.0), "marginal": (2.0, 2.0), "oracle": (1.0, 1.0)}
    # A prompt that one method has not finished counts for none.
    unfinished = [record("p3", "confidence", 5, 100.0, 2, 4, 8, (0, 0, 0, 100.0, 0))]
    pairs = pairs_of([run(tmp_path, "a", first, unfinished), run(tmp_path, "b", second, [])])
    found = {(pair.method, pair.over): pair.ratio.value for pair in pairs}
    # AR 24 s, confidence 14 s, marginal 9 s, all for 24 tokens; the oracle has no speed-up.
    assert found == {
        ("confidence", AR): pytest.approx(24 / 14),
        ("marginal", AR): pytest.approx(24 / 9),
        ("marginal", "confidence"): pytest.approx(14 / 9),
    }
    interval = next(pair.ratio.interval for pair in pairs if (pair.method, pair.over) == ("marginal", "confidence"))
    assert interval is not None
    assert 1.0 <= interval.low < 14 / 9 < interval.high <= 2.0
    header, rows = pair_rows(pairs)
    assert header == ["", AR, "confidence"]
    assert [row[0] for row in rows] == ["confidence", "marginal"]
    assert "1.556 (" in pairs_markdown(pairs)


def test_a_method_that_one_run_lacks_is_left_out(tmp_path: Path) -> None:
    times = (4.0, 8.0)
    whole = run(tmp_path, "a", {AR: times, "confidence": times, "marginal": times}, [])
    part = run(tmp_path, "b", {AR: times, "confidence": times}, [])
    assert {(pair.method, pair.over) for pair in pairs_of([whole, part])} == {("confidence", AR)}
