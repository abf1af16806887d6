"""A sweep from its grid to its combined report, on the command line and on a small random checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints

from ecospec.errors import UserError
from ecospec.harness import decoding, preparing, runner
from ecospec.harness.config import RunConfig
from ecospec.harness.runner import Bench

Sweep = Callable[..., Any]


@pytest.fixture
def sweep(command: Callable[..., Any], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Run ``ecospec-bench sweep`` on the small checkpoint into ``out``, two prompts of at most six tokens."""
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 2.0e10)
    defaults = {
        "--suite": "amc",
        "--target": checkpoints.target,
        "--drafter": checkpoints.drafter,
        "--predictor": f"learned:path={checkpoints.learned}",
        "--limit": 2,
        "--max-new-tokens": 6,
        "--data": "embedded",
        "--output": "out",
    }

    def run(*arguments: object) -> Any:
        left = [text for pair in defaults.items() if pair[0] not in arguments for text in pair]
        return command("sweep", *arguments, *left)

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The runs that are made: their folder and methods."""
    real = Bench.run
    runs: list[tuple[str, list[str]]] = []

    def run(self: Bench, folder: Path, *rest: Any) -> Any:
        runs.append((folder.name, [method.label for method in self.methods]))
        return real(self, folder, *rest)

    monkeypatch.setattr(Bench, "run", run)
    return runs


def report(tmp_path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((tmp_path / "out" / "sweep.json").read_text(encoding="utf-8"))
    return plain


def axes(cell: dict[str, Any]) -> tuple[Any, ...]:
    names = ("suite", "temperature", "batch_size", "budget", "policy")
    return tuple(cell[name] for name in names)


def what_a_run_decides(row: dict[str, Any]) -> dict[str, Any]:
    """The figures that do not depend on a clock."""
    names = ("label", "steps", "acceptance_length", "active_experts", "verified_tokens", "predicted_overlap")
    return {**{name: row[name] for name in names}, "verdict": row["lossless"]["verdict"]}


def only_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    return lines[0]


def test_every_cell_of_the_grid_is_in_the_report(
    sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    grid = "suite: [amc, math500]\npolicy: [global-cost]\nbudget: [3, 4]\ntemperature: 0.5\nlimit: 1\n"
    (tmp_path / "mine.yaml").write_text(grid, encoding="utf-8")
    ran = sweep("mine.yaml", "--suite", "amc", "--suite", "math500", "--batch-size", "1,2", "--limit", 2)
    assert ran.code == 0, ran.err
    found = report(tmp_path)
    assert [axes(cell) for cell in found["cells"]] == [
        (suite, 0.5, size, budget, policy)
        for suite in ("amc", "math500")
        for size in (1, 2)
        for budget in (3, 4)
        for policy in ("confidence", "global-cost")
    ]
    assert [name for name, _ in made] == [
        f"{suite}-t0.5-b{size}-g{budget}" for suite in ("amc", "math500") for size in (1, 2) for budget in (3, 4)
    ]
    assert found["options"]["limit"] == 2  # the command line wins
    assert found["grid"] == "mine.yaml"
    for cell in found["cells"]:
        rows = json.loads((tmp_path / "out" / cell["run"] / "report.json").read_text(encoding="utf-8"))["rows"]
        assert cell["row"] in rows
        assert cell["row"]["label"] == cell["policy"]
        assert cell["missing"] is None
    assert all(run["ar"]["label"] == "AR" and run["prompts"] == 2 for run in found["runs"])
    page = (tmp_path / "out" / "sweep.md").read_text(encoding="utf-8")
    for text in (ran.out, page):
        assert "embedded sample" in text
        assert text.count("global-cost") >= 8 + 4  # cells, and means over the suites
        assert "average" in text
        assert text.count("temperature") == 1  # it does not vary: the headline has it
    assert "16 cells, 0 of them done and skipped; runs to make: 8, into out" in ran.out
    assert "run 8 of 8: math500-t0.5-b2-g4" in ran.out


def test_what_sees_true_routing_has_no_speed_up_and_a_table_of_its_own(sweep: Sweep, tmp_path: Path) -> None:
    predictors = "noisy-oracle:accuracy=0.5,oracle"
    ran = sweep("--policy", "oracle,marginal", "--predictor", predictors)
    assert ran.code == 0, ran.err
    rows = {(cell["policy"], cell["predictor"]): cell for cell in report(tmp_path)["cells"]}
    assert list(rows) == [
        ("confidence", None),
        ("oracle", None),
        ("marginal-cost", "noisy-oracle"),
        ("marginal-cost", "oracle"),
    ]
    assert [cell["true_routing"] for cell in rows.values()] == [False, True, True, True]
    for cell in rows.values():
        assert (cell["row"]["speedup"] is None) == cell["true_routing"]
    for text in (ran.out, (tmp_path / "out" / "sweep.md").read_text(encoding="utf-8")):
        speed, verification = text.split("speed-up over plain decoding")[1].split("verification metrics", 1)
        assert "oracle" not in speed
        assert "decode only" not in verification
        assert "noisy-oracle" in verification
        assert "100.0 %" in verification


def test_the_same_command_again_runs_nothing(sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path) -> None:
    assert sweep("--budget", "3,4").code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*")}
    combined = report(tmp_path)
    made.clear()
    ran = sweep("--budget", "3,4")
    assert ran.code == 0, ran.err
    assert made == []
    assert "4 cells, 4 of them done and skipped; runs to make: 0" in ran.out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*")} == before
    assert report(tmp_path) == combined


def test_of_a_grid_that_has_grown_only_what_is_new_is_run(
    sweep: Sweep, checkpoints: Checkpoints, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    learned = f"learned:path={checkpoints.learned}"
    table = f"token-frequency:path={checkpoints.token_frequency}"
    assert sweep("--policy", "marginal").code == 0
    old = report(tmp_path)["cells"]
    made.clear()
    ran = sweep("--policy", "marginal,global-cost,oracle", "--predictor", f"{learned},{table}", "--budget", "4,5")
    assert ran.code == 0, ran.err
    both = [f"{policy} with {each}" for policy in ("global-cost",) for each in (learned, table)]
    assert made == [
        # marginal-cost lacks one predictor and global-cost both: no one run has just these
        ("amc-t0-b1-g4-2", ["AR", "confidence", "oracle", "marginal-cost"]),
        ("amc-t0-b1-g4-3", ["AR", "confidence", *both]),
        (
            "amc-t0-b1-g5",
            ["AR", "confidence", f"marginal-cost with {learned}", f"marginal-cost with {table}", *both, "oracle"],
        ),
    ]
    cells = report(tmp_path)["cells"]
    assert len(cells) == 2 * (1 + 2 + 2 + 1)
    assert all(cell["row"] is not None for cell in cells)
    assert [cell for cell in cells if cell["run"] == "amc-t0-b1-g4"] == old
    assert "12 cells, 2 of them done and skipped; runs to make: 3" in ran.out
    made.clear()
    assert sweep("--policy", "marginal", "--predictor", table).code == 0
    assert made == []


def stop_after(monkeypatch: pytest.MonkeyPatch, prompts: int) -> None:
    """Ctrl-C once so many prompts are written."""
    real, written = runner.append_records, []

    def append(path: Path, records: Any) -> None:
        real(path, records)
        written.append(path)
        if len(written) == prompts:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "append_records", append)


def test_an_interrupted_sweep_names_what_is_missing_and_goes_on(
    sweep: Sweep,
    checkpoints: Checkpoints,
    made: list[tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    learned = f"learned:path={checkpoints.learned}"
    assert sweep("--budget", "2,3,4", "--output", "whole").code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, prompts=3)
        ran = sweep("--budget", "2,3,4")
    assert ran.code == 130
    assert "the same command with --output out goes on from there" in ran.err
    assert [cell["missing"] for cell in report(tmp_path)["cells"]] == [
        *[None] * 2,
        *["interrupted"] * 2,
        *["not run yet"] * 2,
    ]
    assert f"missing: amc-t0-b1-g3, confidence, marginal-cost with {learned} (interrupted)" in ran.out
    assert "missing: amc-t0-b1-g4" in (tmp_path / "out" / "sweep.md").read_text(encoding="utf-8")
    first = (tmp_path / "out" / "amc-t0-b1-g3" / "prompts.jsonl").read_text(encoding="utf-8")
    made.clear()
    ran = sweep("--budget", "2,3,4")
    assert ran.code == 0, ran.err
    assert [name for name, _ in made] == ["amc-t0-b1-g3", "amc-t0-b1-g4"]
    assert (tmp_path / "out" / "amc-t0-b1-g3" / "prompts.jsonl").read_text(encoding="utf-8").startswith(first)
    whole = json.loads((tmp_path / "whole" / "sweep.json").read_text(encoding="utf-8"))
    for one, other in zip(report(tmp_path)["cells"], whole["cells"], strict=True):
        assert axes(one) == axes(other)
        assert what_a_run_decides(one["row"]) == what_a_run_decides(other["row"])


@pytest.mark.parametrize("damage", ["no report", "cut report", "cut records", "manifest alone", "empty folder"])
def test_a_run_that_was_killed_at_any_time_is_finished(
    sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path, damage: str
) -> None:
    assert sweep("--budget", "3,4").code == 0
    before = [what_a_run_decides(cell["row"]) for cell in report(tmp_path)["cells"]]
    folder = tmp_path / "out" / "amc-t0-b1-g3"
    if damage == "cut report":
        (folder / "report.json").write_text('{"schema": 1, "ro', encoding="utf-8")
    else:
        (folder / "report.json").unlink()
    if damage == "cut records":
        text = (folder / "prompts.jsonl").read_text(encoding="utf-8")
        (folder / "prompts.jsonl").write_text(text[: len(text) * 2 // 3], encoding="utf-8")
    if damage in ("manifest alone", "empty folder"):
        for path in folder.iterdir():
            if path.name != "manifest.json" or damage == "empty folder":
                path.unlink()
    made.clear()
    ran = sweep("--budget", "3,4")
    assert ran.code == 0, ran.err
    assert [name for name, _ in made] == ["amc-t0-b1-g3"]
    assert [what_a_run_decides(cell["row"]) for cell in report(tmp_path)["cells"]] == before


def test_records_that_are_cut_make_a_run_unfinished_for_all_that_its_report_says(
    sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    assert sweep().code == 0
    path = tmp_path / "out" / "amc-t0-b1-g4" / "prompts.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:3]), encoding="utf-8")
    made.clear()
    assert sweep().code == 0
    assert len(made) == 1
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2 * 3


def test_an_unfinished_run_is_finished_as_it_was_when_the_grid_has_grown(
    sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    first, second = "amc-t0-b1-g4", "amc-t0-b1-g4-2"
    assert sweep("--policy", "marginal").code == 0
    (tmp_path / "out" / first / "report.json").unlink()
    made.clear()
    ran = sweep("--policy", "marginal,global-cost")
    assert ran.code == 0, ran.err
    assert "3 cells, 0 of them done and skipped; runs to make: 2" in ran.out
    both = [(first, ["AR", "confidence", "marginal-cost"]), (second, ["AR", "confidence", "global-cost"])]
    assert made == both
    # The earlier folder is the one whose baseline counts, whichever was finished last.
    (tmp_path / "out" / first / "report.json").unlink()
    for _ in range(2):
        assert sweep("--policy", "marginal,global-cost").code == 0
        assert [cell["run"] for cell in report(tmp_path)["cells"]] == [first, first, second]
    assert made == [*both, both[0]]


def test_a_baseline_alone_is_no_reason_to_finish_a_run(
    sweep: Sweep, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    assert sweep("--policy", "marginal").code == 0
    (tmp_path / "out" / "amc-t0-b1-g4" / "report.json").unlink()
    made.clear()
    assert sweep("--policy", "global-cost").code == 0
    assert made == [("amc-t0-b1-g4-2", ["AR", "confidence", "global-cost"])]
    assert {cell["run"] for cell in report(tmp_path)["cells"]} == {"amc-t0-b1-g4-2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--limit", 1), "amc-t0-b1-g4 was run with limit = 2, now it is 1; expected the same options, or another"),
        (("--max-new-tokens", 9), "max_new_tokens = 6, now it is 9"),
        (("--draft-steps", 2), "draft_steps = 3, now it is 2"),
        (("--seed", 3), "seed = 0, now it is 3"),
        (("--baseline", "global-cost"), "baseline = 'confidence', now it is 'global-cost'"),
        (("--check", "none"), "check = 'all', now it is 'none'"),
    ],
)
def test_other_options_are_refused(sweep: Sweep, tmp_path: Path, arguments: tuple[object, ...], said: str) -> None:
    folder = tmp_path / "out" / "amc-t0-b1-g4"
    assert sweep().code == 0
    before = {path: path.read_bytes() for path in folder.parent.rglob("*.*")}
    ran = sweep(*arguments, "--budget", "3,4")
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert {path: path.read_bytes() for path in folder.parent.rglob("*.*")} == before


def test_a_predictor_trained_anew_is_refused_where_its_cell_is_done(
    sweep: Sweep, checkpoints: Checkpoints, made: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(checkpoints.learned, mine)
    assert sweep("--predictor", f"learned:path={mine}").code == 0
    (mine / "note.txt").write_text("trained again", encoding="utf-8")
    ran = sweep("--predictor", f"learned:path={mine}")
    assert ran.code == 2
    assert f"was run with predictor_sha256 of learned:path={mine} = '" in only_line(ran.err)
    made.clear()
    assert sweep("--predictor", f"learned:path={checkpoints.learned}").code == 0  # another cell
    assert [name for name, _ in made] == ["amc-t0-b1-g4-2"]


def test_a_violated_cell_is_exit_code_1_now_and_later(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = decoding.accept

    def wrong(tree: Any, nodes: Any, logits: Any, chooser: Any, position: int, greedy: Any) -> Any:
        rows, token = real(tree, nodes, logits, chooser, position, greedy)
        return rows, (token + 1) % 300 if position == 4 else token

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "accept", wrong)
        ran = sweep("--budget", 3)
    assert ran.code == 1
    assert "VIOLATED" in ran.err
    assert "violated" in ran.out
    ran = sweep("--budget", "3,4")
    assert ran.code == 1
    verdicts = [cell["row"]["lossless"]["verdict"] for cell in report(tmp_path)["cells"]]
    assert verdicts == ["violated", "violated", "exact", "exact"]


def test_a_run_that_is_refused_on_the_way_is_named_and_the_others_go_on(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Bench.run

    def run(self: Bench, *rest: Any) -> Any:
        if self.config.budget == refused:
            raise UserError("not today")
        return real(self, *rest)

    refused = 3
    monkeypatch.setattr(Bench, "run", run)
    ran = sweep("--budget", "2,3,4")
    assert ran.code == 2
    assert only_line(ran.err) == "ecospec-bench: error: amc-t0-b1-g3: not today"
    missing = [cell["missing"] for cell in report(tmp_path)["cells"]]
    assert missing == [None, None, *["refused: not today"] * 2, None, None]
    assert "missing: amc-t0-b1-g3, confidence, marginal-cost with" in ran.out
    assert not (tmp_path / "out" / "amc-t0-b1-g3").exists()
    refused = 2
    ran = sweep("--budget", "2,3", "--output", "other")
    assert (ran.code, ran.err) == (2, "ecospec-bench: error: not today\n")  # the first: a mistake in the command
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("file", "not an empty folder"), ("run", "not an empty folder"), ("out", "amc-t0-b1-g4 in it is no run folder")],
)
def test_a_folder_that_is_no_sweeps_is_refused(sweep: Sweep, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}", encoding="utf-8")
    (tmp_path / "out" / "amc-t0-b1-g4").mkdir(parents=True)
    (tmp_path / "out" / "sweep.json").write_text("{}", encoding="utf-8")
    (tmp_path / "out" / "amc-t0-b1-g4" / "notes.txt").write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    ran = sweep("--output", name)
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--policy", "margnal"),
        ("--predictor", "learnd"),
        ("--suite", "amc,am"),
        ("--temperature", "0,-1"),
        ("--temperature", "nan"),
        ("--budget", "4,0"),
        ("--batch-size", "0"),
        ("--limit", "0"),
    ],
)
def test_a_mistake_anywhere_in_the_grid_writes_nothing(
    sweep: Sweep, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    ran = sweep(*arguments)
    assert ran.code == 2
    only_line(ran.err)
    assert list(tmp_path.iterdir()) == []


def test_target_and_predictors_are_loaded_once(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(preparing, name)
        return lambda *arguments, **options: calls.append(name) or real(*arguments, **options)

    for name in ("load_target", "load_drafter", "bind"):
        monkeypatch.setattr(preparing, name, counted(name))
    assert sweep("--budget", "3,4", "--suite", "amc,math500", "--limit", 1).code == 0
    assert sorted(calls) == ["bind", "load_drafter", "load_target"]


def test_the_defaults_of_a_sweep_are_those_of_a_run() -> None:
    from ecospec.harness.cli import sweep as sweep_of_the_command_line

    context = sweep_of_the_command_line.make_context("sweep", [])
    run = RunConfig(suite="", policy=("marginal",))
    for name, value in context.params.items():
        if name not in ("grid", "suite"):
            several = name in ("budget", "batch_size", "temperature")
            assert value == ((getattr(run, name),) if several else getattr(run, name)), name
