"""Fitted acceptance estimators beside the cost models: saved whole, found by runs of their target and drafter alone."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ecospec.errors import UserError
from ecospec.harness import writing, writing_folders
from ecospec.harness.acceptance_store import (
    acceptance_folder,
    find_estimators,
    path_of,
    save_estimators,
    saved_temperatures,
)
from ecospec.harness.estimators import saved_for, with_folder
from ecospec.harness.loading import embedded_folder
from ecospec.harness.manifest import checkpoint_hash
from ecospec.harness.training.acceptance_card import reliability_figure, reliability_of, reliability_svg
from ecospec.harness.writing_folders import found_folder, write_folder
from ecospec.predictors.acceptance.builtin import Draft, Isotonic, Learned
from ecospec.predictors.acceptance.folder import FACTS, KIND, SCHEMA, drafter_facts
from ecospec.predictors.checkpoint import target_facts
from ecospec.predictors.contract import TargetView

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


@pytest.mark.parametrize("how", ["file", "broken link"])
def test_what_is_no_folder_is_said_to_be_none(how: str) -> None:
    path = save_estimators(FACTS_OF, "0", some_files("a"))
    shutil.rmtree(path)
    if how == "file":
        path.write_text("text")
    else:
        path.symlink_to(path.parent / "nowhere")
    with pytest.raises(UserError, match="no folder, as saved acceptance estimators are"):
        find_estimators(FACTS_OF, 0.0)
    assert saved_temperatures(FACTS_OF) == []


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
            patch.setattr(writing, "os", Dying(os, clock))
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


# --- what a run gets ---


def test_only_an_estimator_that_lacks_a_folder_gets_the_saved_one(tmp_path: Path) -> None:
    view = TargetView(moe_layers=2, experts=8, top_k=2, vocab_size=16, hidden_size=4, embedding=None, stateless="ngram")
    assert saved_for(Isotonic(), view, 0.0) is None
    path = save_estimators({"target": target_facts(view), "drafter": drafter_facts(view)}, "0", some_files("cold"))
    found = saved_for(Isotonic(), view, 0.0)
    assert found is not None
    assert found.folder == path
    assert with_folder(Isotonic(), found) == Isotonic(path)
    assert saved_for(Isotonic(tmp_path), view, 0.0) is None
    # The embedded target has its own, for its own head.
    (tmp_path / "acceptance").mkdir()
    for drafter, own in (({"weights_sha256": "ab"}, False), (drafter_facts(view), True)):
        facts = {"kind": KIND, "schema": SCHEMA, "drafter": drafter}
        (tmp_path / "acceptance" / FACTS).write_text(json.dumps(facts))
        assert (saved_for(Isotonic(), replace(view, bundle=tmp_path), 0.0) is None) == own
    assert saved_for(Learned(), view, 0.0) is None  # reads states, of which this drafter has none
    assert saved_for(Draft(), view, 0.0) is None
    with pytest.raises(UserError, match=r"one saved at temperature 0, not at 0\.5; expected one of these"):
        saved_for(Isotonic(), view, 0.5)


# --- training ---


def test_training_checks_first_where_it_will_write(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it opens a recording, of which there is none here."""
    (tmp_path / "file").write_text("")

    def line(*arguments: object) -> str:
        ran = command("train", "acceptance", "--recording", "nothing", *arguments)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        return str(ran.err)

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
