"""The gates that ship: the committed figures, the tox environments and the example's workflow."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ecospec.harness.cli import cli
from ecospec.harness.comparing.baseline import read_baseline
from ecospec.harness.comparing.runs import Run
from ecospec.policies.builtin import MarginalCost
from ecospec.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ecospec_policy_example"


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "regression" / "run.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def base() -> list[Run]:
    path = ROOT / "tests" / "regression" / "base.jsonl"
    return read_baseline(path, path.read_text(encoding="utf-8"))


def test_the_committed_figures_are_of_the_run_that_is_compared_with_them(
    options: dict[str, Any], base: list[Run]
) -> None:
    assert [run.name for run in base] == list(SUITES)
    for run in base:
        labels = [method.label for method in run.methods]
        assert labels[0] == "AR"
        assert len(labels) == 1 + len(options["policy"])
        assert run.facts["limit"] == options["limit"]
        assert run.facts["max_new_tokens"] == options["max-new-tokens"]
        assert {output.verdict for found in run.outputs.values() for output in found.values()} == {"exact"}
        outputs = [[found[prompt].tokens for prompt in run.outputs["AR"]] for found in run.outputs.values()]
        assert all(each == outputs[0] for each in outputs)


def test_the_committed_figures_are_small() -> None:
    assert (ROOT / "tests" / "regression" / "base.jsonl").stat().st_size < 200_000


def commands_of(text: str) -> list[list[str]]:
    """The arguments of every ``ecospec-bench`` command in some lines."""
    found = []
    for line in text.splitlines():
        match = re.search(r"(?:python -m ecospec\.harness|ecospec-bench) (.*)", line)
        if match:
            found.append(shlex.split(match[1], comments=True))
    return found


def parsed(arguments: list[str]) -> click.Context:
    """The context of a command as click reads it; raises what a wrong option would end in."""
    name = arguments[0] if arguments and arguments[0] in cli.commands else None
    command: click.Command = cli if name is None else cli.commands[name]
    return command.make_context(name or "ecospec-bench", arguments[0 if name is None else 1 :])


def test_the_commands_of_tox_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    text = tox["testenv:regress"]["commands"].replace("{posargs}", "").replace("{env_tmp_dir}{/}", "tmp/")
    run, compare = commands_of(text)
    assert parsed(run).params["policy"]
    assert parsed(compare).params["base"] == Path("tests/regression/base.jsonl")
    assert "regress" not in tox["tox"]["env_list"]
    assert (ROOT / tox["testenv:bench"]["commands"].split("python ")[1].split()[0]).is_file()


def test_the_workflow_of_the_example_can_be_read_and_its_commands_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    path = EXAMPLE / ".github" / "workflows" / "regress.yml"
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = workflow["jobs"]["regress"]["steps"]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    commands = [arguments for step in steps for arguments in commands_of(step.get("run", ""))]
    assert [parsed(arguments).info_name for arguments in commands] == ["ecospec-bench", "compare"]
    assert parsed(commands[0]).params["policy"] == ("density",)
    # The comment at its top says how the figures are made.
    in_comments = commands_of("\n".join(line.lstrip("# ") for line in path.read_text().splitlines() if line[:1] == "#"))
    assert [parsed(arguments).info_name for arguments in in_comments] == ["ecospec-bench", "compare"]
    assert parsed(in_comments[1]).params["save"] == parsed(commands[1]).params["base"]


def test_a_saved_run_guards_a_policy_and_a_changed_policy_fails(
    bench: Callable[..., Any], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--policy", "global-cost,marginal")
    assert bench(*arguments, "--output", "one", suite="amc").code == 0
    assert command("compare", "one", "--save", "one.jsonl").code == 0
    assert bench(*arguments, "--output", "again", suite="amc").code == 0
    for base in ("one", "one.jsonl"):
        ran = command("compare", base, "again")
        assert ran.code == 0, ran.out
        assert "30 of 30 deterministic figures are the same" in ran.out
    with monkeypatch.context() as patch:
        patch.setattr(MarginalCost, "select", lambda self, request: [0])
        assert bench(*arguments, "--output", "worse", suite="amc").code == 0
    ran = command("compare", "one.jsonl", "worse")
    assert ran.code == 1
    assert "REGRESSION amc, marginal-cost, verified-tokens: " in ran.out
    assert "REGRESSION amc, confidence" not in ran.out
    assert "REGRESSION amc, global-cost" not in ran.out
