"""``ecospec-bench profile`` and the profile that a run makes first, end to end on a small random target."""

from __future__ import annotations

import dataclasses
import json
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import SHAPE, Checkpoints
from tiny_families import write_family

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.costs import measuring, preparing, profiling
from ecospec.harness.costs.forcing import sweep_cells, token_counts
from ecospec.harness.costs.preparing import cost_model_for, with_costs
from ecospec.harness.costs.saved import SavedCostModel, from_manifest, read_cost_model
from ecospec.harness.costs.store import store_folder
from ecospec.harness.costs.text import uniform_experts
from ecospec.harness.decoding import Speculation
from ecospec.harness.drafters.loading import choose_drafter
from ecospec.harness.plugins import load_plugins
from ecospec.harness.preparing import MethodParts, create_policies, create_predictors, load_parts, load_speculations
from ecospec.policies import Adaptive, Confidence
from ecospec.predictors.acceptance.asking import AskedEstimator
from ecospec.predictors.acceptance.contract import AcceptanceRequest, BoundEstimator

SMALL = ("--rounds", 3, "--max-tokens", 4, "--suite", "gsm8k", "--max-new-tokens", 6)
FILES = {f"figure-1{part}.{kind}" for part in "abc" for kind in ("svg", "png")} | {"profile.json", "profile.md"}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "store"))
    monkeypatch.setattr(profiling, "copy_bandwidth", lambda device: 2.0e10)  # its own test measures it


@pytest.fixture
def profile(command: Callable[..., Any], checkpoints: Checkpoints) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter)
        return command("profile", *parts, *SMALL, *arguments)

    return run


def saved_models() -> list[Path]:
    return sorted(store_folder().glob("*.json"))


