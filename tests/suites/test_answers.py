"""What counts as the right answer, and what does not."""

from __future__ import annotations

import json
import time
from importlib.resources import files
from pathlib import Path

import pytest

from ecospec.suites.answers import choice_results, chosen_letter, math_results, same_answer

SAMPLES = Path(str(files("ecospec.suites")))


@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("70", "So the sum is \\boxed{70}.", True),
        ("70", "So the sum is \\boxed{71}.", False),
        ("\\frac{1}{2}", "It is $\\boxed{\\frac12}$.", True),
        ("\\frac{1}{2}", "so the chance is 0.5", True),
        ("\\frac{1}{2}", "so the chance is \\boxed{\\frac{2}{4}}", True),
        ("\\frac{1}{2}", "so the chance is \\boxed{\\frac{1}{3}}", False),
        ("3.75", "\\boxed{\\frac{15}{4}}", True),
        ("1000", "\\boxed{1,000}", True),
        ("526{,}500", "\\boxed{526500}", True),
        ("1000", "\\boxed{1,001}", False),
        ("5", "\\boxed{5\\text{ cm}}", True),
        ("5", "The side is 5 cm", True),
        ("70", "first \\boxed{71}, but on reflection \\boxed{70}", True),
        ("71", "first \\boxed{71}, but on reflection \\boxed{70}", False),
        ("12.0", "The answer is 12.", True),
        ("12.0", "The answer is 13.", False),
        ("70", "", False),
        ("70", "I do not know.", False),
        ("70", "\\boxed{", False),
        ("70", "\\boxed{}", False),
        ("70", "\\boxed{\\frac{}{}}", False),
        ("x+1", "\\boxed{1+x}", True),
        ("x+1", "\\boxed{1-x}", False),
        ("(7,-3)", "\\boxed{(7, -3)}", True),
        ("(7,-3)", "\\boxed{(-3, 7)}", False),
        ("\\text{Thursday}", "\\boxed{\\text{Thursday}}", True),
        ("\\text{Thursday}", "\\boxed{\\text{Friday}}", False),
    ],
)
def test_equal_answers_are_equal_however_they_are_written(reference: str, text: str, right: bool) -> None:
    assert same_answer(reference, text) is right
    assert math_results({"answer": reference}, [text]) == {"exact_match": float(right)}


def test_every_worked_solution_of_the_sample_is_right_and_no_other_ones() -> None:
    rows = [json.loads(line) for line in (SAMPLES / "math500" / "sample.jsonl").read_text().splitlines()]
    solutions = [row["solution"] for row in rows]
    for row in rows:
        assert same_answer(row["answer"], row["solution"]), row["answer"]
    pairs = zip(rows, solutions[1:] + solutions[:1], strict=True)
    assert not any(same_answer(row["answer"], other) for row, other in pairs)


def test_no_text_takes_long() -> None:
    began = time.perf_counter()
    for text in ("answer" + " " * 100_000 + "#", "answer is " * 20_000, "(" * 100_000, "\\boxed{" * 20_000):
        chosen_letter(text)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("B: A railway station.", "B"),
        ("(C) the red one", "C"),
        ("D.", "D"),
        ("The answer is B.", "B"),
        ("The answer is (A), not B.", "A"),
        ("Answer: C", "C"),
        ("First I thought the answer is A, but the answer is D", "D"),
        ("A railway station is what it shows, so I choose C", "C"),
        ("A railway station.", None),
        ("The answer is: A", "A"),
        ("The answer is option A.", "A"),
        ("The answer is A railway station, so C", "C"),
        ("The answer is A because it moves.", "A"),
        ("\\boxed{A}", "A"),
        ("The answer is \\boxed{\\text{B}}, not A.", "B"),
        ("Final answer: `A`", "A"),
        ("So I choose C, I guess.", "C"),
        ("answer is the last of these", None),
        ("I'd say it's a jar", None),
        ("", None),
        ("42", None),
    ],
)
def test_the_letter_that_a_text_settles_on(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter
    assert choice_results({"answer": "B"}, [text]) == {"exact_match": float(letter == "B")}
