"""The numbers of a report, each against one worked out by hand, and what is said about them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.report import MethodInfo, MethodRow, Report, report_json, summarise
from ecospec.harness.report_markdown import report_markdown
from ecospec.harness.report_text import headline, notes, print_report, table_width

pytestmark = pytest.mark.filterwarnings("error")

METHODS = [
    MethodInfo(AR),
    MethodInfo("confidence"),
    MethodInfo("marginal"),
    MethodInfo("oracle", true_routing=True),
]
GEOMETRY: dict[str, Any] = {"moe_layers": 2, "top_k": 2, "expert_bytes": 1_000, "always_read_bytes": 4_000}
MANIFEST: dict[str, Any] = {
    "suite": "gsm8k",
    "source": "embedded sample",
    "exemplars": "embedded",
    "target": "embedded",
    "widened": 8,
    "drafter": "embedded",
    "predictor": "learned",
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "budget": 4,
    "draft_steps": 3,
    "draft_topk": 2,
    "max_new_tokens": 128,
    "check": "all",
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "started": "2026-01-02T03:04:05+00:00",
}


def record(
    prompt: str,
    method: str,
    tokens: int,
    decode_seconds: float,
    steps: int,
    selected: int,
    expert_pairs: int,
    phases: tuple[float, float, float, float, float],
    **changes: Any,
) -> PromptRecord:
    names = ("draft", "predict", "select", "verify", "commit")
    return PromptRecord(
        prompt_id=prompt,
        method=method,
        prompt_tokens=10,
        tokens=list(range(tokens)),
        text="",
        reason="length",
        prefill_seconds=1.0,
        decode_seconds=decode_seconds,
        steps=steps,
        emitted=tokens - 1,
        selected=selected,
        expert_pairs=expert_pairs,
        phase_seconds=dict(zip(names, phases, strict=True)),
        **{"verdict": "exact", **changes},
    )


def records() -> list[PromptRecord]:
    """Two prompts of 4 and 8 decode tokens, and a third that ends at its first token."""
    return [
        record("p1", AR, 5, 4.0, 4, 4, 16, (0, 0, 0, 3.6, 0.4)),
        record("p1", "confidence", 5, 2.0, 2, 8, 14, (0.4, 0, 0.1, 1.2, 0.3)),
        record("p1", "marginal", 5, 4.0, 4, 16, 20, (0.4, 0.2, 0.1, 3.0, 0.3), predicted_overlap=0.5),
        record("p1", "oracle", 5, 4.0, 4, 16, 18, (0.4, 0, 0.1, 3.0, 0.3)),
        record("p2", AR, 9, 8.0, 8, 8, 32, (0, 0, 0, 7.2, 0.8)),
        record("p2", "confidence", 9, 4.0, 4, 16, 28, (0.8, 0, 0.2, 2.4, 0.6)),
        record("p2", "marginal", 9, 1.0, 2, 6, 16, (0.2, 0.1, 0.05, 0.6, 0.05), predicted_overlap=0.8),
        record("p2", "oracle", 9, 1.0, 2, 6, 14, (0.2, 0, 0.05, 0.6, 0.05)),
        *(record("p3", method.label, 1, 1e-7, 0, 0, 0, (0, 0, 0, 0, 0)) for method in METHODS),
    ]


def summary(
    found: list[PromptRecord], methods: list[MethodInfo] = METHODS, check: str = "all", **options: Any
) -> Report:
    return summarise(found, methods=methods, check=check, **{**GEOMETRY, **options})


def row(report: Report, label: str) -> MethodRow:
    return next(row for row in report.rows if row.label == label)


@pytest.fixture
def marginal() -> MethodRow:
    return row(summary(records()), "marginal")


# Speed


def test_end_to_end_speedup_is_a_ratio_of_sums_with_prefill(marginal: MethodRow) -> None:
    assert marginal.speedup is not None
    assert marginal.speedup.value == pytest.approx((5 + 9 + 1) / (5 + 2 + 1))  # mean of 1, 4.5, 1 is 2.17
    assert marginal.speedup.interval is not None
    assert marginal.tokens_per_second == pytest.approx(15 / 8)


def test_decode_speedup_is_over_the_tokens_after_the_first(marginal: MethodRow) -> None:
    assert marginal.decode_speedup is not None
    assert marginal.decode_speedup.value == pytest.approx(12 / 5)  # the mean of 1 and 8 is 4.5
    assert marginal.decode_tokens_per_second == pytest.approx(12 / 5)


def test_speedup_is_per_token_when_outputs_differ_in_length() -> None:
    found = [
        record("p1", AR, 11, 10.0, 10, 10, 40, (0, 0, 0, 10, 0)),
        record("p1", "confidence", 6, 5.0, 5, 5, 20, (0, 0, 0, 5, 0), verdict="violated"),
    ]
    result = row(summary(found, METHODS[:2]), "confidence")
    assert result.decode_speedup is not None
    assert result.decode_speedup.value == pytest.approx(1.0)  # half the time for half the tokens
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx((11 / 11) / (6 / 6))


def test_methods_after_the_baseline_are_compared_with_it() -> None:
    report = summary(records())
    over = row(report, "marginal").over_baseline
    assert over is not None
    assert over.value == pytest.approx(6 / 5)  # confidence takes 2 + 4 seconds
    assert row(report, AR).over_baseline is None
    assert row(report, "confidence").over_baseline is None


def test_another_baseline_can_be_named() -> None:
    over = row(summary(records(), METHODS[:3], baseline=AR), "marginal").over_baseline
    assert over is not None
    assert over.value == pytest.approx(12 / 5)


def test_spread_is_of_single_prompts(marginal: MethodRow) -> None:
    spread = marginal.decode_spread
    assert spread is not None
    assert (spread.median, spread.low, spread.high, spread.prompts) == (4.5, 1.0, 8.0, 2)


# Verification


def test_acceptance_length_is_pooled_over_steps_and_averaged_over_prompts(marginal: MethodRow) -> None:
    assert marginal.acceptance_length == pytest.approx(12 / 6)
    assert marginal.acceptance_length_prompt_mean == pytest.approx((4 / 4 + 8 / 2) / 2)


def test_active_experts_are_pooled_over_steps_and_averaged_over_prompts(marginal: MethodRow) -> None:
    assert marginal.active_experts == pytest.approx(36 / 6 / 2)
    assert marginal.active_experts_prompt_mean == pytest.approx((20 / 4 / 2 + 16 / 2 / 2) / 2)
    assert marginal.verified_tokens == pytest.approx(22 / 6)


def test_plain_decoding_comes_out_with_one_token_and_k_experts() -> None:
    ar = row(summary(records()), AR)
    assert ar.acceptance_length == ar.acceptance_length_prompt_mean == 1.0
    assert ar.active_experts == ar.active_experts_prompt_mean == GEOMETRY["top_k"]
    assert ar.rho == 1.0
    assert ar.speedup is not None
    assert ar.speedup.value == 1.0


def test_plain_decoding_is_computed_and_not_assumed() -> None:
    found = [record("p1", AR, 5, 4.0, 4, 4, 24, (0, 0, 0, 4, 0))]
    assert row(summary(found, METHODS[:1]), AR).active_experts == 3.0


def test_predicted_overlap_weighs_prompts_by_their_steps(marginal: MethodRow) -> None:
    assert marginal.predicted_overlap == pytest.approx((0.5 * 4 + 0.8 * 2) / 6)
    assert row(summary(records()), "confidence").predicted_overlap is None


# Time and bytes


def test_times_are_milliseconds_per_step(marginal: MethodRow) -> None:
    assert marginal.phase_ms == pytest.approx(
        {"draft": 100.0, "predict": 50.0, "select": 25.0, "verify": 600.0, "commit": 350 / 6}
    )
    assert marginal.outside_target == pytest.approx(1 - 3.6 / 5.0)
    assert marginal.rho == pytest.approx((10.8 / 12) / 0.6)


def test_bytes_are_those_of_the_experts_read_and_of_what_is_always_read(marginal: MethodRow) -> None:
    assert marginal.expert_bytes_per_step == pytest.approx(6 * 1_000)
    assert marginal.bytes_per_step == pytest.approx(6 * 1_000 + 4_000)
    assert marginal.achieved_gb_per_second == pytest.approx(10_000 / 0.6 / 1e9)


# What a row may not have


def test_a_method_that_sees_the_true_routing_has_verification_metrics_alone() -> None:
    report = summary(records())
    oracle = row(report, "oracle")
    assert oracle.speedup is oracle.decode_speedup is oracle.over_baseline is None
    assert oracle.decode_spread is None
    assert oracle.tokens_per_second is oracle.decode_tokens_per_second is None
    assert oracle.phase_ms["predict"] is None
    assert oracle.outside_target is None
    assert oracle.acceptance_length == pytest.approx(2.0)
    assert oracle.active_experts == pytest.approx(32 / 6 / 2)
    assert oracle.phase_ms["verify"] == pytest.approx(600.0)
    assert any(note.startswith("oracle: verification metrics only") for note in notes(report, MANIFEST))


def test_nothing_is_compared_with_a_baseline_that_sees_the_true_routing() -> None:
    methods = [METHODS[0], METHODS[3], METHODS[2]]
    assert row(summary(records(), methods, baseline="oracle"), "marginal").over_baseline is None


def test_only_prompts_finished_by_every_method_count() -> None:
    extra = record("p4", AR, 101, 1_000.0, 100, 100, 400, (0, 0, 0, 1_000, 0))
    report = summary([extra, *records()])
    assert (report.prompts, report.prompts_begun, report.prompts_without_step) == (3, 4, 1)
    assert report.rows == tuple(replace(r, lossless=row(report, r.label).lossless) for r in summary(records()).rows)
    assert "3 of 4 prompts were finished by every method; only these are counted" in notes(report, MANIFEST)


def test_the_later_of_two_records_counts_and_other_methods_do_not() -> None:
    stale = record("p1", "marginal", 5, 99.0, 4, 16, 20, (0, 0, 0, 99, 0))
    other = record("p1", "someone-else", 5, 99.0, 4, 16, 20, (0, 0, 0, 99, 0))
    assert summary([stale, other, *records()]) == summary(records())


def test_a_run_without_any_step_still_makes_a_report() -> None:
    report = summary([r for r in records() if r.prompt_id == "p3"])
    ar = row(report, AR)
    assert ar.acceptance_length is ar.active_experts is ar.rho is ar.bytes_per_step is None
    assert ar.decode_tokens_per_second is None
    assert ar.tokens_per_second == pytest.approx(1.0)
    assert printed(report)
    assert report_markdown(report, MANIFEST)
    assert any("1 of 1 prompts ended at the first token" in note for note in notes(report, MANIFEST))


def test_a_run_without_any_record_still_makes_a_report() -> None:
    report = summary([])
    assert report.prompts == 0
    assert printed(report)
    assert report_markdown(report, {})


# The lossless check


def with_verdicts(*verdicts: tuple[str, int, float]) -> Report:
    """A report over one prompt per (verdict, ties, largest gap) of method confidence."""
    found = []
    for number, (verdict, ties, gap) in enumerate(verdicts):
        phases = (0.0, 0.0, 0.0, 4.0, 0.0)
        found.append(record(f"p{number}", AR, 5, 4.0, 4, 4, 16, phases))
        changes = {"verdict": verdict, "ties": ties, "largest_gap": gap}
        found.append(record(f"p{number}", "confidence", 5, 2.0 + number, 2, 4, 16, phases, **changes))
    return summary(found, METHODS[:2], check="sample")


def lossless_note(report: Report) -> str:
    return next(note for note in notes(report, MANIFEST) if note.startswith("lossless"))


def test_exact_everywhere() -> None:
    report = with_verdicts(("exact", 0, 0.0), ("exact", 0, 0.0))
    assert lossless_note(report) == "lossless: every token equals AR's for all 2 prompts (float32)"


def test_unchecked_prompts_are_counted_beside_the_verdict() -> None:
    report = with_verdicts(("unchecked", 0, 0.0), ("exact", 0, 0.0), ("unchecked", 0, 0.0))
    found = row(report, "confidence").lossless
    assert (found.verdict, found.checked, found.prompts) == ("exact", 1, 3)
    assert "1 of 3" in printed(report)
    assert lossless_note(report) == (
        "lossless: every token equals AR's for the 1 of 3 prompts that were checked (float32)"
    )


def test_ties_are_worse_than_exact() -> None:
    report = with_verdicts(("ties", 2, 1e-6), ("exact", 0, 0.0), ("ties", 1, 3e-5))
    found = row(report, "confidence").lossless
    assert (found.verdict, found.ties, found.largest_gap) == ("ties", 3, 3e-5)
    assert "ties: 3 token(s) differ" in lossless_note(report)
    assert "3e-05" in lossless_note(report)


def test_one_violation_is_the_verdict_and_stays_json() -> None:
    report = with_verdicts(("exact", 0, 0.0), ("violated", 1, float("inf")), ("ties", 1, 1e-6))
    assert row(report, "confidence").lossless.verdict == "violated"
    assert "VIOLATED: 1 of 3 prompts" in lossless_note(report)
    json.dumps(report_json(report), allow_nan=False)


def test_a_violation_on_an_uncounted_prompt_is_not_lost() -> None:
    bad = record("p4", "marginal", 5, 4.0, 4, 16, 20, (0, 0, 0, 4, 0), verdict="violated")
    assert row(summary([*records(), bad]), "marginal").lossless.verdict == "violated"


def test_methods_that_differ_are_named() -> None:
    found = [replace(r, verdict="violated") if r.method == "oracle" else r for r in records()]
    said = [note for note in notes(summary(found), MANIFEST) if note.startswith("lossless")]
    assert said == [
        "lossless, confidence, marginal: every token equals AR's for all 3 prompts (float32)",
        "lossless, oracle: VIOLATED: 3 of 3 prompts checked emit tokens that AR does not (float32)",
    ]


def test_no_check_is_said() -> None:
    found = [replace(r, verdict="unchecked") for r in records()]
    report = summary(found, check="none")
    assert row(report, "marginal").lossless.verdict == "unchecked"
    assert lossless_note(report) == "lossless: not checked (--check none)"


# What is said


def printed(report: Report, manifest: dict[str, Any] | None = None, width: int = 20) -> str:
    """What a file gets that rich believes to be ``width`` columns wide."""
    file = io.StringIO()
    print_report(report, MANIFEST if manifest is None else manifest, Console(file=file, width=width))
    return file.getvalue()


def test_the_first_line_says_where_the_data_come_from_and_what_was_run() -> None:
    first = printed(summary(records())).splitlines()[0]
    assert first == (
        "embedded sample · gsm8k · target embedded (experts widened ×8 without changing the function, so "
        "that reading them takes a larger part of a verification step) · 3 prompts · γ = 4 · T = 0 · float32 · "
        "cpu · 2 threads"
    )


def test_an_empty_manifest_is_not_an_error() -> None:
    report = summary(records())
    assert headline(report, {}) == "data source not recorded · target not recorded · 3 prompts"
    assert report_markdown(report, {}).startswith("# ecospec report\n")


def test_a_target_that_was_not_widened_is_not_said_to_be() -> None:
    assert "widened" not in headline(summary(records()), {**MANIFEST, "widened": 1})


def test_a_pipe_gets_every_character() -> None:
    text = printed(summary(records()))
    assert "…" not in text
    for cell in (
        "confidence",
        "T_predict",
        "1.875",
        "2.400",
        "1.200",
        "28.0 %",
        "1.500",
    ):
        assert cell in text


def test_five_methods_fit_in_120_columns() -> None:
    labels = [AR, "confidence", "global-cost", "marginal-cost", "oracle"]
    found = [replace(r, method=label) for label in labels for r in records() if r.method == "marginal"]
    found = [replace(r, decode_seconds=r.decode_seconds + len(r.method) * 90) for r in found]
    methods = [MethodInfo(label, label == "oracle") for label in labels]
    report = summary(found, methods)
    assert table_width(report, report.rows) <= 120


def test_a_narrow_terminal_gets_several_tables_and_no_broken_word() -> None:
    report = summary(records())
    file = io.StringIO()
    print_report(report, MANIFEST, Console(file=file, width=60, force_terminal=True, color_system=None))
    lines = file.getvalue().splitlines()
    heads = [line.split() for line in lines if any(row.label in line.split() for row in report.rows)]
    shown = [head for head in heads if set(head) <= {row.label for row in report.rows}]
    assert len(shown) > 1
    assert [label for head in shown for label in head] == [row.label for row in report.rows]
    assert max(map(len, lines)) <= 60


def test_few_prompts_and_the_embedded_model_are_cautioned_of() -> None:
    said = notes(summary(records()), MANIFEST)
    assert any(note.startswith("3 prompts are too few to compare methods by") for note in said)
    assert any(note.startswith("the embedded model is test equipment") for note in said)
    assert not any("test equipment" in note for note in notes(summary(records()), {**MANIFEST, "target": "mine"}))
    many = [replace(r, prompt_id=f"p{i}") for i in range(20) for r in records() if r.prompt_id == "p1"]
    assert not any("too few" in note for note in notes(summary(many), MANIFEST))


def test_the_score_stands_in_the_table_and_a_text_that_scores_otherwise_is_named() -> None:
    found = [replace(r, score=float(r.prompt_id != "p1")) for r in records()]
    manifest = {**MANIFEST, "score_metric": "exact_match"}
    report = summary(found)
    assert row(report, AR).score == row(report, "marginal").score == pytest.approx(2 / 3)
    assert "66.7 %" in printed(report, manifest)
    assert "score: exact_match, of texts cut at --max-new-tokens" in notes(report, manifest)
    other = [replace(r, score=1.0) if r.method == "marginal" else r for r in found]
    assert "marginal: 1 text(s) score otherwise than AR's" in notes(summary(other), manifest)


def test_a_score_that_is_not_there_is_explained() -> None:
    report = summary(records())
    assert row(report, AR).score is None
    assert "score" not in printed(report).split("lossless", 1)[1].split("\n\n")[0].replace("scores", "")
    assert "score: not run; why" in notes(report, {**MANIFEST, "score_why_not": "not run; why"})


def test_what_a_suite_says_of_itself_stands_under_the_table() -> None:
    said = notes(summary(records()), {**MANIFEST, "suite_note": "a text workload, not vision"})
    assert "a text workload, not vision" in said


def test_a_phase_that_a_method_does_not_have_has_no_time() -> None:
    found = [
        replace(r, phase_seconds={**r.phase_seconds, "predict": 0.0}) if r.method == "confidence" else r
        for r in records()
    ]
    report = summary(found)
    assert row(report, "confidence").phase_ms["predict"] is None
    assert row(report, "marginal").phase_ms["predict"] is not None
    assert row(report, AR).phase_ms["draft"] is None


def test_labels_are_shown_as_they_are() -> None:
    label = "[bold]my|policy*"
    found = [replace(r, method=label) if r.method == "marginal" else r for r in records()]
    report = summary(found, [*METHODS[:2], MethodInfo(label)])
    assert label in printed(report)
    assert "\\[bold]my\\|policy\\*" in report_markdown(report, MANIFEST)


def test_an_interval_around_one_is_not_a_speedup() -> None:
    said = notes(summary(records()), MANIFEST)
    level = [n for n in said if n.startswith("decode-only speed-up not distinguishable from 1.0")]
    assert level == ["decode-only speed-up not distinguishable from 1.0 (it lies within the interval): marginal"]


def test_a_missing_interval_is_explained() -> None:
    report = summary([r for r in records() if r.prompt_id == "p1"])
    assert "confidence, marginal: no interval can be given (a single prompt)" in notes(report, MANIFEST)


def test_a_row_bound_by_overhead_is_called_that() -> None:
    said = [note for note in notes(summary(records()), MANIFEST) if "overhead" in note]
    assert said == [
        "confidence: 40.0 % of a step is outside the target's forward pass: this row measures overhead more "
        "than experts"
    ]


def test_json_has_a_schema_and_numbers_that_are_numbers() -> None:
    report = summary(records())
    plain = report_json(report)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["schema"] == 1
    found = plain["rows"][2]
    assert found["label"] == "marginal"
    assert found["decode_speedup"]["value"] == pytest.approx(2.4)
    assert set(found["decode_speedup"]["interval"]) == {"low", "high"}
    assert plain["rows"][3]["speedup"] is None


def test_markdown_holds_what_was_run_the_table_the_notes_and_the_definitions() -> None:
    report = summary(records())
    page = report_markdown(report, MANIFEST)
    assert page.startswith("# ecospec report: gsm8k\n")
    assert "- versions: python 3.12.3, torch 2.11.0" in page
    assert "| speed-up, decode only | 1.000 | 2.000 | 2.400 | – |" in page
    assert "| marginal | 4.500 | 1.000 | 8.000 | 2 |" in page
    assert "- lossless: every token equals AR's for all 3 prompts (float32)" in page
    assert "- **outside the target's pass**: 1 − T_verify / the sum of all T" in page
    columns = {line.count("|") - line.count("\\|") for line in page.splitlines() if line.startswith("| ")}
    assert columns == {len(METHODS) + 2}


def test_a_report_is_read_without_torch() -> None:
    code = "import sys, ecospec.harness.report_markdown; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