def test_a_profile_leaves_its_figures_and_a_model_for_later_runs(
    profile: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ran = profile("--predictor", f"learned:path={checkpoints.learned}", "--output", "out")
    assert ran.code == 0, ran.err
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    (path,) = saved_models()
    saved = read_cost_model(path, "it")
    written = json.loads((folder / "profile.json").read_text())
    assert written["cost_model"] == json.loads(path.read_text())

    cells = sweep_cells(token_counts(4), SHAPE.experts, SHAPE.top_k)
    assert [(p.tokens, p.active_experts, p.held_out) for p in saved.points] == [
        (c.tokens, c.active_experts, c.held_out) for c in cells
    ]
    for point in saved.points:
        assert point.expert_pairs == point.active_experts * SHAPE.layers
        assert point.passes == 3
        assert 0 < point.seconds <= point.median <= point.high
        read = point.expert_pairs * saved.expert_bytes + saved.always_read_bytes
        assert point.bandwidth_share == pytest.approx(read / point.seconds / 2.0e10)
    assert saved.expert_bytes == 3 * SHAPE.hidden_size * SHAPE.expert_size * 4
    assert saved.ar_seconds is not None
    assert 0 < saved.ar_seconds < 1
    (drafting,) = saved.draftings
    assert (drafting.draft_steps, drafting.draft_topk) == (3, 2)
    (label,) = drafting.predicting
    assert label == f"learned:path={checkpoints.learned}"
    assert drafting.rest.predict == 0
    assert drafting.rest.draft > 0
    assert drafting.predicting[label].predict > 0
    assert saved.for_method(label).other_seconds == drafting.predicting[label].total

    figure = written["figure_1b"]
    assert figure["uniform"] == [uniform_experts(n, SHAPE.experts, SHAPE.top_k) for n in (1, 2, 3, 4)]
    assert figure["consecutive_tokens"][0] == SHAPE.top_k  # one token goes to K experts
    for name in ("figure-1a.svg", "figure-1b.svg", "figure-1c.svg"):
        assert ElementTree.parse(folder / name).getroot().tag.endswith("svg")
    page = (folder / "profile.md").read_text()
    assert page.count("![figure-1") == 3
    assert f"| {len(saved.points)} " not in page.splitlines()[0]
    sweep = [line for line in page.splitlines() if line.endswith("|  |") or line.endswith("| yes |")]
    assert len(sweep) == len(saved.points)
    for warning in saved.fit.warnings:  # whatever they are: on the terminal, in the page and in the file
        assert f"warning: {warning}" in ran.out
        assert f"- {warning}" in page
    assert f"saved for later runs: {path}" in ran.out


def test_a_target_without_a_drafter_is_profiled_alone(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ran = command("profile", "--target", checkpoints.target, *SMALL, "--output", "out")
    assert ran.code == 0, ran.err
    (path,) = saved_models()
    saved = read_cost_model(path, "it")
    assert (saved.draftings, saved.fit.text_error) == ((), None)
    assert saved.for_method().other_seconds == 0.0
    assert "No drafter was named" in (tmp_path / "out" / "profile.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-tokens", 1), "--max-tokens 1: expected an integer from 2"),
        (("--rounds", 2), "--rounds 2: expected an integer from 3"),
        (("--context", 5000), "--context 5000: expected at least 1 and, with passes of 4 tokens, at most 4092"),
        (("--suite", "gsm9k"), "gsm8k"),
        (("--output", "full"), "--output full: not an empty folder"),
    ],
)
def test_mistakes_end_in_one_line(
    profile: Callable[..., Any], tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    ran = profile(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert saved_models() == []


def test_dense_targets_are_refused_in_one_line(command: Callable[..., Any], tmp_path: Path) -> None:
    ran = command("profile", "--target", write_family(tmp_path / "dense", "llama"), *SMALL)
    assert ran.code == 2
    assert "a cost model needs a target with experts, and LlamaForCausalLM is dense" in ran.err
    assert ran.err.count("\n") == 1


def test_a_predictor_without_a_drafter_is_refused(command: Callable[..., Any], checkpoints: Checkpoints) -> None:
    ran = command("profile", "--target", checkpoints.target, *SMALL, "--predictor", "learned")
    assert ran.code == 2
    assert "--predictor learned without --drafter" in ran.err


@pytest.mark.parametrize("where", ["sweep", "files"])
def test_an_interruption_leaves_nothing(
    profile: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = {path.name for path in tmp_path.iterdir()}

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    if where == "sweep":
        monkeypatch.setattr(measuring.TextRuns, "round", interrupted)
    else:
        monkeypatch.setattr("ecospec.harness.costs.command.profile_markdown", interrupted)
    ran = profile("--output", "out")
    assert ran.code == 130
    assert "interrupted" in ran.err
    assert {path.name for path in tmp_path.iterdir()} == before
    assert saved_models() == []


class Counted:
    """The parts of a run on the small checkpoint, and how often something was measured for it."""

    def __init__(self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preparing, "SUITES", ("gsm8k",))
        monkeypatch.setattr(preparing, "NEW_TOKENS", 6)
        monkeypatch.setattr(preparing, "TOKENS", (1, 2, 4))
        monkeypatch.setattr(preparing, "TOKENS_IN_A_RUN", (1, 2))
        monkeypatch.setattr(preparing, "ROUNDS_IN_A_RUN", 3)
        self.measured: list[str] = []
        for name in ("profile", "profile_drafting"):
            monkeypatch.setattr(preparing, name, self._counting(name, getattr(preparing, name)))
        self.config = RunConfig(
            suite="gsm8k",
            policy=("confidence", "marginal-cost"),
            predictor=(f"learned:path={checkpoints.learned}", "oracle"),
            target=str(checkpoints.target),
            drafter=str(checkpoints.drafter),
        )
        plugins = load_plugins()
        self.chosen = choose_drafter(plugins, self.config.drafter)
        self.predictors = create_predictors(plugins, self.config.predictor)
        self.parts = load_parts(self.config, self.chosen.drafter, "cpu", torch.float32)
        policies = create_policies(plugins, self.config.policy)
        estimator = plugins.create_estimator("draft")
        load_speculations(self.config, policies, self.predictors, estimator, self.parts)

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.measured.append(name)
            return real(*args, **kwargs)

        return counted

    def model(
        self, path: Path | None = None, estimators: Sequence[AskedEstimator] = (), **changes: Any
    ) -> SavedCostModel:
        self.measured.clear()
        config = dataclasses.replace(self.config, **changes)
        return cost_model_for(config, self.parts, self.chosen, "cpu", self.predictors, path, estimators)


def test_a_run_profiles_what_is_not_there_yet_and_nothing_else(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Counted(checkpoints, monkeypatch)
    first = run.model()
    assert run.measured == ["profile"]
    assert "no cost model for this target on this device: profiling first" in capsys.readouterr().err
    learned = run.config.predictor[0]
    assert set(first.draftings[0].predicting) == {learned, "oracle"}
    assert first.for_method("oracle") == first.for_method()  # whose passes no timing includes
    assert first.for_method(learned).other_seconds > 0
    assert first.most_tokens == 11  # the whole tree, so that a run at any γ is served

    assert run.model() == first
    assert run.measured == []
    assert "profiling" not in capsys.readouterr().err

    larger = run.model(draft_topk=3)
    assert run.measured == ["profile_drafting"]
    assert "measuring them" in capsys.readouterr().err
    assert larger.fit == first.fit
    assert larger.draftings[0].draft_topk == 3
    assert run.model(draft_topk=3) == larger
    assert run.measured == []
    assert run.model() == first

    (path,) = saved_models()
    assert run.model(path=path) == first
    changed = json.loads(path.read_text())
    changed["key"]["dtype"] = "bfloat16"
    (tmp_path / "other.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="dtype = 'bfloat16', now it is 'float32'"):
        run.model(path=tmp_path / "other.json")


def test_larger_passes_than_were_measured_are_measured(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Counted(checkpoints, monkeypatch)
    first = run.model()
    assert first.most_tokens == 11
    assert run.model(budget=11) == first
    assert run.measured == []
    assert run.model(draft_topk=3, budget=12).most_tokens == 22
    assert run.measured == ["profile"]


def test_on_a_slow_machine_a_run_begins_no_further_rounds(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Counted(checkpoints, monkeypatch)
    monkeypatch.setattr(preparing, "ROUNDS_IN_A_RUN", 7)
    monkeypatch.setattr(preparing, "SECONDS_IN_A_RUN", 0.0)
    assert {point.passes for point in run.model().points} == {profiling.LEAST_ROUNDS}


def test_a_sweep_times_only_the_pass(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is verified once, with a tree of the cell's size, behind the whole prompt."""
    run = Counted(checkpoints, monkeypatch)
    target = run.parts.loaded.target
    cells = sweep_cells((1, 3), SHAPE.experts, SHAPE.top_k)
    sweep = measuring.Sweep(target, cells, [5, 6, 7, 8, 9])
    seen: list[tuple[int, int, list[int]]] = []
    real = type(sweep._session).verify

    def verify(self: Any, tree: Any, nodes: Any) -> Any:
        seen.append((tree.size, self.length, tree.parents.tolist()))
        return real(self, tree, nodes)

    monkeypatch.setattr(type(sweep._session), "verify", verify)
    for _ in range(4):
        sweep.round(lambda: None)
    assert sorted(seen) == sorted([(cell.tokens, 5, [-1, 0, 0][: cell.tokens]) for cell in cells for _ in range(4)])
    assert {cell: len(seconds) for cell, seconds in sweep.seconds.items()} == dict.fromkeys(cells, 4)
    orders = [tuple(size for size, _, _ in seen[i * len(cells) : (i + 1) * len(cells)]) for i in range(4)]
    assert len(set(orders)) > 1


def test_passes_that_went_elsewhere_are_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Counted(checkpoints, monkeypatch)
    sweep = measuring.Sweep(run.parts.loaded.target, sweep_cells((2,), SHAPE.experts, SHAPE.top_k), [5, 6])
    monkeypatch.setattr(measuring, "forced_routing", lambda *args: np.zeros((SHAPE.layers, 2, 2), dtype=np.int64))
    with pytest.raises(UserError, match=r"a pass that was forced to \d+ \(layer, expert\) pairs went to 3"):
        sweep.round(lambda: None)


def test_the_lower_quartile_is_what_is_typical() -> None:
    assert measuring.typical([4.0, 1.0, 2.0, 3.0, 90.0]) == 2.0


def test_a_further_predictor_leaves_what_is_known_as_it_was(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Counted(checkpoints, monkeypatch)
    learned = run.config.predictor[0]
    whole = run.predictors
    run.predictors = {name: each for name, each in whole.items() if name != learned}
    first = run.model()
    run.predictors = whole
    second = run.model()
    assert run.measured == ["profile_drafting"]
    assert learned not in first.draftings[0].predicting
    assert learned in second.draftings[0].predicting
    # A run that was made by the first can be gone on with and compared.
    assert second.for_method() == first.for_method()
    assert second.for_method("oracle") == first.for_method("oracle")


class Slow(BoundEstimator):
    """Every node is accepted, but that takes two milliseconds to say."""

    def estimate(self, request: AcceptanceRequest) -> np.ndarray:
        time.sleep(2e-3)
        return np.ones(request.tree.size)


def test_the_time_of_an_estimator_is_measured_once_and_is_in_the_steps_that_ask_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Counted(checkpoints, monkeypatch)
    without = run.model()
    asked = AskedEstimator("slow", Slow())
    saved = run.model(estimators=[asked])
    assert run.measured == ["profile_drafting"]
    assert without.draftings[0].estimating == {}
    seconds = saved.draftings[0].estimating["slow"]
    assert 2e-3 < seconds < 20e-3
    learned = run.config.predictor[0]
    for predictor in (None, learned):
        base = without.for_method(predictor)
        assert saved.for_method(predictor) == base
        more = saved.for_method(predictor, "slow").other_seconds - base.other_seconds
        assert more == pytest.approx(seconds)
    assert run.model(estimators=[asked]) == saved
    assert run.measured == []
    adaptive = Speculation(Adaptive(), run.parts.drafter, 4, 3, 2, estimator=asked)
    confidence = dataclasses.replace(adaptive, policy=Confidence())
    parts = [MethodParts("adaptive", "adaptive", None), MethodParts("confidence", "confidence", None)]
    priced = with_costs({"adaptive": adaptive, "confidence": confidence}, parts, saved)
    assert priced["adaptive"].cost_model == saved.for_method(None, "slow")
    assert priced["confidence"].cost_model is None


def test_what_a_manifest_holds_of_a_cost_model_comes_back(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Counted(checkpoints, monkeypatch).model()
    assert from_manifest(json.loads(json.dumps(saved.manifest())), "here") == saved
    with pytest.raises(UserError, match="here: its cost model is damaged"):
        from_manifest({**saved.manifest(), "points": 3}, "here")
