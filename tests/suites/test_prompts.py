"""The prompts of the zero-shot suites, against what the paper's Appendix E describes, and their samples."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ecospec.suites import load_suite

ROOT = Path(str(files("ecospec.suites")))

FIRST_PROMPTS = {
    "math500": """\
Problem:
If $3(x-4)=5x+2$, what is the value of $x$?

Solution:""",
    "amc": """\
Problem:
A tram ticket costs $3$ coins and a day pass costs $10$ coins. One morning a driver sold $41$ tickets and \
passes in total and collected $207$ coins. How many day passes did the driver sell?

Solution:""",
    "aime25": """\
Each of the $18$ edges of a prism with hexagonal bases is coloured either red or blue. A colouring is called \
\\emph{odd} if every one of the $12$ vertices of the prism is an endpoint of an odd number of red edges. \
Colourings that differ only by a rotation or a reflection of the prism are counted as different. Find the \
number of odd colourings.
Please reason step by step, and put your final answer within \\boxed{}.""",
    "humaneval": '''\
from typing import Dict, List


def fold_receipt(lines: List[str]) -> Dict[str, int]:
    """ Each line of a receipt reads "COUNT x NAME @ PRICE", where COUNT and PRICE
    are whole numbers. Add up what was paid for each name. A line that begins
    with "#" is a remark and is skipped.
    >>> fold_receipt(["2 x pear @ 30", "1 x tea @ 250"])
    {'pear': 60, 'tea': 250}
    >>> fold_receipt(["1 x pear @ 30", "# thank you", "3 x pear @ 25"])
    {'pear': 105}
    """
''',
    "mtbench": """\
User: Write a short notice for the door of a village library that stays closed for two weeks while its roof is \
mended.

Assistant:""",
    "mmstar": """\
The picture shows platform numbers under a glass roof, a large board with times and town names, and people \
with suitcases looking up at it. Which place does it most likely show?
Options: A: A reading room., B: A railway station., C: A swimming hall., D: A vineyard.""",
}
BUILT = {
    "math500": lambda row: f"Problem:\n{row['problem']}\n\nSolution:",
    "amc": lambda row: f"Problem:\n{row['problem']}\n\nSolution:",
    "aime25": lambda row: row["problem"] + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": lambda row: row["prompt"],
    "mmstar": lambda row: row["question"],
    "mtbench": lambda row: f"User: {row['turns'][0]}\n\nAssistant:",
}
COLUMNS = {
    "math500": ["problem", "solution", "answer", "subject", "level", "unique_id"],
    "amc": ["id", "problem", "answer", "url"],
    "aime25": ["problem", "answer", "id"],
    "humaneval": ["task_id", "prompt", "canonical_solution", "test", "entry_point"],
    "mmstar": ["index", "question", "answer", "category", "l2_category", "meta_info"],
}
LEAST = {"aime25": 12}


def sample(suite: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / suite / "sample.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suite", FIRST_PROMPTS)
def test_the_first_prompt_is_as_written_here(suite: str) -> None:
    assert load_suite(suite, limit=1).problems[0].prompt == FIRST_PROMPTS[suite]


@pytest.mark.parametrize("suite", BUILT)
def test_every_prompt_is_its_rows_to_the_last_character(suite: str) -> None:
    loaded, rows = load_suite(suite), sample(suite)
    assert [problem.prompt for problem in loaded.problems] == [BUILT[suite](row) for row in rows]
    assert loaded.exemplars == "none"
    assert loaded.num_fewshot == 0


@pytest.mark.parametrize("suite", BUILT)
def test_odd_characters_of_real_files_reach_the_prompt(suite: str, tmp_path: Path) -> None:
    """Form feeds and tabs in a formula, braces that a template could read, leading and trailing blanks."""
    row = sample(suite)[0]
    column = {"humaneval": "prompt", "mmstar": "question", "mtbench": "turns"}.get(suite, "problem")
    odd = " \n\x0crac{1}{2}\tand {{ answer }} {% if x %} \u2028 é\n"
    row[column] = [odd, odd] if column == "turns" else odd
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert load_suite(suite, data=path).problems[0].prompt == BUILT[suite](row)


@pytest.mark.parametrize("suite", COLUMNS)
def test_the_sample_is_large_enough_and_has_the_data_sets_columns(suite: str) -> None:
    rows = sample(suite)
    assert len(rows) >= LEAST.get(suite, 24)
    assert all(list(row) == COLUMNS[suite] for row in rows)
    assert len({load.prompt for load in load_suite(suite).problems}) == len(rows)


@pytest.mark.parametrize("suite", ["math500"])
def test_a_solution_ends_in_its_answer(suite: str) -> None:
    for row in sample(suite):
        assert f"\\boxed{{{row['answer']}}}" in row["solution"]


def test_a_conversation_goes_on_with_its_second_question() -> None:
    problem, row = load_suite("mtbench", limit=1).problems[0], sample("mtbench")[0]
    assert problem.follow_ups == (f"\n\nUser: {row['turns'][1]}\n\nAssistant:",)
    assert load_suite("math500", limit=1).problems[0].follow_ups == ()


def test_only_some_rows_of_a_conversation_suite_have_references() -> None:
    rows = sample("mtbench")
    assert len(rows) >= 24
    assert all(list(row)[:3] == ["question_id", "category", "turns"] and len(row["turns"]) == 2 for row in rows)
    assert {row["category"] for row in rows if "reference" in row} == {"reasoning", "math", "coding"}


def test_mmstar_is_said_to_be_text() -> None:
    assert load_suite("mmstar", limit=1).note == "mmstar without its images measures a text workload, not vision"
    assert load_suite("math500", limit=1).note == ""


def test_contest_answers_are_of_the_data_sets_types() -> None:
    assert all(isinstance(row["answer"], float) and row["answer"].is_integer() for row in sample("amc"))
    assert all(isinstance(row["answer"], int) and 0 <= row["answer"] <= 999 for row in sample("aime25"))


def test_a_choice_offers_its_answer() -> None:
    for row in sample("mmstar"):
        letter = row["answer"]
        assert re.search(rf"\b{letter}: |\({letter}\) |\({letter.lower()}\) ", row["question"]), row["question"]


@pytest.mark.parametrize("row", sample("humaneval"), ids=lambda row: row["entry_point"])
def test_a_function_passes_its_test_and_an_empty_one_does_not(row: dict[str, Any]) -> None:
    check = f"{row['test']}\ncheck({row['entry_point']})\n"
    exec(row["prompt"] + row["canonical_solution"] + check, {})
    with pytest.raises((AssertionError, TypeError)):
        exec(row["prompt"] + "    return None\n" + check, {})
