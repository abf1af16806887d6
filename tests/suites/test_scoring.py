"""Scores by the task's own filters and metric: the right text scores 1, a wrong one 0, in every suite."""

from __future__ import annotations

from typing import Any

import pytest

from ecospec.suites import load_suite, suite_names
from ecospec.suites.scoring import Scorer

METRIC = {"humaneval": "pass@1"}


def right_text(suite: str, row: dict[str, Any]) -> str:
    """What a model that knows the answer would write."""
    if suite == "gsm8k":
        return " " + row["answer"]
    if suite == "humaneval":
        return str(row["canonical_solution"])
    if suite == "mmstar":
        return f" {row['answer']}"
    return f" After some work, the answer is \\boxed{{{row['answer']}}}."


@pytest.mark.parametrize("name", [name for name in suite_names() if name != "mtbench"])
def test_the_right_text_scores_one_and_another_rows_or_none_scores_zero(name: str) -> None:
    suite = load_suite(name)
    scorer = Scorer(suite, run_code=True)
    assert scorer.metric == METRIC.get(name, "exact_match")
    rows = [dict(problem.row) for problem in suite.problems]
    for index in (0, len(rows) // 2, len(rows) - 1):
        assert scorer.score(index, right_text(name, rows[index])) == 1.0
        assert scorer.score(index, "") == 0.0
        other = next(r for r in rows if right_text(name, r)[-9:] != right_text(name, rows[index])[-9:])
        assert scorer.score(index, right_text(name, other)) == 0.0


def test_a_conversation_has_no_score() -> None:
    scorer = Scorer(load_suite("mtbench", limit=1))
    assert scorer.score(0, "text") is None
    assert (scorer.metric, scorer.why_not) == ("", "the suite has no metric")


def test_code_is_not_run_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(program: str) -> bool:
        raise AssertionError("it ran")

    monkeypatch.setattr("ecospec.suites.answers.runs_to_its_end", forbidden)
    scorer = Scorer(load_suite("humaneval", limit=1))
    assert scorer.score(0, "    return {}") is None
    assert scorer.why_not.startswith("not run; --run-code")


def test_code_that_loops_or_fills_the_memory_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec.suites.execution.SECONDS", 2.0)
    scorer = Scorer(load_suite("humaneval", limit=1), run_code=True)
    for body in ("    while True: pass\n", "    return bytearray(4 << 30)\n", "    exit(0)\n", "    return (\n"):
        assert scorer.score(0, body) == 0.0


def test_a_chat_models_block_of_code_counts_as_the_whole_function() -> None:
    suite = load_suite("humaneval", limit=1)
    scorer, row = Scorer(suite, run_code=True), suite.problems[0].row
    head = row["prompt"][row["prompt"].index("def ") :]
    whole = f"{head}{row['canonical_solution']}"
    wrong = f"{head}    return None\n"
    assert scorer.score(0, f"Here it is:\n\n```python\n{whole}```\nIt adds up.") == 1.0
    assert scorer.score(0, f"```\n{wrong}```\nNo, rather:\n```py\n{whole}") == 1.0  # cut before its end
    assert scorer.score(0, f"```python\n{whole}```\nor\n```python\n{wrong}```") == 0.0
    assert scorer.score(0, f"```python\n{whole.replace(row['entry_point'], 'other')}```") == 0.0
    assert scorer.score(0, row["canonical_solution"] + "\n# see ```python\n") == 1.0
    assert suite.problems[0].stop != suite.problems[0].chat_stop == ()
    assert load_suite("amc", limit=1).problems[0].chat_stop == load_suite("amc", limit=1).problems[0].stop
