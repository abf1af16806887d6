"""Suites that installed plugins bring: found by name, listed, and left out one by one where they do not work."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecospec.errors import UserError
from ecospec.harness.cli import main
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.suites import load_suite, suite_names

Install = Callable[..., Path]

TASK = """
task: {name}
dataset_path: somebody/riddles
output_type: generate_until
test_split: test
doc_to_text: "{name} asks: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metadata:
  columns:
    question: string
    answer: string
"""
HOOK = """
from pathlib import Path
from ecospec.suites.hookspecs import hookimpl

FOLDER = Path(__file__).parent / "{folder}"

@hookimpl
def ecospec_suites():
    return {returned}
"""
LISTED = "sorted(FOLDER.glob('*.yaml'))"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution `<name>-dist 1.0` on the path, whose hook returns an expression, by default its task files.

    Its folder of task files, which is returned, has one for each of `suites`, named after the task.
    """
    monkeypatch.delenv("ECOSPEC_PLUGINS")
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def install(name: str, *suites: str, returned: str = LISTED, head: str = "") -> Path:
        folder = tmp_path / name
        for suite in suites:
            write_suite(folder, suite)
        module = f"fake_{name}_suites"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(head + HOOK.format(folder=name, returned=returned))
        metadata = tmp_path / f"{name}_dist-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[ecospec]\n{name} = {module}\n")
        importlib.invalidate_caches()
        return folder

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def write_suite(folder: Path, name: str, file: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{file or name}.yaml").write_text(TASK.format(name=name))
    (folder / "sample.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')


def only_warning(plugins: Plugins, caplog: pytest.LogCaptureFixture) -> str:
    """What the one warning says, which is the one thing that was left out."""
    (broken,) = plugins.broken
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "\n" not in message
    assert message == str(broken)
    return message


def refusal(plugins: Plugins, name: str) -> str:
    with pytest.raises(UserError) as caught:
        plugins.find_suite(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``ecospec-bench`` with arguments."""
    monkeypatch.setattr(sys, "argv", ["ecospec-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_plugins_suites_are_found_and_loaded_by_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    folder = install("acme", "riddles", "puzzles")
    plugins = load_plugins()
    assert (plugins.broken, caplog.records) == ([], [])
    assert plugins.suites.paths == {name: folder / f"{name}.yaml" for name in ("puzzles", "riddles")}
    assert plugins.suites.providers == dict.fromkeys(("puzzles", "riddles"), "acme-dist 1.0")
    plugins.find_suite("riddles")
    suite = load_suite("riddles", more=plugins.suites.paths)
    (problem,) = suite.problems
    assert (suite.name, problem.id, problem.prompt) == ("riddles", "riddles-0", "riddles asks: Why?")
    assert suite == load_suite(str(folder / "riddles.yaml"))


def test_a_path_may_be_a_string(install: Install) -> None:
    install("acme", "riddles", returned="[str(FOLDER / 'riddles.yaml')]")
    load_plugins().find_suite("riddles")


def test_a_suite_is_named_by_its_task_and_not_by_its_file(install: Install) -> None:
    write_suite(install("acme"), "riddles", file="other")
    plugins = load_plugins()
    assert list(plugins.suites.files) == ["riddles"]
    assert refusal(plugins, "other").startswith("no suite 'other'; ")


def test_the_names_of_ecospecs_own_suites_stay_as_they_are(install: Install) -> None:
    install("acme", "riddles")
    plugins = load_plugins()
    assert "riddles" not in suite_names()
    assert "riddles" not in plugins.policies.names()
    for name in suite_names():
        plugins.find_suite(name)


def test_the_environment_limits_whose_suites_there_are(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", "riddles")
    install("zeta", "puzzles")
    monkeypatch.setenv("ECOSPEC_PLUGINS", "zeta")
    assert list(load_plugins().suites.files) == ["puzzles"]


def test_an_unknown_suite_is_refused_with_the_nearest_of_a_plugins(install: Install) -> None:
    install("acme", "riddles")
    assert refusal(load_plugins(), "ridles").startswith("no suite 'ridles'; did you mean 'riddles'? (known: ")


@pytest.mark.parametrize("file", ["", "other"])
@pytest.mark.parametrize("name", ["gsm8k", "mtbench", "all"])
def test_a_plugin_cannot_take_a_name_of_ecospecs(
    install: Install, caplog: pytest.LogCaptureFixture, name: str, file: str
) -> None:
    folder = install("acme", "riddles")
    write_suite(folder, name, file)
    plugins = load_plugins()
    assert list(plugins.suites.files) == ["riddles"]
    assert only_warning(plugins, caplog) == (
        f"{folder / (file or name)}.yaml of plugin 'acme' (acme-dist 1.0) was left out: "
        f"the suite name {name!r} of acme-dist 1.0 is already taken by ecospec"
    )
    plugins.find_suite("riddles")
    plugins.find_suite("math500")
    # Which of the two did the user mean? Running either in silence could report the wrong numbers.
    assert refusal(plugins, name).endswith("mend or uninstall it, or leave it out of ECOSPEC_PLUGINS")


@pytest.mark.parametrize("file", ["", "other"])
def test_the_first_of_two_plugins_keeps_a_name_and_asking_for_it_is_an_error(
    install: Install, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    write_suite(install("beta", "puzzles"), "riddles", file)
    install("acme", "riddles")
    plugins = load_plugins()
    assert plugins.suites.providers == {"riddles": "acme-dist 1.0", "puzzles": "beta-dist 1.0"}
    assert "of beta-dist 1.0 is already taken by acme-dist 1.0" in only_warning(plugins, caplog)
    plugins.find_suite("puzzles")
    assert "of plugin 'beta' (beta-dist 1.0) was left out" in refusal(plugins, "riddles")


def test_a_plugin_cannot_bring_a_suite_twice(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("acme", "riddles", returned="[FOLDER / 'riddles.yaml'] * 2")
    plugins = load_plugins()
    assert list(plugins.suites.files) == ["riddles"]
    assert "is already taken by acme-dist 1.0" in only_warning(plugins, caplog)


PART = {
    "no file": (
        "FOLDER / 'nowhere.yaml'",
        "nowhere.yaml",
        "nowhere.yaml': no such file; expected an lm-eval task file",
    ),
    "folder": ("FOLDER", "acme", "acme': not a regular file; expected an lm-eval task file"),
    "not YAML": ("FOLDER / 'broken.txt'", "broken.txt", "broken.txt': not YAML ("),
    "no task": ("FOLDER / 'sample.jsonl'", "sample.jsonl", "sample.jsonl': task is None; expected a name"),
    "two lines": ("'two\\nlines.yaml'", "two lines.yaml", r"suite file 'two\nlines.yaml': no such file"),
    "number": ("5", "an object of type int", "TypeError: 5 is a int; expected the path of a task file"),
    "none": ("None", "an object of type NoneType", "TypeError: None is a NoneType; expected the path of a task file"),
    "list": ("['riddles.yaml']", "an object of type list", "is a list; expected the path of a task file"),
    "class": ("Path", "Path", "is a type; expected the path of a task file"),
    "speechless": ("Speechless()", "an object of type Speechless", "RuntimeError: unspeakable"),
}


@pytest.mark.parametrize(("item", "part", "reason"), PART.values(), ids=PART.keys())
def test_one_bad_path_does_not_take_the_good_ones_with_it(
    install: Install, caplog: pytest.LogCaptureFixture, item: str, part: str, reason: str
) -> None:
    speechless = "class Speechless:\n    def __repr__(self):\n        raise RuntimeError('unspeakable')\n"
    folder = install("acme", "riddles", returned=f"[{item}, FOLDER / 'riddles.yaml']", head=speechless)
    install("zeta", "puzzles")
    (folder / "broken.txt").write_text("task: [\n")
    plugins = load_plugins()
    assert list(plugins.suites.files) == ["riddles", "puzzles"]
    left_out, _, why = only_warning(plugins, caplog).partition(" of plugin 'acme' (acme-dist 1.0) was left out: ")
    assert left_out.endswith(part)
    assert reason in why
    for name in ("riddles", "puzzles", "gsm8k"):
        plugins.find_suite(name)


WHOLE = {
    "path": ("FOLDER / 'riddles.yaml'", "TypeError: ecospec_suites returned a PosixPath, expected a list of paths of "),
    "text": ("'riddles.yaml'", "TypeError: ecospec_suites returned a str, expected a list of paths of task files"),
    "generator": ("FOLDER.iterdir()", "expected a list of paths of task files"),
    "nothing": ("None", "TypeError: ecospec_suites returned nothing; expected a list of paths of task files"),
    "raises": ("{}['two\\nlines']", "KeyError: "),
    "leaves": ("exit(3)", "SystemExit: 3"),
}


@pytest.mark.parametrize(("returned", "reason"), WHOLE.values(), ids=WHOLE.keys())
def test_a_hook_that_gives_no_list_is_named_and_left_out(
    install: Install, caplog: pytest.LogCaptureFixture, returned: str, reason: str
) -> None:
    install("acme", "riddles", returned=returned)
    install("zeta", "puzzles")
    plugins = load_plugins()
    assert list(plugins.suites.files) == ["puzzles"]
    message = only_warning(plugins, caplog)
    assert message.startswith("plugin 'acme' (acme-dist 1.0) was left out: ")
    assert reason in message
    for name in ("puzzles", "gsm8k"):
        plugins.find_suite(name)
    assert plugins.create_policy("confidence").name == "confidence"
    assert refusal(plugins, "acme").startswith("suite 'acme': plugin 'acme' (acme-dist 1.0) was left out: ")
    assert "it may belong to a broken plugin: plugin 'acme'" in refusal(plugins, "riddles")


def test_an_empty_list_is_no_fault(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("acme", returned="[]")
    assert load_plugins().broken == []
    assert caplog.records == []


def test_asking_for_a_suite_whose_file_is_broken_says_so(install: Install) -> None:
    folder = install("acme", "riddles")
    (folder / "riddles.yaml").write_text("task: riddles\n")
    message = refusal(load_plugins(), "riddles")
    assert message.startswith(
        f"suite 'riddles': {folder / 'riddles.yaml'} of plugin 'acme' (acme-dist 1.0) was left out"
    )
    assert f"suite file '{folder / 'riddles.yaml'}': output_type is None; expected generate_until" in message


def test_asking_for_a_suite_of_a_plugin_that_does_not_load_says_so(install: Install) -> None:
    install("riddles", head="import no_such_module\n")
    message = refusal(load_plugins(), "riddles")
    assert message.startswith("suite 'riddles': plugin 'riddles' (riddles-dist 1.0) was left out: ModuleNotFoundError")


def test_a_plugin_named_as_an_own_suite_does_not_block_it_by_a_bad_file(install: Install) -> None:
    install("gsm8k", returned="[FOLDER / 'nowhere.yaml']")
    plugins = load_plugins()
    assert len(plugins.broken) == 1
    plugins.find_suite("gsm8k")


def test_a_refused_suite_does_not_stand_in_the_way_of_a_policy_of_that_name(install: Install) -> None:
    folder = install("acme", "riddles")
    (folder / "confidence.yaml").write_text("task: [\n")
    plugins = load_plugins()
    assert len(plugins.broken) == 1
    assert plugins.create_policy("confidence").name == "confidence"


def test_a_folder_with_a_broken_file_beside_it_does_not_hurt_a_suite(install: Install) -> None:
    folder = install("acme", "riddles", returned="[FOLDER / 'riddles.yaml']")
    (folder / "broken.yaml").write_text("task: [\n")
    plugins = load_plugins()
    assert load_suite("riddles", more=plugins.suites.paths).problems[0].prompt == "riddles asks: Why?"


def test_the_command_lists_a_plugins_suites_with_their_provider(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("acme", "riddles")
    assert command(monkeypatch, "plugins") == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "riddles" in line]
    for word in ("somebody/riddles", "acme-dist 1.0"):
        assert word in row
    assert any("gsm8k" in line and "openai/gsm8k" in line and "ecospec" in line for line in lines)


def test_the_command_refuses_a_broken_suite_in_one_line_and_lists_the_others(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (install("acme", "riddles") / "puzzles.yaml").write_text("task: [\n")
    assert command(monkeypatch, "plugins") == 0
    assert "riddles" in capsys.readouterr().out
    assert command(monkeypatch, "--suite", "puzzles") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    (error,) = errors
    assert error.startswith("ecospec-bench: error: suite 'puzzles': ")
    assert "puzzles.yaml of plugin 'acme' (acme-dist 1.0) was left out" in error
