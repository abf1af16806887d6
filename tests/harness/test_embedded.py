"""The model that ships with the package: whole, documented, and good for what it is there for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecospec.harness.bundle import sha256
from ecospec.harness.card import card
from ecospec.harness.experts import widen_experts
from ecospec.harness.loading import embedded_facts, embedded_folder, load_target
from ecospec.harness.records import read_records
from ecospec.suites import load_suite


def test_the_weights_are_those_of_the_card_and_fit_the_limit() -> None:
    facts, folder = embedded_facts(), embedded_folder()
    found = {name: sha256(folder / name) for name in facts["sha256"]}
    assert found == facts["sha256"]
    assert sum((folder / name).stat().st_size for name in found) == facts["bytes"] <= 32 * 2**20
    assert (folder / "CARD.md").read_text(encoding="utf-8") == card(facts)


@pytest.mark.parametrize("kind", ["learned", "feature"])
def test_the_card_records_an_overlap_of_three_quarters_and_more_than_token_frequency(kind: str) -> None:
    figures = embedded_facts()["training"][f"predictor {kind}"]["figures"]
    assert figures["held_out_overlap"] >= 0.75
    assert figures["held_out_overlap"] > figures["held_out_overlap_token_frequency"]
    assert len(figures["held_out_overlap_by_layer"]) == embedded_facts()["training"]["target"]["shape"]["layers"]
    accuracy = embedded_facts()["accuracy"]
    assert accuracy[kind]["accuracy"]["all"] > accuracy["token-frequency"]["accuracy"]["all"] + 0.05


def test_only_text_under_the_stated_licences_was_used() -> None:
    sources = embedded_facts()["training"]["target"]["train_tokens_by_source"]
    assert not [name for name in sources if name.startswith(("gpteacher", "opentrivia", "topical", "dolly", "arc-"))]


@pytest.mark.parametrize("factor", [2, 16])
def test_widening_leaves_the_logits_equal_within_float_noise(factor: int) -> None:
    folder = str(embedded_folder() / "target")
    narrow = load_target(folder, dtype=torch.float32, device="cpu")
    wide = load_target(folder, dtype=torch.float32, device="cpu", widen=factor)
    ids = narrow.tokenizer(load_suite("gsm8k", limit=1).problems[0].prompt)["input_ids"][-200:]
    passes = [loaded.target.new_session(300).prefill(ids) for loaded in (narrow, wide)]
    torch.testing.assert_close(passes[0].logits, passes[1].logits, atol=1e-4, rtol=1e-4)
    assert wide.target.geometry.expert_bytes == factor * narrow.target.geometry.expert_bytes
    steps = [loaded.target.new_session(300) for loaded in (narrow, wide)]
    for session in steps:
        session.prefill(ids[:-1])
    decoded = [session.decode(ids[-1]).logits for session in steps]
    torch.testing.assert_close(decoded[0], decoded[1], atol=1e-4, rtol=1e-4)


def test_widening_refuses_a_factor_below_one() -> None:
    from ecospec.errors import UserError

    with pytest.raises(UserError, match="at least 1"):
        widen_experts(torch.nn.Linear(1, 1), 0)


def test_the_main_job_runs_and_drafts_are_accepted(command: Callable[..., Any], tmp_path: Path) -> None:
    """Four policies, a learned predictor, two prompts; narrow experts, since speed is not looked at here."""
    policies = "confidence,global-cost,marginal,oracle"
    ran = command(
        "--suite", "gsm8k", "--policy", policies, "--limit", 2, "--max-new-tokens", 48, "--widen", 1, "--output", "out"
    )
    assert ran.code == 0, ran.err
    began, first = ran.out.splitlines()[:2]
    assert began == "gsm8k: 2 problems by AR, confidence, global-cost, marginal-cost, oracle, into out"
    assert "embedded sample" in first
    rows = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["rows"]
    by_label = {row["label"]: row for row in rows}
    assert by_label["AR"]["acceptance_length"] == 1
    assert by_label["AR"]["active_experts"] == 8
    assert by_label["confidence"]["acceptance_length"] > 1.8
    assert by_label["marginal-cost"]["predicted_overlap"] > 0.7
    assert by_label["oracle"]["predicted_overlap"] > 0.99
    assert by_label["oracle"]["speedup"] is None
    assert {record.verdict for record in read_records(tmp_path / "out" / "prompts.jsonl")} >= {"exact"}
