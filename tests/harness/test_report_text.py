"""What a report says in words, on a terminal and as a page."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from report_records import MANIFEST, METHODS, printed, records, row, summary
from rich.console import Console

from ecospec.harness.records import AR
from ecospec.harness.report import Lossless, MethodInfo, report_json
from ecospec.harness.report_facts import run_facts
from ecospec.harness.report_markdown import report_markdown
from ecospec.harness.report_notes import _lossless_sentence, headline, notes
from ecospec.harness.report_text import print_report, table_width

pytestmark = pytest.mark.filterwarnings("error")


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


def test_what_speaks_against_the_cost_model_stands_under_the_table() -> None:
    costs = {"warnings": ["R² is 0.4"], "projection": None, "measured": "today", "r_squared": 0.4}
    said = notes(summary(records()), {"cost_model": costs})
    assert "cost model: R² is 0.4" in said
    assert any("of this target on this device (measured today, R² 0.400)" in line for line in said)
    projected = {"warnings": [], "projection": "4.8 TB/s"}
    said = notes(summary(records()), {**MANIFEST, "cost_model": projected, "batch_size": 4})
    assert any("(a projection, 4.8 TB/s)" in line for line in said)
    assert any("measured with one request at a time" in line for line in said)
    assert not any("cost model" in line for line in notes(summary(records()), {**MANIFEST, "cost_model": None}))


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
    assert "confidence, marginal: no interval can be given (a single prompt or batch)" in notes(report, MANIFEST)


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


@pytest.mark.parametrize(("gap", "pointed_out"), [(0.3, False), (4.1, True)])
def test_a_tie_that_rounding_does_not_make_is_pointed_out(gap: float, pointed_out: bool) -> None:
    found = Lossless("ties", checked=2, prompts=2, violated=0, ties=3, largest_gap=gap)
    assert ("more than rounding makes" in _lossless_sentence(found, "all", "bfloat16")) == pointed_out


PARTS = [
    {"label": "confidence", "policy": "confidence", "predictor": None},
    {"label": "marginal", "policy": "marginal-cost", "predictor": "learned:path=x"},
]
USED = {
    "method_parts": PARTS,
    "predictor": ["feature", "learned:path=x"],
    "acceptance": "isotonic",
    "estimated": True,
    "cost_model": {"measured": "2026-01-02T03:04:05+00:00", "r_squared": 0.98765},
}


def test_what_was_run_names_the_predictor_the_estimator_and_the_cost_model_that_methods_used() -> None:
    facts = dict(run_facts({**MANIFEST, **USED}))
    assert facts["predictor"] == "learned:path=x"
    assert facts["acceptance estimator"] == "isotonic"
    assert facts["cost model"] == "measured 2026-01-02T03:04:05+00:00, R² 0.988"
    page = report_markdown(summary(records()), {**MANIFEST, **USED})
    for line in (
        "- predictor: learned:path=x",
        "- acceptance estimator: isotonic",
        "- cost model: measured 2026-01-02",
    ):
        assert line in page
    assert "feature" not in page


def test_what_no_method_used_is_not_said_to_have_been_run() -> None:
    unused = {**USED, "method_parts": PARTS[:1], "estimated": False, "cost_model": None}
    assert not {"predictor", "acceptance estimator", "cost model"} & set(dict(run_facts({**MANIFEST, **unused})))
    page = report_markdown(summary(records()), {**MANIFEST, **unused})
    assert "isotonic" not in page
    assert "learned" not in page


def test_a_page_says_once_what_an_interval_is() -> None:
    assert report_markdown(summary(records()), MANIFEST).count("bootstrap") == 1
