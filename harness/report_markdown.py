"""A report as a Markdown page, for a run folder or a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ecospec.harness.report import Report
from ecospec.harness.report_facts import run_facts
from ecospec.harness.report_notes import INTERVAL, headline, notes
from ecospec.harness.report_text import Line, table_lines


def report_markdown(report: Report, manifest: Mapping[str, Any], more_notes: Sequence[str] = ()) -> str:
    """The whole page: what was run, the table, notes, spread over prompts, definitions.

    Args:
        manifest: keys it lacks are left out.
        more_notes: stand before the others.
    """
    suite = manifest.get("suite")
    labels = [row.label for row in report.rows]
    lines = table_lines(report)
    table = [[name, *(line.cell(row) for row in report.rows)] for name, line in zip(_names(lines), lines, strict=True)]
    spread = [
        [row.label, *(f"{x:.3f}" for x in (found.median, found.low, found.high)), str(found.prompts)]
        for row in report.rows
        if (found := row.decode_spread) is not None
    ]
    blocks = [
        f"# ecospec report{f': {_escape(suite)}' if suite else ''}",
        _escape(headline(report, manifest)),
        "## What was run",
        _bullets(f"{name}: {_escape(text)}" for name, text in run_facts(manifest)),
        "## Results",
        markdown_table(["", *labels], table),
        INTERVAL,
        "## Notes",
        _bullets(map(_escape, [*more_notes, *notes(report, manifest)])),
        "## Spread over prompts",
        "The decode-only speed-up of each prompt by itself.",
        markdown_table(["", "median", "min", "max", "prompts"], spread),
        "## How each number is defined",
        'Sums (Σ) run over the prompts that every method finished. "Mean over prompts" averages the prompts\' own '
        "values of the line above it.",
        _bullets(f"**{_escape(line.label)}**: {_escape(line.meaning)}" for line in lines if line.meaning),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _names(lines: Sequence[Line]) -> list[str]:
    """Labels that can be told apart without their indentation: a line below another takes its name as well."""
    names: list[str] = []
    above = ""
    for line in lines:
        if line.label.startswith(" "):
            names.append(f"{above}: {line.label.strip()}")
        else:
            above = line.label
            names.append(above)
    return names


def _bullets(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in (list(map(_escape, header)), rule, *(list(map(_escape, row)) for row in rows))
    )


def _escape(value: Any) -> str:
    """Text that Markdown shows as it is, also inside a table cell, and on one line."""
    text = " ".join(str(value).split())
    for special in "\\`*<|[":
        text = text.replace(special, f"\\{special}")
    return text
