"""Packing parts into a bundle, and a card that is made anew and agrees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints

import ecospec.suites
from ecospec.harness import bundle
from ecospec.harness.bundle import FACTS, RECORD, check_card
from ecospec.harness.card import card, command

RECORD_OF = {
    "shape": {"width": 1},
    "recipe": {"steps": 3, "seconds": 0.0, "learning_rate": 0.1, "seed": 0},
    "figures": {"loss": 1.0},
    "corpus_sha256": "00",
    "train_tokens_by_source": {"svamp": 5},
}


@pytest.fixture(autouse=True)
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecospec.suites, "SUITES", ("amc", "humaneval"))
    for name, value in (("PROBLEMS", 2), ("ANSWER_TOKENS", 12), ("TREES", 2)):
        monkeypatch.setattr(bundle, name, value)


@pytest.fixture
def parts(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """The output folders of three trainings."""
    shutil.copytree(checkpoints.target, tmp_path / "target")
    shutil.copytree(checkpoints.drafter, tmp_path / "drafter")
    shutil.copytree(checkpoints.learned, tmp_path / "predictor" / "learned")
    shutil.copytree(checkpoints.token_frequency, tmp_path / "predictor" / "token-frequency")
    for part in ("target", "drafter", "predictor"):
        record = {**RECORD_OF, "shape": {"kind": "learned"}} if part == "predictor" else RECORD_OF
        (tmp_path / part / RECORD).write_text(json.dumps(record), encoding="utf-8")
    return tmp_path


def test_a_card_made_anew_agrees_until_something_is_changed(command: Callable[..., Any], parts: Path) -> None:
    made = command("bundle", "target", "drafter", "predictor", "--output", "out", "--widen", 2)
    assert made.code == 0, made.err
    again = command("card", "out")
    assert (again.code, again.err) == (0, "")
    assert "agrees with its files" in again.out
    folder = parts / "out"
    facts = json.loads((folder / FACTS).read_text())
    assert set(facts["accuracy"]) == {"learned", "token-frequency"}
    assert set(facts["accuracy"]["learned"]["accuracy"]) == {"amc", "humaneval", "all"}
    page = (folder / "CARD.md").read_text()
    assert f"| answers, all | {100 * facts['accuracy']['learned']['accuracy']['all']:.1f} % |" in page

    facts["accuracy"]["learned"]["by_layer"][1] += 0.02
    (folder / FACTS).write_text(json.dumps(facts))
    changed = command("card", "out")
    assert changed.code == 1
    first, second, last = changed.out.splitlines()
    assert first == "CARD.md: it is not the page of bundle.json"
    assert second.startswith("learned.by_layer.1: recorded ")
    assert last.endswith("does not agree")

    (folder / "CARD.md").write_text(card(facts))
    (folder / "target" / "tokenizer_config.json").open("a").write("\n")
    assert check_card(folder)[0] == "target/tokenizer_config.json: its hash is not the recorded one"


def test_figures_that_one_side_lacks_do_not_agree(command: Callable[..., Any], parts: Path) -> None:
    assert command("bundle", "target", "drafter", "predictor", "--output", "out", "--widen", 2).code == 0
    facts = json.loads((parts / "out" / FACTS).read_text())
    del facts["accuracy"]["learned"]["by_depth"]["1"]
    facts["accuracy"]["learned"]["marginal_cost"]["more"] = 1.0
    (parts / "out" / FACTS).write_text(json.dumps(facts))
    ran = command("card", "out")
    assert ran.code != 0


@pytest.mark.parametrize(("facts", "said"), [(None, "not readable"), ("{}", "lacks"), ("[", "not readable")])
def test_what_is_no_bundle_is_one_line(
    command: Callable[..., Any], tmp_path: Path, facts: str | None, said: str
) -> None:
    (tmp_path / "out").mkdir()
    if facts is not None:
        (tmp_path / "out" / FACTS).write_text(facts)
    ran = command("card", "out")
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_two_predictors_of_a_kind_are_refused(command: Callable[..., Any], parts: Path) -> None:
    shutil.copytree(parts / "predictor", parts / "second")
    ran = command("bundle", "target", "drafter", "predictor", "second", "--output", "out", "--widen", 2)
    assert ran.code == 2
    assert "kinds learned, learned; expected one of each" in ran.err
    assert not (parts / "out").exists()


def test_the_command_of_a_record() -> None:
    record = {"recipe": {**RECORD_OF["recipe"], "own_text": 9}}  # type: ignore[dict-item]
    assert command("predictor feature", record) == (
        "ecospec-bench train predictor --kind feature --target TARGET --corpus CORPUS --output OUTPUT --steps 3 "
        "--learning-rate 0.1 --seed 0 --own-text 9"
    )
