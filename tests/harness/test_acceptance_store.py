"""Fitted acceptance estimators beside the cost models: saved whole, found by runs of their target and drafter alone."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from tiny_checkpoints import Checkpoints, write_checkpoints
from written_costs import fixed_costs

from ecospec.errors import UserError
from ecospec.harness import writing_folders
from ecospec.harness.acceptance_store import (
    acceptance_folder,
    find_estimators,
    path_of,
    save_estimators,
    saved_temperatures,
)
from ecospec.harness.lm_eval_model import EcospecLM
from ecospec.harness.loading import embedded_folder
from ecospec.harness.manifest import checkpoint_hash
from ecospec.harness.training.acceptance import Fitted, FittedRecordings
from ecospec.harness.training.acceptance_card import reliability_figure, reliability_of, reliability_svg
from ecospec.harness.training.acceptance_files import save
from ecospec.harness.writing_folders import found_folder, write_folder
from ecospec.predictors.acceptance.folder import CARD, FACTS, PLOT, WEIGHTS
from ecospec.predictors.acceptance.isotonic import ALL, Curve
from ecospec.predictors.acceptance.judging import judge
from ecospec.predictors.acceptance.learned import INPUTS, Weights

FACTS_OF = {"target": {"experts": 8, "embedding_sha256": "ab"}, "drafter": {"name": "ngram", "longest": 3}}
LARGEST_PLOT = 40_000


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "store"))


def some_files(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        for name in ("one", "two"):
            (folder / name).write_text(text)

    return fill


def texts_in(folder: Path | None) -> set[str]:
    return set() if folder is None else {each.read_text() for each in folder.iterdir()}


# --- the store ---


def test_what_is_saved_is_found_for_exactly_its_target_drafter_and_temperature(tmp_path: Path) -> None:
    assert find_estimators(FACTS_OF, 0.0) is None
    assert saved_temperatures(FACTS_OF) == []
    path = save_estimators(FACTS_OF, "0", some_files("cold"))
    assert path.parent == acceptance_folder() == tmp_path / "store" / "acceptance"
    save_estimators(FACTS_OF, "0.7", some_files("warm"))
    found = find_estimators(FACTS_OF, 0.0)
    assert found is not None
    assert (found.folder, found.sha256) == (path, checkpoint_hash(path))
    assert texts_in(path) == {"cold"}
    assert find_estimators(FACTS_OF, 0.5) is None
    (acceptance_folder() / f"{path.name.removesuffix('T0')}T0 copy").mkdir()
    assert saved_temperatures(FACTS_OF) == ["0", "0.7", "0 copy"]
    for name, value in (("experts", 9), ("embedding_sha256", "cd")):
        other = {**FACTS_OF, "target": {**FACTS_OF["target"], name: value}}
        assert find_estimators(other, 0.0) is None
        assert saved_temperatures(other) == []
    assert find_estimators({**FACTS_OF, "drafter": {"name": "ngram", "longest": 2}}, 0.0) is None
    reordered = {"drafter": dict(reversed(FACTS_OF["drafter"].items())), "target": FACTS_OF["target"], "more": 1}
    assert path_of(reordered, "0") == path


def test_without_the_variable_they_lie_beside_the_cost_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ECOSPEC_COST_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert acceptance_folder().parts[-3:] == ("ecospec", "cost-models", "acceptance")


class Dying:
    """A module of a process that is killed in its ``last`` change of files: nothing that follows happens."""

    def __init__(self, module: ModuleType, clock: list[int]) -> None:
        self._module, self._clock = module, clock

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name not in ("rename", "fsync", "rmtree"):
            return real

        def call(*arguments: Any) -> Any:
            self._clock[0] -= 1
            if self._clock[0] <= 0:
                raise Killed
            return real(*arguments)

        return call


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before", [set(), {"old"}])
def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: set[str]
) -> None:
    seen = []
    for last in range(1, 50):
        path = tmp_path / str(last) / "folder"
        if before:
            write_folder(path, some_files("old"))
        clock = [last]
        with monkeypatch.context() as patch:
            patch.setattr(writing_folders, "os", Dying(os, clock))
            patch.setattr(writing_folders, "shutil", Dying(shutil, clock))
            try:
                write_folder(path, some_files("new"))
            except Killed:
                pass
            else:
                break
        assert texts_in(found_folder(path)) in (before, {"new"})
        seen.append(texts_in(found_folder(path)))
        write_folder(path, some_files("newer"))
        assert texts_in(found_folder(path)) == {"newer"}
        assert {each.name for each in path.parent.iterdir()} <= {"folder", ".lock"}
    # Two files and their folder to the disk, the old one aside, the new one in place, the names, the old one's end.
    assert last == (8 if before else 6)
    assert seen == [before] * (5 if before else 4) + [{"new"}] * 2 if before else [before] * 4 + [{"new"}]


def test_an_error_while_writing_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_folder(path, some_files("old"))

    def fill(folder: Path) -> None:
        (folder / "one").write_text("new")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"folder: cannot be written \(No space left on device\)"):
        write_folder(path, fill)
    assert texts_in(path) == {"old"}
    assert {each.name for each in tmp_path.iterdir()} <= {"folder", ".lock"}


def test_a_store_that_cannot_be_written_is_the_users_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "file" / "store"))
    with pytest.raises(UserError, match=r"cannot be written .* in \$ECOSPEC_COST_MODELS"):
        save_estimators(FACTS_OF, "0", some_files("cold"))


# --- runs ---


def made_up(
    facts: Mapping[str, Any], temperatures: tuple[str, ...] = ("0",), *, learned: bool = True, seed: int = 0
) -> None:
    """Save estimators that were fitted to nothing, for the tests of what finds them."""
    rng = np.random.default_rng(seed)
    shapes = {"inputs": (INPUTS, 2), "state": (32, 2), "hidden_bias": (2,), "direct": (INPUTS,), "out": (2,)}
    weights = {each.name: rng.normal(size=shapes.get(each.name, (1,))).astype(np.float32) for each in fields(Weights)}
    judged = {"draft": judge(np.array([0.1, 0.6]), np.array([False, True]))}
    fitted = Fitted({ALL: Curve((0.1, 0.9), (0.2, 0.8))}, Weights(**weights) if learned else None, judged, 8, 2)
    save(
        FittedRecordings(
            facts=facts,
            target="tiny",
            drafter="eagle3",
            fitted=dict.fromkeys(temperatures, fitted),
            prompts=dict.fromkeys(temperatures, frozenset({"0" * 16})),
            suites=dict.fromkeys(temperatures, ("gsm8k",)),
        )
    )


@pytest.fixture
def facts_of(command: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a recording says of a target and drafter."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        given = ("--data", "embedded", "--limit", 1, "--max-new-tokens", 2, "--acceptance", "draft", "--output", name)
        ran = command("record", "--suite", "gsm8k", *given, *arguments)
        assert ran.code == 0, ran.err
        manifest = json.loads((tmp_path / name / "manifest.json").read_text(encoding="utf-8"))
        return {"target": manifest["target_facts"], "drafter": manifest["drafter_facts"]}

    return run


@pytest.fixture
def parts(checkpoints: Checkpoints) -> tuple[object, ...]:
    return (
        *("--target", checkpoints.target, "--drafter", checkpoints.drafter),
        *("--predictor", f"learned:path={checkpoints.learned}"),
    )


@pytest.fixture
def adaptive(bench: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A run whose policy looks at estimates, with a cost model."""
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)

    def run(*arguments: object) -> Any:
        return bench("--policy", "adaptive", "--cost-model", costs, "--limit", 1, *arguments)

    return run


