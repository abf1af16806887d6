"""Several predictors in one run, and predictors judged by traces and draft trees, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints

from ecospec.harness.records import AR, read_records


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in json.loads((folder / "report.json").read_text(encoding="utf-8"))["rows"]}


def test_policies_that_use_a_predictor_are_run_with_each_and_others_once(
    bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    learned, table = f"learned:path={checkpoints.learned}", f"token-frequency:path={checkpoints.token_frequency}"
    predictors = ("--predictor", f"{learned},oracle", "--predictor", table, "--predictor", "oracle")
    ran = bench(*predictors, "--policy", "global-cost,oracle,marginal", "--output", "out")
    assert ran.code == 0, ran.err
    rows = rows_of(tmp_path / "out")
    global_cost = [f"global-cost with {name}" for name in (learned, "oracle", table)]
    marginal = [f"marginal-cost with {name}" for name in (learned, "oracle", table)]
    assert list(rows) == [AR, "confidence", *global_cost, "oracle", *marginal]
    assert [label for label, row in rows.items() if row["true_routing"]] == [global_cost[1], "oracle", marginal[1]]
    assert rows[marginal[1]]["predicted_overlap"] == 1
    assert rows[marginal[1]]["speedup"] is None
    assert rows[marginal[0]]["predicted_overlap"] != rows[marginal[2]]["predicted_overlap"]
    assert rows[marginal[0]]["speedup"] is not None
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    assert {record.verdict for record in records} == {"exact"}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["predictor"] == [learned, "oracle", table, "oracle"]
    assert [bool(digest) for digest in manifest["predictor_sha256"]] == [True, False, True]


def test_yaml_has_several_predictors_as_a_list(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(
        "predictor: [oracle, 'noisy-oracle:accuracy=0.5,seed=3']\npolicy: marginal\n", encoding="utf-8"
    )
    ran = command(
        "--config", "run.yaml", "--suite", "gsm8k", "--target", checkpoints.target, "--drafter", checkpoints.drafter,
        "--data", "embedded", "--limit", 1, "--max-new-tokens", 4, "--output", "out",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    expected = [AR, "confidence", "marginal-cost with oracle", "marginal-cost with noisy-oracle:seed=3"]
    assert list(rows_of(tmp_path / "out")) == expected


@pytest.mark.parametrize("empty", ["", ","])
def test_no_predictor_at_all_is_refused(bench: Callable[..., Any], empty: str) -> None:
    ran = bench("--predictor", empty)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1


def test_with_several_predictors_a_stopped_run_goes_on_with_the_same_ones_only(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    assert bench("--predictor", "oracle,noisy-oracle", "--output", "out").code == 0
    again = bench("--predictor", "oracle", "--output", "out", "--resume")
    assert again.code == 2
    assert "predictor" in again.err or "methods" in again.err
    assert bench("--predictor", "oracle,noisy-oracle", "--output", "out", "--resume").code == 0


# --- evaluate


@pytest.fixture
def trace(command: Callable[..., Any], checkpoints: Checkpoints) -> str:
    ran = command(
        "trace", "--target", checkpoints.target, "--data", "embedded", "--suite", "amc", "--limit", 3,
        "--max-new-tokens", 16, "--output", "trace",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    return "trace"


def evaluated(command: Callable[..., Any], checkpoints: Checkpoints, *arguments: object) -> Any:
    oracle = ("--predictor", "oracle", "--predictor", f"learned:path={checkpoints.learned}")
    return command("evaluate", "--target", checkpoints.target, "--trace", "trace", *oracle, *arguments)


@pytest.mark.usefixtures("trace")
def test_evaluate_judges_by_draft_trees_where_there_is_a_drafter(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ran = evaluated(command, checkpoints, "--drafter", checkpoints.drafter, "--trees", 2, "--output", "found.json")
    assert ran.code == 0, ran.err
    assert "draft trees, by depth" in ran.out
    assert "marginal cost of a selected node" in ran.out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    oracle, learned = found["oracle"], found[f"learned:path={checkpoints.learned}"]
    assert oracle["accuracy"]["all"] == 1
    assert set(oracle["by_depth"].values()) == {1.0}
    assert oracle["marginal_cost"]["mean_absolute_error"] == 0
    assert set(learned["by_depth"]) == {"0", "1", "2", "3"}
    assert 0 < learned["by_depth"]["1"] < 1
    assert learned["marginal_cost"]["mean_absolute_error"] > 0


@pytest.mark.usefixtures("trace")
def test_without_a_drafter_there_are_no_draft_trees(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ran = evaluated(command, checkpoints, "--output", "found.json")
    assert ran.code == 0, ran.err
    assert "--held-out-of judges it by what it has not seen" in ran.out
    assert "written to found.json" in ran.out
    assert "draft trees" not in ran.out
    assert "by_depth" not in json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["oracle"]
    for trees, said in ((2, "expected a drafter as well"), (-1, "--trees -1: expected an integer")):
        refused = evaluated(command, checkpoints, "--trees", trees)
        assert refused.code == 2
        assert said in refused.err
    refused = evaluated(command, checkpoints, "--drafter", checkpoints.drafter, "--budget", 1)
    assert (refused.code, "--budget 1: selects no drafted node" in refused.err) == (2, True)


def test_a_feature_predictor_is_trained_judged_and_run_by_the_same_commands(
    bench: Callable[..., Any], command: Callable[..., Any], checkpoints: Checkpoints, trace: str, tmp_path: Path
) -> None:
    target, drafter = ("--target", checkpoints.target), ("--drafter", checkpoints.drafter)
    train = ("train", "predictor", *target, "--trace", trace, "--epochs", 2, "--output", "made", "--kind", "feature")
    refused = command(*train)
    assert refused.code == 2
    assert "expected --drafter" in refused.err
    made = command(*train, *drafter)
    assert made.code == 0, made.err
    assert {path.name for path in (tmp_path / "made").iterdir()} >= {"feature", "token-frequency", "training.json"}
    feature = ("--predictor", "feature:path=made/feature")
    without = command("evaluate", *target, "--trace", trace, *feature)
    assert without.code == 2
    assert "it reads a drafter's states; expected --drafter" in without.err
    judged = command("evaluate", *target, *drafter, "--trace", trace, *feature, "--trees", 1)
    assert judged.code == 0, judged.err
    for size in (1, 2):
        ran = bench(*feature, "--batch-size", size, "--output", f"out{size}")
        assert ran.code == 0, ran.err
        assert rows_of(tmp_path / f"out{size}")["marginal-cost"]["lossless"]["verdict"] == "exact"
    learned = command("train", "predictor", *target, "--trace", trace, *drafter, "--output", "other")
    assert learned.code == 2
    assert "it goes with --kind feature" in learned.err
