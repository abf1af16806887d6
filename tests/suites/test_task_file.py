"""A suite by the path of its task file: what is read from it, and the one line for what does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from task_files import (
    MISSING,
    ROWS,
    copied,
    loading,
    reading,
    write_rows,
    write_scored,
    write_task,
)

from ecospec.errors import UserError
from ecospec.suites import load_suite
from ecospec.suites.scoring import Scorer
from ecospec.suites.task_file import MOST_INCLUDES, builtin_files, find_task_file, read_task_file


def test_a_copied_suite_with_another_template_asks_the_same_problems_in_its_words(tmp_path: Path) -> None:
    path = copied("math500", tmp_path, ('"Problem:\\n{{problem}}', '"Task: {{problem}}'))
    mine, own = load_suite(str(path)), load_suite("math500")
    assert (mine.name, mine.source, mine.num_fewshot) == ("mine", str(path.parent / "sample.jsonl"), 0)
    assert [p.id for p in mine.problems] == [f"mine-{index}" for index in range(len(own.problems))]
    assert [p.prompt for p in mine.problems] == [p.prompt.replace("Problem:\n", "Task: ") for p in own.problems]
    assert [(p.row, p.reference, p.stop) for p in mine.problems] == [(p.row, p.reference, p.stop) for p in own.problems]
    assert mine.data_sha256 == own.data_sha256
    assert mine.task_file == read_task_file(path)
    assert mine.task_file is not None
    assert not mine.task_file.builtin
    assert Scorer(mine).score(0, f"\\boxed{{{mine.problems[0].reference}}}") == 1.0


def test_a_suite_by_path_takes_its_rows_from_a_file(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"question": "Why?", "answer": "So."}])
    suite = load_suite(str(path), data=data)
    (problem,) = suite.problems
    assert (problem.id, problem.prompt, problem.reference) == ("mine-0", "Q: Why?\nA:", "So.")
    assert problem.stop == ("Q:",)
    assert suite.source == str(data)
    assert len(load_suite(str(path), limit=2).problems) == 2


def test_a_path_may_be_relative_and_end_in_yml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path).rename(tmp_path / "mine.yml")
    monkeypatch.chdir(tmp_path)
    assert load_suite("mine.yml").problems[0].prompt == "Q: 0 + 1?\nA:"


def test_an_installed_suite_is_found_by_its_name(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    more = {"mine": path}
    assert find_task_file("mine", more).path == path
    assert load_suite("mine", more=more) == load_suite(str(path))
    with pytest.raises(UserError, match=r"^no suite 'mien'; did you mean 'mine'\?.*or give the path of a task file$"):
        load_suite("mien", more=more)


def test_ecospecs_own_suite_goes_before_an_installed_one_of_its_name(tmp_path: Path) -> None:
    assert find_task_file("gsm8k", {"gsm8k": write_task(tmp_path)}).builtin


def test_worked_examples_beside_the_task_file_stand_in_every_prompt(tmp_path: Path) -> None:
    path = write_task(tmp_path, num_fewshot=2, fewshot_split="shots", fewshot_config={"sampler": "first_n"})
    write_rows(tmp_path / "exemplars.jsonl", [{"question": f"{n} * 1?", "answer": str(n)} for n in (7, 8, 9)])
    suite = load_suite(str(path))
    head = "Q: 7 * 1?\nA: 7\n\nQ: 8 * 1?\nA: 8\n\n"
    assert [problem.prompt for problem in suite.problems] == [f"{head}Q: {row['question']}\nA:" for row in ROWS]
    assert suite.exemplars == f"2 from {tmp_path / 'exemplars.jsonl'}"


@pytest.mark.parametrize("named", [{"training_split": "seen"}, {"validation_split": "dev"}, {"fewshot_split": "shots"}])
@pytest.mark.parametrize("num_fewshot", [0, 1])
def test_worked_examples_stand_for_every_further_split_that_is_named(
    tmp_path: Path, named: dict[str, str], num_fewshot: int
) -> None:
    path = write_task(tmp_path, num_fewshot=num_fewshot, **named)
    write_rows(tmp_path / "exemplars.jsonl", [{"question": "7 * 1?", "answer": "7"}])
    head = "Q: 7 * 1?\nA: 7\n\n" * num_fewshot
    assert [p.prompt for p in load_suite(str(path)).problems] == [f"{head}Q: {row['question']}\nA:" for row in ROWS]


def test_drawn_worked_examples_are_drawn_alike_in_every_run(tmp_path: Path) -> None:
    path = str(copied("gsm8k", tmp_path, ("fewshot_config:\n  sampler: first_n\n", "")))
    problems = load_suite(path).problems
    assert load_suite(path).problems == problems
    assert load_suite(path, limit=2).problems == problems[:2]


def test_a_validation_split_stands_in_for_a_missing_test_split(tmp_path: Path) -> None:
    path = write_task(tmp_path, test_split=MISSING, validation_split="dev")
    assert read_task_file(path).split == "dev"
    assert load_suite(str(path), limit=1).problems[0].prompt == "Q: 0 + 1?\nA:"


def test_settings_that_are_null_are_settings_left_out(tmp_path: Path) -> None:
    nothing = {f"metadata__{key}": None for key in ("note", "hub_file", "follow_ups", "follow_up", "chat_until")}
    path = write_task(tmp_path, num_fewshot=None, **nothing)
    assert load_suite(str(path)).problems == load_suite(str(write_task(tmp_path))).problems


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("task", MISSING, "task is None; expected a name of letters, digits, '.', '+', '-' and '_'"),
        ("task", "two words", "task is 'two words'; expected a name of"),
        ("task", "two\nlines", r"task is 'two\nlines'; expected a name of"),
        ("task", "mine\n", r"task is 'mine\n'; expected a name of"),
        ("task", "../mine", "task is '../mine'; expected a name of"),
        ("task", "", "task is ''; expected a name of"),
        ("task", 5, "task is 5; expected a name of"),
        ("task", ["mine"], "task is ['mine']; expected a name of"),
        ("output_type", MISSING, "output_type is None; expected generate_until"),
        ("output_type", "multiple_choice", "output_type is 'multiple_choice'; expected generate_until"),
        ("doc_to_text", MISSING, "doc_to_text is None; expected the prompt's template"),
        ("doc_to_text", 0, "doc_to_text is 0; expected the prompt's template"),
        ("num_fewshot", -1, "num_fewshot is -1; expected a number of worked examples"),
        ("num_fewshot", "two", "num_fewshot is 'two'; expected a number of worked examples"),
        ("num_fewshot", 1.5, "num_fewshot is 1.5; expected a number of worked examples"),
        ("num_fewshot", True, "num_fewshot is True; expected a number of worked examples"),
        ("test_split", MISSING, "test_split is None; expected the split that holds the problems"),
        ("test_split", 5, "test_split is 5; expected the split that holds the problems"),
        ("metadata", MISSING, "metadata.columns is None; expected each column that the prompt and the score need"),
        ("metadata", "columns", "metadata.columns is None; expected each column"),
        ("metadata__columns", MISSING, "metadata.columns is None; expected each column"),
        ("metadata__columns", {}, "metadata.columns is {}; expected each column"),
        ("metadata__columns", ["question"], "metadata.columns is ['question']; expected each column"),
        ("metadata__columns", {"question": "text"}, "with its kind: string, integer, number, strings"),
        ("metadata__columns", {"question": ["string"]}, "with its kind: string, integer, number, strings"),
        ("metadata__columns", {1: "string"}, "metadata.columns is {1: 'string'}; expected each column"),
        ("metadata__note", ["a", "b"], "metadata.note is ['a', 'b']; expected a line of text"),
        ("metadata__chat_until", "Q:", "metadata.chat_until is 'Q:'; expected a list of stop sequences"),
        ("metadata__chat_until", [""], "metadata.chat_until is ['']; expected a list of stop sequences"),
        ("metadata__hub_file", "mine", "metadata.hub_file is 'mine'; expected a mapping with repo, type and path"),
        ("metadata__hub_file", {"repo": "mine", "type": "space"}, "expected a mapping with repo, type and path"),
        ("metadata__follow_ups", "turns", "metadata.follow_ups is 'turns'; expected one of its columns of strings"),
        ("metadata__follow_ups", "answer", "metadata.follow_ups is 'answer'; expected one of its columns of strings"),
        ("metadata__follow_ups", ["answer"], "metadata.follow_ups is ['answer']; expected one of its columns"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(tmp_path: Path, setting: str, value: Any, message: str) -> None:
    assert message in reading(write_task(tmp_path, **{setting: value}))


@pytest.mark.parametrize("follow_up", [None, "go on", ["{{turn}}"], {"{{turn}}": 1}])
def test_follow_ups_need_a_template(tmp_path: Path, follow_up: Any) -> None:
    columns = {"turns": "strings"}
    path = write_task(tmp_path, metadata__columns=columns, metadata__follow_ups="turns", metadata__follow_up=follow_up)
    assert reading(path) == "metadata.follow_ups without a metadata.follow_up that holds {{turn}}"


def test_follow_ups_are_put_into_their_template(tmp_path: Path) -> None:
    path = copied("mtbench", tmp_path, ('"\\n\\nUser: {{turn}}', '"\\n\\nThen: {{turn}}'))
    problem = load_suite(str(path), limit=1).problems[0]
    assert problem.follow_ups == (f"\n\nThen: {problem.turns[1]}\n\nAssistant:",)


def test_worked_examples_without_a_file_of_them_are_refused(tmp_path: Path) -> None:
    expected = "num_fewshot is 2, but there is no exemplars.jsonl beside it with worked examples"
    assert reading(write_task(tmp_path, num_fewshot=2, fewshot_split="shots")) == expected


def test_too_few_worked_examples_are_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, num_fewshot=2, fewshot_split="shots")
    exemplars = tmp_path / "exemplars.jsonl"
    write_rows(exemplars, ROWS[:1])
    with pytest.raises(UserError) as caught:
        load_suite(str(path))
    assert str(caught.value) == (f"data file {str(exemplars)!r} has 1 worked examples; expected the 2 of num_fewshot")


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"fewshot_split": "test"},
        {"training_split": "seen", "fewshot_config": {"split": "test"}},
        {"test_split": MISSING, "validation_split": "dev"},
    ],
)
def test_worked_examples_from_the_problems_own_split_are_refused(tmp_path: Path, named: dict[str, Any]) -> None:
    path = write_task(tmp_path, num_fewshot=1, **named)
    write_rows(tmp_path / "exemplars.jsonl", ROWS)
    assert reading(path).endswith(" too; expected a fewshot_split of its own")


def test_worked_examples_in_the_task_file_itself_are_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, num_fewshot=1, training_split="seen", fewshot_config={"samples": ROWS})
    write_rows(tmp_path / "exemplars.jsonl", ROWS)
    assert reading(path) == "fewshot_config.samples besides exemplars.jsonl; expected all worked examples there"


def test_an_embedded_sample_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    (tmp_path / "sample.jsonl").unlink()
    assert loading(path) == (
        "no sample.jsonl beside it, so that it has no embedded sample; expected --data hub or --data with a file"
    )


def test_data_from_the_hub_without_a_data_set_are_refused(tmp_path: Path) -> None:
    assert loading(write_task(tmp_path), data="hub").startswith(" names no data set on the hub (dataset_path); ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"task: [", "not YAML (while parsing a flow"),
        (b"task: a\n---\ntask: b\n", "not YAML (expected a single document"),
        (b"? [a]\n: b\n", "not YAML (while constructing a mapping"),
        (b"task: !other f\n", "not YAML (could not determine a constructor for the tag '!other'"),
        (b"task: \xff", "not YAML ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 5000, "not YAML ("),
        (b"", "NoneType; expected the settings of an lm-eval task"),
        (b"- task", "list; expected the settings of an lm-eval task"),
        (b"words", "str; expected the settings of an lm-eval task"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert reading(path).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.yaml", "no such file; expected an lm-eval task file"),
        ("nowhere/mine.yml", "no such file; expected an lm-eval task file"),
        ("folder.yaml", "not a regular file; expected an lm-eval task file"),
        ("pipe.yaml", "not a regular file; expected an lm-eval task file"),
        ("x" * 300 + ".yaml", "not readable (File name too long)"),
        ("a\0b.yaml", "not YAML (embedded null byte)"),
    ],
)
def test_a_path_without_a_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    assert loading(tmp_path / name) == message


def test_a_folder_that_is_not_named_as_a_task_file_is_no_suite(tmp_path: Path) -> None:
    write_task(tmp_path)
    with pytest.raises(UserError, match=r"^no suite '.*'; known: .*; it is a folder: give the task file in it$"):
        load_suite(str(tmp_path))


def test_included_settings_are_merged_and_those_of_the_file_win(tmp_path: Path) -> None:
    write_task(tmp_path, doc_to_text="first {{question}}", metadata__note="as a whole")
    (tmp_path / "mine.yaml").rename(tmp_path / "base.yaml")
    (tmp_path / "second.yaml").write_text('doc_to_text: "second {{question}}"\ndoc_to_target: second\n')
    path = tmp_path / "outer.yaml"
    path.write_text("include: [base.yaml, second.yaml]\ntask: outer\ndoc_to_target: own\n")
    suite = load_suite(str(path), limit=1)
    (problem,) = suite.problems
    assert (suite.name, suite.note) == ("outer", "as a whole")
    assert (problem.id, problem.prompt, problem.reference) == ("outer-0", "second 0 + 1?", "own")


def test_functions_of_an_included_file_are_found_beside_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_scored(base, "return {'exact_match': 0.25}")
    path = tmp_path / "outer.yaml"
    path.write_text("include: base/mine.yaml\ntask: outer\n")
    assert Scorer(load_suite(str(path), data=base / "sample.jsonl")).score(0, "text") == 0.25


@pytest.mark.parametrize(
    ("included", "message"),
    [
        ("mine.yaml", f"more than {MOST_INCLUDES} files deep in includes"),
        ("[other.yaml]", f"which includes '{{}}/other.yaml': more than {MOST_INCLUDES} files deep in includes"),
        ("nowhere.yaml", "which includes '{}/nowhere.yaml': no such file; expected an lm-eval task file"),
        ("list.yaml", "which includes '{}/list.yaml': list; expected the settings of an lm-eval task"),
        ("broken.yaml", "which includes '{}/broken.yaml': not YAML ("),
        (".", "which includes '{}': not a regular file; expected an lm-eval task file"),
    ],
)
def test_an_include_that_ends_nowhere_is_refused(tmp_path: Path, included: str, message: str) -> None:
    path = write_task(tmp_path)
    path.write_text(f"{path.read_text()}include: {included}\n")
    (tmp_path / "other.yaml").write_text("include: other.yaml\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    assert message.format(tmp_path) in loading(path)


def test_a_long_chain_of_includes_is_read(tmp_path: Path) -> None:
    write_task(tmp_path).rename(tmp_path / "0.yaml")
    for depth in range(MOST_INCLUDES):
        (tmp_path / f"{depth + 1}.yaml").write_text(f"include: {depth}.yaml\n")
    path = tmp_path / f"{MOST_INCLUDES}.yaml"
    assert load_suite(str(path), limit=1).problems[0].id == "mine-0"


def test_other_files_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    alone = load_suite(str(path))
    (tmp_path / "twin.yaml").write_text(path.read_text().replace("Q: ", "Other: "))
    (tmp_path / "broken.yaml").write_text("task: [\n")
    (tmp_path / "function.yaml").write_text("task: function\nprocess_docs: !function nowhere.f\n")
    (tmp_path / "group.yaml").write_text("group: mine\ntask: [twin, nowhere]\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "mine.yaml").write_text("task: mine\n")
    assert load_suite(str(path)) == alone


@pytest.mark.parametrize("name", ["ecospec", "suite", "gsm8k-mine", "all"])
def test_a_suite_by_path_may_have_any_name(tmp_path: Path, name: str) -> None:
    suite = load_suite(str(write_task(tmp_path, task=name)), limit=1)
    assert (suite.name, suite.problems[0].prompt) == (name, "Q: 0 + 1?\nA:")


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("doc_to_text", "{{nowhere}}", "UndefinedError: 'nowhere' is undefined"),
        ("doc_to_text", "{{question", "TemplateSyntaxError: "),
        ("frobnicate", 1, "TypeError: "),
        ("filter_list", [{"name": "a", "filter": [{"function": "nowhere"}]}], "KeyError: "),
    ],
)
def test_what_only_lm_eval_finds_wrong_is_one_line(tmp_path: Path, setting: str, value: Any, reason: str) -> None:
    path = write_task(tmp_path, **{setting: value})
    assert loading(path).startswith(f"lm-eval cannot use it ({reason}")


def test_the_name_of_one_of_ecospecs_own_suites_is_taken(tmp_path: Path) -> None:
    path = write_task(tmp_path, task="gsm8k")
    assert loading(path) == "task is 'gsm8k', the name of one of ecospec's own suites; expected another"
    assert load_suite(str(builtin_files()["math500"]), limit=1).name == "math500"  # itself, by its path


@pytest.mark.parametrize("until", [[""], ["a", ""], [5], 5, {"a": 1}])
def test_a_stop_sequence_that_is_none_is_refused(tmp_path: Path, until: Any) -> None:
    path = write_task(tmp_path, generation_kwargs={"until": until, "do_sample": False})
    assert loading(path).startswith("lm-eval cannot use it (")


def test_a_settings_size_does_not_matter_to_its_refusal(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    path = tmp_path / "bomb.yaml"
    path.write_text(f"l0: &l0 [x]\n{levels}task: *l11\n", encoding="utf-8")
    assert len(loading(path)) < 500
