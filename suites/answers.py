"""Whether a text's answer is right: mathematics by math-verify, choices by their letter, code by running it.

The functions that end in ``_results`` are what lm-eval calls, by a task file's ``process_results``, with a row
and the one text that was generated for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ecospec.suites.execution import runs_to_its_end

BOX = "\\boxed"
# Options are A to H: a lone I is a pronoun. "A" before an ordinary word is an article.
_LETTER = r"\(?([B-H]\b|A\b(?!\s{1,4}(?!because|since|as\b|which|and\b|or\b|but\b)[a-z]))(?!['’])"
_LEAD = r"[\s:=*`\"'$]{0,12}(?:(?:is|option|choice)\b[\s:=*`\"'$]{0,12}){0,3}"
_BOXED = re.compile(r"\\boxed\{\s{0,4}(?:\\text(?:bf)?\{)?\s{0,4}\(?([A-H])\b")
_STATED = re.compile(rf"\b(?i:answer){_LEAD}{_LETTER}")
_FIRST = re.compile(r"^[^\w(]{0,12}\(?([A-Ha-h])(?:[).:,]|\s{0,4}$)")
_FENCED = re.compile(r"^ {0,3}```[^\n]*\n(.*?)(?:^ {0,3}```|\Z)", re.MULTILINE | re.DOTALL)
_ALONE = re.compile(r"(?<![A-Za-z])([B-H])(?![A-Za-z'’])|\(([A-H])\)")


def same_answer(reference: str, text: str) -> bool:
    """Whether the last answer that ``text`` states equals ``reference``, as mathematics.

    Fractions and decimals, thousands separators, units and the order of a sum make no difference. Where
    there are several boxes the last counts; without a box, the last number or formula.

    Args:
        reference: LaTeX, or a number, without a box.
    """
    from math_verify import parse, verify

    gold = parse(f"{BOX}{{{reference}}}")
    return bool(gold) and bool(verify(gold, parse(text[max(0, text.rfind(BOX)) :])))


def chosen_letter(text: str) -> str | None:
    """The option, A to H, that a text settles on: the last in a box, the last it calls the answer, the one it
    begins with, or the last that stands alone; None where there is none."""
    for pattern in (_BOXED, _STATED):
        found = pattern.findall(text)
        if found:
            return str(found[-1])
    first = _FIRST.search(text.strip())
    if first:
        return first[1].upper()
    alone = [plain or bracketed for plain, bracketed in _ALONE.findall(text)]
    return alone[-1] if alone else None


def math_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """For rows with an ``answer`` in numbers or LaTeX."""
    return {"exact_match": float(same_answer(str(doc["answer"]), results[0]))}


def choice_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """For rows whose ``answer`` is a letter."""
    return {"exact_match": float(chosen_letter(results[0]) == str(doc["answer"]).strip().upper())}


def code_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """For rows with a ``prompt``, a ``test`` and an ``entry_point``. This runs what the model wrote."""
    written = whole_function(results[0], str(doc["entry_point"]))
    # The prompt is a function's head with its docstring; a chat model writes the function anew behind it.
    program = f"{doc['prompt']}{results[0] if written is None else written}\n"
    return {"pass@1": float(runs_to_its_end(f"{program}{doc['test']}\ncheck({doc['entry_point']})\n"))}


def whole_function(text: str, name: str) -> str | None:
    """The last fenced block of code in ``text`` that defines the function ``name``; None where there is none."""
    blocks = [block for block in _FENCED.findall(text) if re.search(rf"^def {re.escape(name)}\b", block, re.MULTILINE)]
    return f"\n{blocks[-1]}" if blocks else None
