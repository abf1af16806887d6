"""The gsm8k suite: its prompt, its problems, and that its task file is lm-eval's own but for the sampler."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ecospec.suites import lm_task, load_suite
from ecospec.suites.lm_task import load_task, quiet

FOLDER = Path(str(files("ecospec.suites"))) / "gsm8k"

FIRST_EXEMPLAR = """\
Question: Ines runs a stall at the flea market and sells old postcards for $2 each. On Saturday she sold \
36 postcards, and on Sunday she sold 14 more than on Saturday. How many dollars did she take in over the \
whole weekend?
Answer: On Sunday Ines sold 36 + 14 = 50 postcards.
Over the whole weekend she sold 36 + 50 = 86 postcards.
Each postcard brings in $2, so the stall took in 86 * 2 = $172 from Saturday morning to Sunday evening.
#### 172

"""

FIRST_PROBLEM = """\
Question: Marta's bakery has 7 trays with 24 rolls on each tray when it opens. By noon the shop has sold 95 \
rolls, and then 2 more trays of the same size come out of the oven. How many rolls are in the shop after that?
Answer:"""

# The final answers, worked out again from the numbers in the questions.
EXEMPLAR_ANSWERS = [
    (36 + 36 + 14) * 2,
    84 - 84 / 3 + 17 - 25,
    6 * 4 / 2 * 9 + 15,
    (5 * 45 + 2 * 80 + 7 * 20) * 4 / 60,
    (240 / 8 - 2 * 5) / 5 * 11,
]
SAMPLE_ANSWERS = [
    (7 + 2) * 24 - 95,
    3 + (300 - 3 * 60) / 40,
    150 * 0.8 - 12,
    (22 - 6) * 4 + 6,
    180 / 2 * (1 - 1 / 3),
    5 * 16 - (14 + 17 + 11 + 18),
    35 * 3 / 5 - 35 * 2 / 5,
    1200 - 9 * 80 - 4 * 65,
    3850 / 55 - 3850 / 70,
    50 - (5 * 3 + 6 * (3 - 1) + 4),
    (2 * 45 + 2 * 30 - 4) * 6 + 85,
    -(-(300 // 20) * (240 // 20) // 25),
    (352 - 5 * 26) / (11 - 5),
    9 / (5 + 7) * 60,
    (205 - (9 * 18 - 47)) / 18,
    6 * 130 + 4 * 75 - 925,
    15 + 9 - 4 + 2 * 9 - 11,
    14 / 4 * 250 - 600,
    800 + 3 * 800 * 0.05,
    (25 - 3 + 8) * 2,
    12 * (20 + 2 * 9 - 32),
    35 * 40 * 0.9 / 6,
    -(-(68 + 7) // (12 - 1)),
    90 - 5 * 6 - 2 * 15,
    2 * (32 + 32 - 8) * 25,
    (2 * 140 + 70) * 9 / 100 * 2,
    96 / 2 - 96 / 4 / 2,
    900 * 2 / 3 / (35 - 5),
    3 * 38 + 20 + 10 + 6,
    4 * 12 + 7 * 12 / 3 - 3 * 5,
    40 * 16 + (46 - 40) * 16 * 1.5 - 75,
    (13 * 18 - 24) / 0.5 * 7,
    6 * 19,
    14 - 2 - 3,
]


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


SAMPLE, EXEMPLARS = read("sample.jsonl"), read("exemplars.jsonl")


def final_number(row: dict[str, str]) -> float:
    *steps, last = row["answer"].split("\n")
    assert steps
    assert re.fullmatch(r"#### \d+", last)
    return float(last.removeprefix("#### "))


def test_prompt_of_the_first_problem_is_the_exemplars_in_order_and_the_question() -> None:
    problem = load_suite("gsm8k", limit=1).problems[0]
    others = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in EXEMPLARS[1:])
    assert problem.prompt == FIRST_EXEMPLAR + others + FIRST_PROBLEM
    assert problem.stop == ("Question:", "</s>", "<|im_end|>")
    assert problem.reference == SAMPLE[0]["answer"]
    assert problem.row == SAMPLE[0]
    assert problem.id == "gsm8k-0"


def test_there_are_enough_problems_and_five_exemplars_and_none_is_both() -> None:
    assert len(SAMPLE) >= 28
    assert len(EXEMPLARS) == 5
    questions = [row["question"] for row in SAMPLE + EXEMPLARS]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("row", SAMPLE + EXEMPLARS, ids=lambda row: " ".join(row["question"].split()[:4]))
def test_every_problem_is_plain_text_of_moderate_length(row: dict[str, str]) -> None:
    assert list(row) == ["question", "answer"]
    assert (row["question"] + row["answer"]).isascii()
    assert "<<" not in row["answer"]
    assert 25 <= len(row["question"].split()) <= 70
    assert 40 <= len(row["answer"].split()) <= 110


@pytest.mark.parametrize("row", SAMPLE + EXEMPLARS, ids=lambda row: " ".join(row["question"].split()[:4]))
def test_every_equation_in_an_answer_holds_and_the_last_one_gives_it(row: dict[str, str]) -> None:
    equations = re.findall(r"([(\d][\d. ()*/+-]*) = \$?(\d+(?:\.\d+)?)", row["answer"])
    assert len(equations) == row["answer"].count("=") >= 1
    for left, right in equations:
        assert eval(left) == pytest.approx(float(right), abs=1e-9), left
    assert float(equations[-1][1]) == final_number(row)


def test_final_answers_follow_from_the_questions() -> None:
    assert [final_number(row) for row in SAMPLE] == pytest.approx(SAMPLE_ANSWERS)
    assert [final_number(row) for row in EXEMPLARS] == pytest.approx(EXEMPLAR_ANSWERS)


def task_of(folder: Path, **settings: Any) -> Any:
    """lm-eval's task of a folder, over our rows and with `settings` laid over it, by lm-eval alone."""
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    def custom_dataset(**_: Any) -> dict[str, Any]:
        return {"train": Dataset.from_list(EXEMPLARS), "test": Dataset.from_list(SAMPLE)}

    overrides = {"task": "gsm8k", "custom_dataset": custom_dataset, **settings}
    manager = TaskManager(include_path=folder, include_defaults=False)
    return manager.load({"group": "any", "task": [overrides]})["tasks"]["gsm8k"]


