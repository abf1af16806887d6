"""A run from the command line to its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints

from ecospec.harness import decoding, runner
from ecospec.harness.records import AR, read_records
from ecospec.harness.runner import Method, rotated
from ecospec.predictors.learned import LearnedSession
from ecospec.suites.task_file import builtin_files

ALL_POLICIES = "confidence,global-cost,marginal,oracle"


def tokens_by_method(folder: Path) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for record in read_records(folder / "prompts.jsonl"):
        found.setdefault(record.method, []).append(record.tokens)
    return found


def test_a_run_prints_one_table_and_leaves_its_files(bench: Callable[..., Any], tmp_path: Path) -> None:
    ran = bench("--policy", ALL_POLICIES, "--output", "out")
    assert ran.code == 0, ran.err
    reports = {"report.json", "report.md", "report.csv", "report.html"}
    names = {".lock", "manifest.json", "prompts.jsonl", "activations.jsonl", *reports}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for word in ("speed-up", "marginal-cost", "oracle", "embedded sample", "exact", "run folder: out"):
        assert word in ran.out
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in report["rows"]] == [
        AR,
        "confidence",
        "global-cost",
        "marginal-cost",
        "oracle",
    ]
    outputs = tokens_by_method(tmp_path / "out")
    assert all(outputs[method] == outputs[AR] for method in outputs)
    assert all(len(tokens) == 12 for tokens in outputs[AR])


def test_the_manifest_is_complete_and_written_before_the_first_token(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "decode_ar_batch", stop)
    ran = bench("--output", "out", "--temperature", 0.7, "--seed", 3)
    assert ran.code == 130
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["temperature"] == 0.7
    assert manifest["seed"] == 3
    assert manifest["dtype"] == "float32"
    assert manifest["device"] == "cpu"
    assert manifest["policy"] == ["marginal"]
    assert manifest["versions"]["torch"]
    for key in ("prompts_sha256", "checkpoint_sha256", "data_sha256", "argv", "top_p", "top_k", "threads"):
        assert manifest[key] is not None, key


def test_sampled_runs_equal_ar_and_another_seed_gives_other_text(bench: Callable[..., Any], tmp_path: Path) -> None:
    outputs = {}
    for seed in (7, 8):
        ran = bench("--temperature", 1, "--seed", seed, "--policy", ALL_POLICIES, "--output", f"out{seed}")
        assert ran.code == 0, ran.err
        outputs[seed] = tokens_by_method(tmp_path / f"out{seed}")
        assert all(outputs[seed][method] == outputs[seed][AR] for method in outputs[seed])
    assert outputs[7][AR] != outputs[8][AR]


@pytest.mark.parametrize("kind", ["token-frequency", "oracle"])
def test_every_predictor_runs(bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    spec = kind if kind == "oracle" else f"{kind}:path={checkpoints.token_frequency}"
    ran = bench("--predictor", spec, "--output", "out")
    assert ran.code == 0, ran.err
    row = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["rows"][-1]
    assert (row["speedup"] is None) == (kind == "oracle")
    if kind == "oracle":
        assert row["predicted_overlap"] == 1.0


def test_an_interrupted_run_goes_on_where_it_stopped(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bench("--limit", 3, "--output", "whole").code == 0
    real, calls = runner.append_records, []

    def stop_after_two(path: Path, records: Any) -> None:
        real(path, records)
        calls.append(len(records))
        if len([n for n in calls if n]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_records", stop_after_two)
        assert bench("--limit", 3, "--output", "out").code == 130
    path = tmp_path / "out" / "prompts.jsonl"
    finished = path.read_text(encoding="utf-8")
    assert len(finished.splitlines()) == 6
    path.write_text(finished + '{"prompt_id": "gsm8k-2", "met', encoding="utf-8")  # a write cut short
    ran = bench("--limit", 3, "--output", "out", "--resume")
    assert ran.code == 0, ran.err
    assert path.read_text(encoding="utf-8").startswith(finished)
    assert tokens_by_method(tmp_path / "out") == tokens_by_method(tmp_path / "whole")


def test_a_resumed_run_must_be_the_same_run(bench: Callable[..., Any]) -> None:
    assert bench("--output", "out").code == 0
    ran = bench("--output", "out", "--resume", "--budget", 5)
    assert ran.code == 2
    assert "budget = 4" in ran.err


def test_a_config_file_gives_defaults_and_the_command_line_wins(bench: Callable[..., Any], tmp_path: Path) -> None:
    text = "budget: 3\nmax-new-tokens: 5\npolicy: [global-cost, 'marginal:epsilon=0.5']\nseed: 9\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    ran = bench("--config", "run.yaml", "--max-new-tokens", 6, "--output", "out")
    assert ran.code == 0, ran.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["budget"], manifest["max_new_tokens"], manifest["seed"]) == (3, 6, 9)
    assert manifest["methods"] == [AR, "confidence", "global-cost", "marginal-cost:epsilon=0.5"]


def test_a_wrong_acceptance_rule_is_found_and_fails_the_command(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decoding.accept

    def wrong(tree: Any, nodes: Any, logits: Any, chooser: Any, position: int, greedy: Any) -> Any:
        rows, token = real(tree, nodes, logits, chooser, position, greedy)
        return rows, (token + 1) % 300 if position == 4 else token

    monkeypatch.setattr(decoding, "accept", wrong)
    ran = bench("--output", "out")
    assert ran.code == 1
    assert "VIOLATED" in ran.out
    assert "prompt gsm8k-0, confidence, position 4: AR emits token" in ran.err


@pytest.mark.parametrize(("check", "checked"), [("none", 0), ("sample", 1), ("all", 2)])
def test_check_says_how_many_prompts_were_compared(
    bench: Callable[..., Any], tmp_path: Path, check: str, checked: int
) -> None:
    assert bench("--check", check, "--output", "out").code == 0
    records = [r for r in read_records(tmp_path / "out" / "prompts.jsonl") if r.method == "confidence"]
    assert sum(record.verdict == "exact" for record in records) == checked


def test_a_policy_asked_for_twice_runs_once_and_parameters_make_another(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    assert bench("--policy", "marginal,marginal-cost,confidence,marginal:epsilon=2", "--output", "out").code == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["methods"] == [AR, "confidence", "marginal-cost", "marginal-cost:epsilon=2.0"]


def test_the_order_of_methods_rotates() -> None:
    methods = [Method(label) for label in "abc"]
    orders = ["".join(method.label for method in rotated(methods, by)) for by in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_plugins_lists_policies_predictors_and_parameters(command: Callable[..., Any]) -> None:
    ran = command("plugins")
    assert ran.code == 0
    for word in ("marginal-cost", "epsilon", "token-frequency", "oracle", "confidence", "learned"):
        assert word in ran.out


def test_a_run_of_a_task_file_that_has_changed_is_not_gone_on_with(bench: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(builtin_files()["math500"].parent, folder)
    path = (folder / "math500.yaml").rename(folder / "mine.yaml")
    path.write_text(path.read_text().replace("task: math500", "task: mine"))
    arguments = ("--policy", "confidence", "--output", "out")
    assert bench(*arguments, suite=str(path)).code == 0
    assert bench(*arguments, "--resume", suite=str(path)).code == 0
    (folder / "score.py").write_text((folder / "score.py").read_text() + "# another\n")
    ran = bench(*arguments, "--resume", suite=str(path))
    assert ran.code == 2
    assert "was run with suite_sha256 = " in ran.err


def test_a_run_with_another_drafter_is_not_gone_on_with(
    bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(checkpoints.drafter, drafter)
    arguments = ("--policy", "confidence", "--output", "out", "--drafter", drafter)
    assert bench(*arguments).code == 0
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "comment": "another"}))
    ran = bench(*arguments, "--resume")
    assert ran.code == 2
    assert "was run with drafter_sha256 = " in ran.err


def test_a_predictor_that_leaves_the_process_fails_the_command_in_one_line(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def leave(*args: Any) -> Any:
        raise SystemExit(0)

    monkeypatch.setattr(LearnedSession, "predict", leave)
    ran = bench("--output", "out")
    assert ran.code == 2
    assert "predictor 'learned' raised SystemExit (test_run.py, line" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
