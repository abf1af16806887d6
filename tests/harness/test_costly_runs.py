"""Runs whose policies weigh time: the cost model and the estimator that they are given, resumed and by lm-eval."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from tiny_checkpoints import Checkpoints
from written_costs import fixed_costs

from ecospec.errors import UserError
from ecospec.harness.lm_eval_model import EcospecLM
from ecospec.harness.records import read_records
from ecospec.predictors.acceptance.folder import prompt_key

POLICIES = "adaptive,throughput,optimal,clairvoyant"


def figures(folder: Path) -> list[tuple[object, ...]]:
    return [
        (each.prompt_id, each.method, each.tokens, each.steps, each.selected, each.expert_pairs, each.verdict)
        for each in read_records(folder / "prompts.jsonl")
    ]


@pytest.mark.parametrize("temperature", [0, 1])
def test_all_of_them_are_lossless_and_in_one_table(bench: Callable[..., Any], tmp_path: Path, temperature: int) -> None:
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    given = ("--policy", POLICIES, "--acceptance", "draft", "--cost-model", costs, "--temperature", temperature)
    ran = bench(*given, "--output", "out")
    assert ran.code == 0, ran.err
    for word in ("adaptive", "throughput", "optimal", "clairvoyant", "α · ρ", "round numbers", "acceptance draft"):
        assert word in ran.out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["cost_model"]["pair_seconds"] == 1e-4
    assert manifest["true_routing"] == ["optimal", "clairvoyant"]
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    rows = {row["label"]: row for row in report["rows"]}
    for label, row in rows.items():
        assert row["lossless"]["verdict"] == "exact"
        assert (row["speedup"] is None) == (label in ("optimal", "clairvoyant"))
        assert (row["phase_ms"]["estimate"] is not None) == (label in ("adaptive", "throughput", "optimal"))


def test_a_resumed_run_keeps_the_cost_model_that_it_began_with(
    bench: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    given = ("--policy", "adaptive,throughput", "--acceptance", "draft", "--cost-model", costs)
    assert bench(*given, "--output", "whole").code == 0
    assert bench(*given, "--output", "cut").code == 0
    records = tmp_path / "cut" / "prompts.jsonl"
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    records.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    before = (tmp_path / "cut" / "manifest.json").read_bytes()
    fixed_costs(costs, 10.0)  # by which nothing but the root would be worth its time
    ran = command("--resume", "cut")
    assert ran.code == 0, ran.err
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    assert (tmp_path / "cut" / "manifest.json").read_bytes() == before
    ran = bench(*given, "--output", "other")
    assert ran.code == 0, ran.err
    ran = command("compare", "whole", "other")
    assert ran.code == 2
    assert "cost_model" in ran.err


def test_lm_eval_runs_a_policy_that_weighs_time(checkpoints: Checkpoints, tmp_path: Path) -> None:
    parts = {"target": str(checkpoints.target), "drafter": str(checkpoints.drafter), "max_gen_toks": 6}
    request = Instance("generate_until", {}, ("one two three", {"until": []}), 0)
    plain = EcospecLM("AR", **parts).generate_until([request])
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    model = EcospecLM("adaptive", acceptance="draft", cost_model=str(costs), **parts)
    assert model.generate_until([request]) == plain
    warm = Instance("generate_until", {}, ("one two", {"until": [], "do_sample": True, "temperature": 0.7}), 0)
    assert model.generate_until([warm])
    assert set(model._estimators) == {0.0, 0.7}
    # An estimator is not judged by what it was fitted to, here either.
    seen = prompt_key(model.tok_encode("one two three"))
    model._estimators[0.0]._fitted_on = frozenset({seen})
    with pytest.raises(UserError, match="was fitted to 1 of these 1 prompts"):
        model.generate_until([request])