def test_prompts_are_those_of_the_gsm8k_task_that_lm_eval_ships() -> None:
    import lm_eval.tasks

    shipped = Path(lm_eval.tasks.__file__).parent / "gsm8k"
    with quiet():
        task = task_of(shipped, fewshot_config={"sampler": "first_n"})
        task.build_all_requests(rank=0, world_size=1)
    theirs = [(instance.args[0], tuple(instance.args[1]["until"])) for instance in task.instances]
    assert [(problem.prompt, problem.stop) for problem in load_suite("gsm8k").problems] == theirs


def test_filters_and_metrics_are_those_of_the_gsm8k_task_that_lm_eval_ships() -> None:
    import lm_eval.tasks

    with quiet():
        ours = task_of(FOLDER).config
        theirs = task_of(Path(lm_eval.tasks.__file__).parent / "gsm8k").config
    for key in ("filter_list", "metric_list", "generation_kwargs", "dataset_path", "dataset_name"):
        assert ours[key] == theirs[key], key


def test_task_file_scores_the_worked_answers_as_right_and_others_as_wrong() -> None:
    columns = {"question": "string", "answer": "string"}
    with quiet():
        task = load_task(FOLDER / "gsm8k.yaml", "gsm8k", splits={"train": EXEMPLARS, "test": SAMPLE}, columns=columns)
        task.build_all_requests(rank=0, world_size=1)
        for index, instance in enumerate(task.instances):
            right = SAMPLE[index]["answer"]
            instance.resps.append(right if index % 2 == 0 else "So it is 1 more.\n#### 987654")
        task.apply_filters()
    for key in ("strict-match", "flexible-extract"):
        scores = [
            task.process_results(instance.doc, [instance.filtered_resps[key]])["exact_match"]
            for instance in task.instances
        ]
        assert scores == [float(index % 2 == 0) for index in range(len(SAMPLE))]


def test_quiet_leaves_log_settings_as_they_were() -> None:
    import logging

    before = logging.root.manager.disable
    with lm_task.quiet():
        assert not logging.getLogger("lm_eval.api.task").isEnabledFor(logging.WARNING)
        assert logging.getLogger("lm_eval.api.task").isEnabledFor(logging.ERROR)
    assert logging.root.manager.disable == before
