"""The page of a run: what stands on it, that it asks for nothing, and that it takes every text as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import Page, read_page
from report_records import MANIFEST, METHODS, records, summary

from ecospec.harness.activations import Activations
from ecospec.harness.plots import shortened
from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.report import MethodInfo
from ecospec.harness.report_html import report_html
from ecospec.harness.run_reading import RunData
from ecospec.harness.summary_html import summary_html

EVIL = '<script>alert("1")</script> & id="x" $a$'
ALWAYS = ["verdict", "results", "definitions", "manifest"]
PLOTS = ["speed", "baseline", "plane", "time", "depth", "load"]
COST_MODEL = {
    "fixed_seconds": 0.001,
    "pair_seconds": 1e-6,
    "token_seconds": 1e-4,
    "r_squared": 0.98,
    "points": [
        {"tokens": n, "expert_pairs": pairs, "seconds": 0.001 + 1e-6 * pairs + 1e-4 * n + 1e-5}
        for n in (1, 4)
        for pairs in (100, 200, 400)
    ],
}


def with_depths(found: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Records of which each step of a method reached depth 2 and half of them accepted it."""
    return [
        replace(each, reached_by_depth=[each.steps, each.steps], accepted_by_depth=[each.steps, each.steps // 2])
        if each.method != AR and each.steps
        else each
        for each in found
    ]


def activations(labels: Sequence[str], layers: int = 2, experts: int = 6) -> dict[str, Activations]:
    counts = np.arange(layers * experts, dtype=np.float64).reshape(layers, experts)
    return {label: Activations(counts, 12.0, 3) for label in labels}


def run_of(found: list[PromptRecord], methods: list[MethodInfo], name: str = "run", **more: Any) -> RunData:
    report = summary(found, methods)
    labels = [row.label for row in report.rows if row.steps and report.moe_layers]
    own = {"manifest": MANIFEST, "activations": activations(labels), "report": report, "folder": Path(name)}
    return RunData(name=name, **{**own, **more})


def page_of(run: RunData) -> Page:
    return read_page(report_html(run))


@pytest.fixture(scope="module")
def page() -> Page:
    """Of a run that has everything."""
    return page_of(run_of(with_depths(records()), METHODS, manifest={**MANIFEST, "cost_model": COST_MODEL}))


def test_every_section_is_there_and_nothing_is_fetched(page: Page) -> None:
    assert set(page.ids) >= {*ALWAYS, *PLOTS, "depth-table", "cost", "experts-0", "experts-3", "more-figures"}
    assert len(set(page.ids)) == len(page.ids)
    assert page.fetched == []
    assert "script" not in page.tags
    assert page.links == ["report.md", "report.csv", "report.json", "manifest.json"]
    assert page.tags.count("figure") == len(PLOTS) + 1 + len(METHODS)


def test_the_figures_are_said_in_words_too(page: Page) -> None:
    described = "\n".join(page.described)
    # α of confidence: (4 + 8) / (2 + 4); E: (14 + 28) / 6 steps / 2 layers
    assert "confidence: E 3.50, α 2.000" in described
    assert "confidence: 2.00× (no interval) decode only" in described
    # T of confidence: (0.4 + 0.8) s of drafting in 6 steps
    assert "draft 200.00" in described
    assert "accepted of those verified, from depth 1: confidence: 100 %, 50 %" in described
    # the cost model above is 10 µs below each of its points
    assert (
        "T = 1 ms + 1 µs a pair + 0.1 ms a token; R² 0.980; 6 measured passes, the model at most 0.01 ms off"
        in described
    )


def test_the_table_has_the_figures_of_the_report(page: Page) -> None:
    for text in ("acceptance length α", "95 % interval", "oracle", "3.500", "reference", "exact"):
        assert text in page.text


def test_the_page_says_once_what_an_interval_is_and_what_was_used() -> None:
    used = {"acceptance": "isotonic", "estimated": True, "cost_model": {**COST_MODEL, "measured": "2026-01-02"}}
    text = page_of(run_of(records(), METHODS, manifest={**MANIFEST, **used})).text
    assert text.count("A 95 % interval is a paired bootstrap over prompts") == 1
    assert "acceptance estimator isotonic cost model measured 2026-01-02, R² 0.980" in " ".join(text.split())


def test_what_a_run_lacks_is_left_out() -> None:
    page = page_of(run_of(records(), METHODS, activations={}))
    assert not {"depth", "depth-table", "load", "experts-0", "more-figures", "cost"} & set(page.ids)
    assert set(page.ids) >= set(ALWAYS)


def test_a_run_without_a_prompt_has_a_page() -> None:
    page = page_of(run_of([], METHODS, activations={}, missing=5))
    assert not set(page.ids) & set(PLOTS)
    assert "interrupted: 0 of 5 prompts are finished" in page.text
    assert "No prompt is finished by every method" in page.text


def test_a_dense_target_has_no_plane_of_experts() -> None:
    dense = [replace(each, expert_pairs=0) for each in with_depths(records())]
    report = summary(dense, moe_layers=0, expert_bytes=0)
    page = page_of(replace(run_of(dense, METHODS), report=report, activations={}))
    assert not {"plane", "load"} & set(page.ids)
    assert {"speed", "time", "depth"} <= set(page.ids)
    assert "n/a" in page.text


def test_yardsticks_alone_have_no_speed_up() -> None:
    methods = [MethodInfo(AR), MethodInfo("oracle", true_routing=True)]
    page = page_of(run_of(records(), methods))
    assert not {"speed", "baseline"} & set(page.ids)
    assert "verification metrics only" in page.text


@pytest.mark.parametrize("where", ["label", "manifest", "name"])
def test_every_text_is_taken_as_text(where: str) -> None:
    label = EVIL if where == "label" else "mine"
    methods = [MethodInfo(AR), MethodInfo("confidence"), MethodInfo(label)]
    found = [replace(each, method=label) if each.method == "marginal" else each for each in with_depths(records())]
    manifest = {**MANIFEST, "suite": EVIL, "argv": [EVIL], "score_why_not": EVIL} if where == "manifest" else MANIFEST
    if where == "name":
        manifest = {key: value for key, value in manifest.items() if key != "suite"}  # the name stands in its place
    run = run_of(found, methods, name=EVIL if where == "name" else "run", manifest=manifest)
    own = report_html(run)
    if where == "label":
        assert "$a$</text>" in own  # in a plot, and not as a formula
    for html in (own, summary_html([run, replace(run, name="other")], EVIL, True, Path("."))):
        page = read_page(html)
        assert "script" not in page.tags
        assert page.fetched == []
        assert len(set(page.ids)) == len(page.ids)
        assert "x" not in page.ids
        assert EVIL in page.text


def test_the_same_run_gives_the_same_bytes() -> None:
    run = run_of(with_depths(records()), METHODS)
    assert report_html(run) == report_html(run)


def test_a_method_has_one_colour_in_all_plots() -> None:
    methods = [MethodInfo(AR), MethodInfo("confidence"), *(MethodInfo(f"m{i}") for i in range(14))]
    found = [
        replace(each, method=method.label)
        for method in methods
        for each in with_depths(records())
        if each.method == (method.label if method.label in (AR, "confidence") else "marginal")
    ]
    html = report_html(run_of(found, methods))
    page = read_page(html)
    entries = {entry for entry in html.split("<li>") if "viewBox" in entry and "m3" in entry.split("</li>")[0]}
    looks = {entry.split("</svg>")[0] for entry in entries}
    assert len(looks) == 1
    # 15 methods: as many pairs of colour and marker
    legend = html.split('id="load"')[1].split("</figure>")[0]
    pairs = [entry.split("</svg>")[0] for entry in legend.split("<li>")[1:]]
    assert len(set(pairs)) == len(pairs) == 16
    assert page.fetched == []


def test_a_long_label_is_cut_in_the_middle() -> None:
    label = "marginal-cost:epsilon=0.5 with learned:path=/some/long/path/to/a/predictor/of/mine"
    short = shortened(label)
    assert len(short) == 58
    assert short.startswith("marginal-cost:epsilon=0.5")
    assert short.endswith("predictor/of/mine")
    assert shortened("short") == "short"


def test_several_runs_have_a_page_with_links(tmp_path: Path) -> None:
    runs = [run_of(with_depths(records()), METHODS, name=name, folder=tmp_path / name) for name in ("gsm8k", "a b#c")]
    page = read_page(summary_html(runs, "several", True, tmp_path))
    assert page.links == ["gsm8k/report.html", "a%20b%23c/report.html"]
    assert set(page.ids) >= {"verdict", "runs", "speed-by-run", "tables", "headlines"}
    assert page.fetched == []
    assert "average" in page.text


def test_the_page_of_several_runs_says_once_what_an_interval_is(tmp_path: Path) -> None:
    runs = [run_of(records(), METHODS, name, folder=tmp_path / name) for name in ("a", "b")]
    text = read_page(summary_html(runs, "two", True, tmp_path)).text
    assert text.count("A 95 % interval is a paired bootstrap over prompts") == 1


def test_runs_without_a_speed_up_have_no_plot_of_it(tmp_path: Path) -> None:
    methods = [MethodInfo(AR), MethodInfo("oracle", true_routing=True)]
    runs = [run_of(records(), methods, name=name) for name in ("x", "y")]
    assert "speed-by-run" not in read_page(summary_html(runs, "several", True, tmp_path)).ids