def one_line(ran: Any) -> str:
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    return str(ran.err)


def test_a_run_finds_what_is_saved_and_says_so(
    adaptive: Callable[..., Any],
    bench: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    tmp_path: Path,
) -> None:
    facts = facts_of("rec", *parts)
    before = one_line(adaptive("--output", "none"))
    for word in ("nothing fitted belongs to this target and drafter", "'ecospec-bench record --suite", "--states"):
        assert word in before
    assert "'ecospec-bench train acceptance --recording RECORDING'" in before
    assert not (tmp_path / "none").exists()
    made_up(facts)
    folder = path_of(facts, "0")
    for kind in ("learned", "isotonic"):
        ran = adaptive("--acceptance", kind, "--output", kind)
        assert ran.code == 0, ran.err
        (line,) = [each for each in ran.err.splitlines() if "acceptance estimator" in each]
        assert line == (
            f"ecospec-bench: acceptance estimator {kind!r}: the one saved for this target and drafter, {folder} "
            f"(sha256 {checkpoint_hash(folder)[:12]})"
        )
        manifest = json.loads((tmp_path / kind / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["acceptance"] == kind
        assert manifest["acceptance_folder"] == str(folder)
        assert manifest["acceptance_sha256"] == checkpoint_hash(folder)
    named = adaptive("--acceptance", f"learned:path={folder}", "--output", "named")
    assert named.code == 0, named.err
    assert "acceptance estimator" not in named.err
    figures = [
        [(each["method"], each["tokens"], each["steps"]) for each in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / name / "prompts.jsonl" for name in ("learned", "named"))
    ]
    assert figures[0] == figures[1]
    several = adaptive("--suite", "gsm8k,amc", "--output", "several")  # said once for all runs of a command
    assert several.code == 0, several.err
    assert several.err.count("acceptance estimator") == 1
    unasked = bench("--policy", "confidence", "--limit", 1, "--output", "unasked")
    assert unasked.code == 0, unasked.err
    assert "acceptance estimator" not in unasked.err
    manifest = json.loads((tmp_path / "unasked" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["acceptance_folder"] is manifest["acceptance_sha256"] is None


def test_what_does_not_fit_is_refused(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    tmp_path: Path,
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts, ("0", "0.7"), learned=False)
    said = one_line(adaptive("--temperature", 1, "--output", "o"))
    assert "for this target and drafter there is one saved at temperature 0, 0.7, not at 1; expected one of" in said
    assert "nothing fitted for acceptance estimator 'learned'" in one_line(adaptive("--output", "o"))
    assert "which drafter 'ngram' has not" in one_line(adaptive("--drafter", "ngram", "--output", "o"))
    # One that lies where another's would is not taken for it.
    other = path_of({**facts, "drafter": {"name": "ngram", "longest": 3}}, "0")
    shutil.copytree(path_of(facts, "0"), other)
    said = one_line(adaptive("--acceptance", "isotonic", "--drafter", "ngram", "--output", "o"))
    assert f"acceptance {other}: fitted for a drafter with name = None, but this one has ngram" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("broken", ["facts", "weights", "changed weights", "no weights", "no facts"])
def test_a_damaged_entry_is_refused_and_not_passed_over(
    adaptive: Callable[..., Any], facts_of: Callable[..., dict[str, Any]], parts: tuple[object, ...], broken: str
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    path = path_of(facts, "0") / (WEIGHTS if "weights" in broken else FACTS)
    if broken.startswith("no "):
        path.unlink()
    elif broken == "changed weights":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes()[:-9])
    said = one_line(adaptive("--output", "o"))
    expected = {
        "facts": f"{path}: not readable",
        "no facts": f"acceptance {path.parent}: no {FACTS}",
        "no weights": f"{path}: not the weights of this folder",
    }
    assert expected.get(broken, "not the weights of this folder (its hash is not the recorded one)") in said


def test_two_targets_have_each_their_own(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    second = write_checkpoints(tmp_path / "second", seed=1)
    others = ("--target", second.target, "--drafter", second.drafter, "--predictor", f"learned:path={second.learned}")
    first_facts, second_facts = facts_of("a", *parts), facts_of("b", *others)
    assert first_facts["target"] != second_facts["target"]
    made_up(second_facts)
    assert "nothing fitted belongs" in one_line(adaptive("--output", "first"))
    ran = adaptive(*others, "--output", "second-run")
    assert ran.code == 0, ran.err
    assert str(path_of(second_facts, "0")) in ran.err
    made_up(first_facts)
    ran = adaptive("--output", "first")
    assert ran.code == 0, ran.err
    assert str(path_of(first_facts, "0")) in ran.err
    mixed = adaptive("--drafter", second.drafter, "--output", "mixed")
    assert "nothing fitted belongs" in one_line(mixed)


def test_drafters_of_one_name_are_told_apart(
    facts_of: Callable[..., dict[str, Any]], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    given = ("--target", checkpoints.target, "--predictor", f"token-frequency:path={checkpoints.token_frequency}")
    short, long = (facts_of(f"n{n}", *given, "--drafter", f"ngram:longest={n}") for n in (2, 4))
    assert short["drafter"] == {"name": "ngram", "longest": 2}
    assert path_of(short, "0") != path_of(long, "0")


def test_recording_and_replay_and_lm_eval_find_the_same(
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    checkpoints: Checkpoints,
    command: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    folder = path_of(facts, "0")
    given = ("--data", "embedded", "--limit", 1, "--max-new-tokens", 6, "--output", "found")
    ran = command("record", "--suite", "amc", *parts, *given)
    assert ran.code == 0, ran.err
    assert f"'learned': the one saved for this target and drafter, {folder}" in ran.err
    manifest = json.loads((tmp_path / "found" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["estimators"] == ["learned"]
    assert manifest["estimators_folders"] == [str(folder)]
    assert manifest["estimators_sha256"] == [checkpoint_hash(folder)]
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    projected = ("--policy", "adaptive", "--cost-model", "gpt-oss-120b")
    ran = command("replay", "found", *projected, "--acceptance", "learned")
    assert ran.code == 0, ran.err
    said = f"acceptance as estimated by learned, when it was recorded: {folder} (sha256 {checkpoint_hash(folder)[:12]})"
    assert said in ran.out
    capsys.readouterr()
    model = EcospecLM(
        "adaptive",
        target=str(checkpoints.target),
        drafter=str(checkpoints.drafter),
        cost_model=str(costs),
        max_gen_toks=4,
    )
    assert f"the one saved for this target and drafter, {folder}" in capsys.readouterr().err
    assert model.generate_until([Instance("generate_until", {}, ("one two three", {"until": []}), 0)])
    about = {"folder": str(folder), "sha256": checkpoint_hash(folder)}
    assert model.get_model_info()["ecospec_acceptance"] == {"0": about}
    warm = Instance("generate_until", {}, ("one", {"until": [], "do_sample": True, "temperature": 0.7}), 0)
    with pytest.raises(UserError, match=r"saved at temperature 0, not at 0\.7"):
        model.generate_until([warm])


def test_a_resumed_run_refuses_another_estimator(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    command: Callable[..., Any],
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    assert adaptive("--output", "run").code == 0
    ran = command("--resume", "run")
    assert ran.code == 0, ran.err
    before = checkpoint_hash(path_of(facts, "0"))
    made_up(facts, learned=True, seed=1)
    assert f"run was run with acceptance_sha256 = {before!r}, now it is" in command("--resume", "run").err


# --- training ---


def test_training_saves_for_the_runs_of_its_target(
    command: Callable[..., Any], adaptive: Callable[..., Any], parts: tuple[object, ...], tmp_path: Path
) -> None:
    given = ("--data", "embedded", "--limit", 10, "--max-new-tokens", 6, "--acceptance", "draft", "--states")
    assert command("record", "--suite", "gsm8k", *parts, *given, "--output", "cold").code == 0
    assert command("record", "--suite", "gsm8k", *parts, *given, "--temperature", 1, "--output", "warm").code == 0
    ran = command("train", "acceptance", "--recording", "cold", "--recording", "warm", "--threads", 1)
    assert ran.code == 0, ran.err
    lines = [line for line in ran.out.splitlines() if line.startswith("saved in ")]
    folders = [Path(line.removeprefix("saved in ").partition(": ")[0]) for line in lines]
    assert [each.parent for each in folders] == [tmp_path / "store" / "acceptance"] * 2
    for key, line, folder in zip("01", lines, folders, strict=True):
        assert f"runs of this target and drafter at temperature {key} find it by --acceptance learned, the def" in line
        assert {each.name for each in folder.iterdir()} == {FACTS, WEIGHTS, CARD, PLOT}
        card = (folder / CARD).read_text(encoding="utf-8")
        assert f"]({PLOT})" in card
        assert [f"## Temperature {at}" in card for at in "01"] == [at == key for at in "01"]
        assert (folder / PLOT).stat().st_size < LARGEST_PLOT
    facts = json.loads((folders[0] / FACTS).read_text(encoding="utf-8"))
    assert list(facts["isotonic"]) == list(facts["learned"]) == ["0"]
    assert len(facts["fitted_on"]) == 10
    for at, folder in enumerate(folders):
        ran = adaptive("--suite", "amc", "--temperature", at, "--output", f"run-{at}")
        assert ran.code == 0, ran.err
        assert str(folder) in ran.err
    ran = adaptive("--output", "o")
    assert ran.code == 2
    assert "was fitted to 1 of these 1 prompts" in ran.err.splitlines()[-1]
    # Anew, from one recording: the other temperature's stays.
    kept = checkpoint_hash(folders[0])
    assert command("train", "acceptance", "--recording", "warm", "--seed", 1).code == 0
    assert checkpoint_hash(folders[0]) == kept


def test_training_checks_first_where_it_will_write(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it opens a recording, of which there is none here."""
    (tmp_path / "file").write_text("")

    def line(*arguments: object) -> str:
        return one_line(command("train", "acceptance", "--recording", "nothing", *arguments))

    assert "--output file/in: cannot be written to (Not a directory); expected another" in line("--output", "file/in")
    assert "--output file: not an empty folder" in line("--output", "file")
    assert "--threads 0: expected an integer from 1 to 1024" in line("--threads", 0)
    assert "--seed -1: expected" in line("--seed", -1)
    assert "no recording" in line("--output", "fine/and/new")
    assert not (tmp_path / "fine").exists()
    assert "no recording" in line()
    assert not (tmp_path / "store").exists()
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "file" / "store"))
    assert "expected a folder that can be written to, in $ECOSPEC_COST_MODELS, or --output" in line()


# --- the reliability curves ---


def test_the_plot_shows_the_recorded_points() -> None:
    folder = embedded_folder() / "predictor" / "acceptance"
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    figure = reliability_figure(reliability_of(facts))
    panels = {panel.get_title(loc="left"): panel for panel in figure.axes}
    assert set(panels) == {"T = 0", "T = 1"}
    for temperature, judged in facts["judged"].items():
        lines = {line.get_label(): line for line in panels[f"T = {temperature}"].lines[1:]}
        assert set(lines) == {"draft", "isotonic", "learned"}
        for name, line in lines.items():
            bins = judged[name]["bins"]
            assert line.get_xydata().tolist() == [[each["estimated"], each["accepted"]] for each in bins]


def test_the_plot_is_a_small_file_and_the_same_again() -> None:
    folder = embedded_folder() / "predictor" / "acceptance"
    curves = reliability_of(json.loads((folder / FACTS).read_text(encoding="utf-8")))
    drawn = reliability_svg(curves)
    assert drawn == reliability_svg(curves)
    kept = Path(__file__).parents[2] / "docs" / "acceptance-embedded.svg"
    for text in (drawn, kept.read_text(encoding="utf-8")):
        assert len(text.encode()) < LARGEST_PLOT
        found = {each.get("id"): each for each in ElementTree.fromstring(text).iter()}
        for temperature, each in curves.items():
            for name, bins in each.items():
                marks = list(found[f"{name}-{temperature}"].iter("{http://www.w3.org/2000/svg}use"))
                assert len(marks) == len(bins)
