"""The numbers of a report, each against one worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_records import GEOMETRY, MANIFEST, METHODS, printed, record, records, row, summary

from ecospec.harness.records import AR
from ecospec.harness.report import MethodInfo, MethodRow, Report, report_json
from ecospec.harness.report_markdown import report_markdown
from ecospec.harness.report_notes import notes

pytestmark = pytest.mark.filterwarnings("error")


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
        {"draft": 100.0, "predict": 50.0, "select": 25.0, "verify": 600.0, "commit": 350 / 6} | {"estimate": None}
    )
    assert marginal.outside_target == pytest.approx(1 - 3.6 / 5.0)
    assert marginal.rho == pytest.approx((10.8 / 12) / 0.6)


def test_verification_speedup_is_alpha_times_rho_whatever_the_rest_of_a_step_takes() -> None:
    report = summary(records())
    # AR: 10.8 s of passes for 12 tokens, .9 s each; marginal: 3.6 s for 12, .3 s each; confidence: 3.6 s as well.
    for label in ("confidence", "marginal", "oracle"):
        found = row(report, label)
        assert found.verification_speedup is not None
        assert found.verification_speedup.value == pytest.approx(3.0)
        assert found.acceptance_length is not None
        assert found.rho is not None
        assert found.verification_speedup.value == pytest.approx(found.acceptance_length * found.rho)
    ar = row(report, AR).verification_speedup
    assert ar is not None
    assert ar.value == 1.0


def test_headroom_is_the_share_of_the_way_from_the_baseline_to_a_yardstick() -> None:
    methods = [*METHODS[:3], MethodInfo("optimal", true_routing=True), MethodInfo("clairvoyant", true_routing=True)]
    found = [each for each in records() if each.method != "oracle" and each.steps]
    for prompt, tokens, marginal, optimal, clairvoyant in (("p1", 5, 1.0, 0.9, 0.6), ("p2", 9, 2.0, 1.8, 1.2)):
        found = [each for each in found if (each.prompt_id, each.method) != (prompt, "marginal")]
        for label, verify in (("marginal", marginal), ("optimal", optimal), ("clairvoyant", clairvoyant)):
            found.append(record(prompt, label, tokens, 2.0, 2, 8, 14, (0, 0, 0, verify, 0)))
    report = summary(found, methods)
    # α · ρ: confidence 10.8/3.6 = 3, marginal 10.8/3 = 3.6, optimal 10.8/2.7 = 4, clairvoyant 10.8/1.8 = 6.
    assert row(report, "marginal").headroom == {
        "optimal": pytest.approx(0.6 / 1.0),
        "clairvoyant": pytest.approx(0.6 / 3.0),
    }
    for label in (AR, "confidence", "optimal", "clairvoyant"):
        assert row(report, label).headroom == {}
    text = printed(report)
    assert "headroom closed, optimal" in text
    assert "60.0 %" in text
    assert "20.0 %" in text


def test_a_yardstick_that_is_below_the_baseline_leaves_no_headroom() -> None:
    methods = [*METHODS[:3], MethodInfo("optimal", true_routing=True)]
    found = [each for each in records() if each.method != "oracle" and each.steps]
    found += [record(p, "optimal", n, 2.0, 2, 8, 14, (0, 0, 0, 9.0, 0)) for p, n in (("p1", 5), ("p2", 9))]
    assert row(summary(found, methods), "marginal").headroom == {"optimal": None}


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
