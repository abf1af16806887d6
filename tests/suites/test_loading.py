"""Loading a suite: sources, limits, and the one-line error for everything that does not fit."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from ecospec.errors import UserError
from ecospec.suites import load_suite, suite_names

GOOD = '{"question": "What is 2 + 3?", "answer": "It is 2 + 3 = 5.\\n#### 5"}'


def error_of(data: str | Path, **options: int) -> str:
    with pytest.raises(UserError) as caught:
        load_suite("gsm8k", data=data, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def error_in(tmp_path: Path, content: str | bytes) -> str:
    """The error for a data file with this content, less the file's name."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = error_of(path)
    assert message.startswith(f"data file {str(path)!r}")
    return message.removeprefix(f"data file {str(path)!r}").removeprefix(", ").strip()


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with an empty home, so that nothing is cached and anything left behind shows."""
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )


def test_names_are_known_without_lm_eval(tmp_path: Path) -> None:
    code = (
        "import sys, ecospec.suites as s; print(s.suite_names());"
        "print(sorted({'lm_eval', 'datasets', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    names, heavy = run_python(code, tmp_path).stdout.splitlines()
    assert "gsm8k" in names
    assert heavy == "[]"


def test_errors_come_before_lm_eval_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, ecospec.suites as s\n"
        "try: s.load_suite('gsm8k', data='nowhere.jsonl')\n"
        "except s.loading.UserError: print('lm_eval' in sys.modules)"
    )
    assert run_python(code, tmp_path).stdout == "False\n"


def test_loading_prints_nothing_and_leaves_nothing_on_disk(tmp_path: Path) -> None:
    code = "from ecospec.suites import load_suite; load_suite('gsm8k')"
    result = run_python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_embedded_sample_names_its_source() -> None:
    suite = load_suite("gsm8k")
    sample = files("ecospec.suites") / "gsm8k" / "sample.jsonl"
    assert suite.name == "gsm8k"
    assert suite.source == "embedded sample"
    assert suite.data_sha256 == hashlib.sha256(sample.read_bytes()).hexdigest()
    assert suite.num_fewshot == 5
    assert suite.exemplars == "5 written for ecospec, not from the data set"
    assert [problem.id for problem in suite.problems] == [f"gsm8k-{i}" for i in range(len(suite.problems))]


def test_limit_keeps_the_first_problems() -> None:
    suite = load_suite("gsm8k")
    assert load_suite("gsm8k", limit=3).problems == suite.problems[:3]
    assert load_suite("gsm8k", limit=3).data_sha256 == suite.data_sha256
    assert load_suite("gsm8k", limit=10_000) == suite


def test_local_file_gives_the_same_form_of_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(GOOD + "\n", encoding="utf-8")
    suite, sample = load_suite("gsm8k", data=path), load_suite("gsm8k", limit=1)
    head = sample.problems[0].prompt.rpartition("Question: ")[0]
    (problem,) = suite.problems
    assert problem.prompt == f"{head}Question: What is 2 + 3?\nAnswer:"
    assert problem.stop == sample.problems[0].stop
    assert problem.reference == "It is 2 + 3 = 5.\n#### 5"
    assert suite.source == str(path)
    assert suite.data_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert suite.exemplars == sample.exemplars
    assert load_suite("gsm8k", data=str(path)) == suite


def test_further_columns_of_any_type_stay_in_the_row(tmp_path: Path) -> None:
    rows = [{**json.loads(GOOD), "level": level} for level in (1, "two", None, {"three": [3]})]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [problem.row for problem in load_suite("gsm8k", data=path).problems] == rows


def test_byte_order_mark_crlf_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \n{GOOD}\r\n".encode())
    assert [problem.id for problem in load_suite("gsm8k", data=path).problems] == ["gsm8k-0", "gsm8k-1"]


def test_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(GOOD.replace("What", "So\u2028what"), encoding="utf-8")
    assert "Question: So\u2028what is 2 + 3?" in load_suite("gsm8k", data=path).problems[0].prompt


def test_braces_in_a_question_are_text_and_not_a_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(GOOD.replace("2 + 3?", "{{ answer }}?"), encoding="utf-8")
    assert load_suite("gsm8k", data=path).problems[0].prompt.endswith("What is {{ answer }}?\nAnswer:")


def test_unknown_suite_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError) as caught:
        load_suite("gsm8")
    assert str(caught.value).startswith("no suite 'gsm8'; did you mean 'gsm8k'?")
    assert "gsm8k" in suite_names()


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one_is_refused(limit: int) -> None:
    assert error_of("embedded", limit=limit) == f"limit is {limit}; expected 1 or more problems"


def test_missing_file_is_refused() -> None:
    expected = (
        "no data file 'embeded'; expected 'embedded', 'hub', or the path of a JSON lines or parquet file or folder"
    )
    assert error_of("embeded") == expected


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    assert error_of(tmp_path) == (
        f"data folder {str(tmp_path)!r} holds 0 JSON lines and 0 parquet files; expected one JSON lines file, or "
        "parquet files alone"
    )


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_impossible_path_is_refused(path: str) -> None:
    assert error_of(path).startswith("cannot read data file")


@pytest.mark.parametrize("content", ["", "\n  \r\n"])
def test_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    assert error_in(tmp_path, content) == "has no rows; expected one JSON object a line"


def test_other_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    content = f"{GOOD}\n".encode() + GOOD.replace("What", "Ö").encode("latin-1")
    assert error_in(tmp_path, content) == "line 2: byte 0xd6 is not UTF-8; expected JSON lines in UTF-8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'question'}", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (GOOD + GOOD, f"not JSON (Extra data, column {len(GOOD) + 1})"),
        (GOOD[:-1] + ', "level": NaN}', "not JSON (NaN is not a JSON number)"),
        ('["question", "answer"]', "a list"),
        ("null", "null"),
    ],
)
def test_line_that_is_no_json_object_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    expected = f"line 3: {message}; expected one JSON object a line"
    assert error_in(tmp_path, f"{GOOD}\n\n{line}\n") == expected


def test_deeply_nested_line_is_refused(tmp_path: Path) -> None:
    assert error_in(tmp_path, "[" * 100_000).startswith("line 1: not JSON (")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            '{"Question": "q", "answer": "a"}',
            "no column 'question' (found: 'Question', 'answer'; the nearest is 'Question')",
        ),
        ('{"question": "q", "x": 1}', "no column 'answer' (found: 'question', 'x')"),
        ("{}", "no column 'question' (found: none)"),
        ('{"question": ["q"], "answer": "a"}', "column 'question' is a list; expected a string"),
        ('{"question": "q", "answer": 5}', "column 'answer' is a number; expected a string"),
        ('{"question": "q", "answer": null}', "column 'answer' is null; expected a string"),
        ('{"question": " ", "answer": "a"}', "column 'question' is empty; expected text"),
        (
            '{"question": "\\ud800", "answer": "a"}',
            "column 'question' has half of a surrogate pair; expected text",
        ),
    ],
)
def test_row_that_does_not_fit_is_refused_with_its_line(tmp_path: Path, row: str, message: str) -> None:
    assert error_in(tmp_path, f"{GOOD}\n{row}\n") == f"line 2: {message}"


def test_rows_beyond_the_limit_are_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD}\n{{}}\n", encoding="utf-8")
    assert "line 2" in error_of(path, limit=1)
