"""Functions and metrics of a task file: what they score with, and the one line for what goes wrong in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_files import (
    MISSING,
    PLAIN,
    loading,
    refusal,
    write_scored,
    write_task,
)

from ecospec.suites import load_suite
from ecospec.suites.scoring import Scorer
from ecospec.suites.task_file import read_task_file


def test_a_function_beside_the_task_file_scores(tmp_path: Path) -> None:
    path = write_scored(tmp_path, "return {'exact_match': float(results[0].strip() == doc['answer'])}")
    scorer = Scorer(load_suite(str(path)))
    assert [scorer.score(index, " 2") for index in range(3)] == [0.0, 1.0, 0.0]


def test_a_metric_may_be_a_function_beside_the_task_file(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    metric = "{metric: !function score.length, aggregation: mean, higher_is_better: true}"
    path.write_text(f"{path.read_text()}metric_list: [{metric}]\n")
    (tmp_path / "score.py").write_text(
        "def length(references, predictions, **_):\n    return len(predictions[0]) / 10\n"
    )
    scorer = Scorer(load_suite(str(path)))
    assert (scorer.metric, scorer.score(0, "four")) == ("length", 0.4)


@pytest.mark.parametrize(
    ("setting", "function", "reason"),
    [
        ("doc_to_text", "f.raises", "ValueError: two lines"),
        ("doc_to_text", "f.speechless", "ValueError: no message"),
        ("doc_to_text", "f.number", "AssertionError: Context is not a string"),
        ("doc_to_text", "f.leaves", "SystemExit: 3"),
        ("doc_to_target", "f.raises", "ValueError: two lines"),
        ("process_docs", "f.raises", "ValueError: two lines"),
        ("process_docs", "f.drops", "ValueError: its process_docs makes 2 problems of 3 rows"),
        ("process_results", "f.nowhere", "AttributeError: Module "),
        ("process_results", "nowhere.f", "ImportError: Cannot import module 'nowhere'"),
        ("process_results", "f", "ValueError: Invalid function reference 'f'"),
        ("process_results", "bad.f", "SyntaxError: "),
    ],
)
def test_a_function_that_fails_or_is_missing_is_one_line(
    tmp_path: Path, setting: str, function: str, reason: str
) -> None:
    path = tmp_path / "mine.yaml"
    write_task(tmp_path, **({setting: MISSING} if setting in PLAIN else {}))
    path.write_text(f"{path.read_text()}{setting}: !function {function}\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "f.py").write_text(
        "def raises(docs):\n    raise ValueError('two\\nlines')\n"
        "def speechless(doc):\n    raise ValueError\n"
        "def number(doc):\n    return 5\n"
        "def leaves(doc):\n    raise SystemExit(3)\n"
        "def drops(docs):\n    return docs.select(range(2))\n"
    )
    assert loading(path).startswith(f"lm-eval cannot use it ({reason}")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("raise RuntimeError", "RuntimeError: no message"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return {'exact_match': None}", "TypeError: "),
        ("return {'exact_match': 'right'}", "ValueError: could not convert string to float: 'right'"),
        ("return {'exact_match': float('nan')}", "ValueError: it gave nan"),
        ("return {'other': 1.0}", "KeyError: 'exact_match'"),
        ("return None", "TypeError: "),
    ],
)
def test_a_metric_without_a_number_is_one_line(tmp_path: Path, body: str, reason: str) -> None:
    path = write_scored(tmp_path, body)
    suite = load_suite(str(path))
    message = refusal(path, lambda: Scorer(suite))  # before anything is generated
    assert message.startswith(f"its metric 'exact_match' gives no number for a text ({reason}")


def test_a_metric_of_ecospecs_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise ZeroDivisionError("ours")

    scorer = Scorer(load_suite("math500", limit=1))
    monkeypatch.setattr("ecospec.suites.lm_task.metric_of", fails)
    with pytest.raises(ZeroDivisionError, match=r"^ours$"):
        scorer.score(0, "text")


def test_a_fault_in_ecospecs_own_suite_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[object]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("ecospec.suites.lm_task.render", fails)
    with pytest.raises(ZeroDivisionError, match=r"^ours$"):
        load_suite("math500", limit=1)


def test_settings_and_functions_have_a_hash(tmp_path: Path) -> None:
    path = write_scored(tmp_path, "return {'exact_match': 1.0}")
    before = read_task_file(path).sha256
    assert read_task_file(path).sha256 == before
    (tmp_path / "score.py").write_text((tmp_path / "score.py").read_text() + "# another\n")
    changed = read_task_file(path).sha256
    assert changed != before
    path.write_text(path.read_text() + "repeats: 1\n")
    assert read_task_file(path).sha256 not in (before, changed)


@pytest.mark.parametrize("value", ["50", "-0.5", "1.01"])
def test_a_score_is_from_0_to_1(tmp_path: Path, value: str) -> None:
    path = write_scored(tmp_path, f"return {{'exact_match': {value}}}")
    suite = load_suite(str(path))
    assert f"it gave {float(value)}, expected a number from 0 to 1" in refusal(path, lambda: Scorer(suite))


def test_a_metric_that_changes_its_row_changes_nothing(tmp_path: Path) -> None:
    path = write_scored(
        tmp_path, "right = float(doc['answer'] in results[0]); doc.clear(); return {'exact_match': right}"
    )
    scorer = Scorer(load_suite(str(path)))
    assert [scorer.score(0, "1"), scorer.score(0, "1"), scorer.score(0, "no")] == [1.0, 1.0, 0.0]


def test_whatever_a_function_raises_is_one_line(tmp_path: Path) -> None:
    body = "raise type('Odd', (BaseException,), {'__str__': lambda self: 1 / 0})()"
    path = write_scored(tmp_path, body)
    suite = load_suite(str(path))
    assert "Odd: an error without a text" in refusal(path, lambda: Scorer(suite))
