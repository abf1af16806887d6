"""What a run says first: who pays, whether the output is unchanged, and what speaks against the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_records import MANIFEST, METHODS, records, summary

from ecospec.harness.records import AR
from ecospec.harness.report import MethodInfo, Report
from ecospec.harness.stats import Interval, Ratio
from ecospec.harness.verdict import BAD, GOOD, OPEN, verdict_of

LARGE = {**MANIFEST, "target": "a large model"}


def with_ratios(report: Report, label: str, **ratios: tuple[float, float, float] | None) -> Report:
    """The report with a method's ratios replaced by (value, low, high)."""
    found = {
        name: None if given is None else Ratio(given[0], Interval(given[1], given[2])) for name, given in ratios.items()
    }
    return replace(report, rows=tuple(replace(row, **found) if row.label == label else row for row in report.rows))


@pytest.mark.parametrize(
    ("over_ar", "over_baseline", "grade", "words"),
    [
        ((1.2, 1.1, 1.3), (1.1, 1.05, 1.2), GOOD, "is faster than plain decoding: 1.20× (1.10–1.30) decode only"),
        ((1.2, 1.1, 1.3), (1.1, 0.9, 1.2), OPEN, "against confidence no difference can be told, 1.10× (0.90–1.20)"),
        ((1.2, 1.1, 1.3), (0.9, 0.8, 0.95), BAD, "but it loses to confidence, 0.90× (0.80–0.95)"),
        ((1.2, 0.9, 1.3), (1.1, 1.05, 1.2), OPEN, "cannot be told from plain decoding in speed"),
        ((0.8, 0.7, 0.9), (1.1, 1.05, 1.2), BAD, "is slower than plain decoding"),
        ((1.2, 1.1, 1.3), None, GOOD, "marginal is faster than plain decoding"),
        ((1.2, 1.0, 1.3), None, OPEN, "cannot be told"),  # 1 lies within
    ],
)
def test_a_policy_pays_where_the_whole_interval_says_so(
    over_ar: tuple[float, float, float],
    over_baseline: tuple[float, float, float] | None,
    grade: str,
    words: str,
) -> None:
    report = with_ratios(summary(records()), "marginal", decode_speedup=over_ar, over_baseline=over_baseline)
    verdict = verdict_of(report, LARGE)
    assert verdict.method == "marginal"
    assert verdict.pays.grade == grade
    assert words in verdict.pays.text


def test_the_fastest_is_spoken_of_and_the_baseline_only_where_it_is_alone() -> None:
    report = with_ratios(summary(records()), "confidence", decode_speedup=(9.0, 8.0, 10.0))
    assert verdict_of(report, LARGE).method == "marginal"
    alone = summary(records(), METHODS[:2])
    assert verdict_of(alone, LARGE).method == "confidence"
    yardstick = summary(records(), [MethodInfo(AR), MethodInfo("oracle", true_routing=True)])
    assert verdict_of(yardstick, LARGE).method is None
    assert "verification metrics only" in verdict_of(yardstick, LARGE).pays.text


@pytest.mark.parametrize(
    ("changes", "grade", "words"),
    [
        ({}, GOOD, "every token equals plain decoding's, on 3 outputs a method"),
        ({"verdict": "ties", "ties": 1, "largest_gap": 1e-5}, OPEN, "but for numeric ties: marginal differ"),
        ({"verdict": "violated"}, BAD, "Not lossless: marginal emitted"),
        ({"verdict": "unchecked"}, OPEN, "Of marginal nothing was checked"),
    ],
)
def test_the_worst_verdict_of_a_method_counts(changes: dict[str, Any], grade: str, words: str) -> None:
    found = [replace(each, **changes) if each.method == "marginal" else each for each in records()]
    claim = verdict_of(summary(found), LARGE).lossless
    assert (claim.grade, words in claim.text) == (grade, True), claim.text


def test_nothing_checked_is_said_of_all() -> None:
    found = [replace(each, verdict="unchecked") for each in records()]
    assert verdict_of(summary(found, check="none"), LARGE).lossless.text == "Nothing was checked for losslessness."


def test_what_speaks_against_the_figures_is_named() -> None:
    few = summary(records(), copy_bytes_per_second=1e9)
    text = verdict_of(few, MANIFEST, missing=1).trust.text
    for words in (
        "the run is not finished (1 prompt to go)",
        "3 prompts are too few",
        "the embedded model is test equipment",
        "of the copy bandwidth",
    ):
        assert words in text
    # marginal: T_verify 3.6 of 4.5 seconds, so 20 % outside: not named; confidence: 3.6 of 6, 40 %
    assert "outside the target's pass" not in text
    alone = verdict_of(summary(records(), METHODS[:2]), LARGE)
    assert "40.0 % of a step of confidence is outside the target's pass" in alone.trust.text


def test_nothing_against_them_is_said_too() -> None:
    found = [replace(each, prompt_id=f"{each.prompt_id}-{n}") for n in range(10) for each in records()]
    verdict = verdict_of(summary(found), LARGE)
    assert (verdict.trust.grade, verdict.doubts) == (GOOD, ())
    assert verdict.trust.text.startswith("Over 30 prompts")
