"""Methods against each other over several runs: decode-only speed, over all prompts of all runs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from ecospec.harness.fitted_tables import Column, Kind, fitted_tables
from ecospec.harness.records import AR, PromptRecord, read_records
from ecospec.harness.report_markdown import markdown_table
from ecospec.harness.report_notes import INTERVAL, NONE
from ecospec.harness.report_text import ratio_cell
from ecospec.harness.run_folder import RECORDS, finished_prompts
from ecospec.harness.run_reading import RunData
from ecospec.harness.speedups import decode_seconds, decode_tokens, speedup_of
from ecospec.harness.stats import Ratio

TITLE = "Decode-only speed over another method, all prompts together"
MEANING = (
    "(Σ seconds / Σ tokens of the other) / (the same of the method), over the prompts of all runs, with its interval"
)


@dataclass(frozen=True)
class Pair:
    """A method over another one that stands before it in the reports."""

    method: str
    over: str
    ratio: Ratio


def pairs_of(runs: Sequence[RunData]) -> list[Pair]:
    """Every method that has a speed-up over every one before it, plain decoding first.

    Only the prompts that all methods of a run finished, and the methods that all runs have.
    """
    if not all((run.folder / RECORDS).is_file() for run in runs):
        return []  # begun, and killed before the first prompt
    records = {run.name: read_records(run.folder / RECORDS) for run in runs}
    ahead = {label for run in runs for label in run.manifest["true_routing"]}
    common = [
        label
        for label in runs[0].manifest["methods"]
        if label not in ahead and all(label in run.manifest["methods"] for run in runs)
    ]
    columns = {label: _column(runs, records, label) for label in common}
    return [
        Pair(method, over, speedup_of(columns[over], columns[method], decode_seconds, decode_tokens))
        for at, method in enumerate(common)
        for over in common[:at]
    ]


def _column(runs: Sequence[RunData], records: dict[str, list[PromptRecord]], label: str) -> list[PromptRecord]:
    """One method's records in all runs, in the order of prompts; ids tell the runs apart."""
    found = []
    for run in runs:
        finished = finished_prompts(records[run.name], run.manifest["methods"])
        own = {each.prompt_id: each for each in records[run.name] if each.method == label}
        found += [
            replace(
                own[name], prompt_id=f"{run.name}/{name}", batch=own[name].batch and f"{run.name}/{own[name].batch}"
            )
            for name in sorted(finished)
        ]
    return found


def pair_rows(pairs: Sequence[Pair]) -> tuple[list[str], list[list[str]]]:
    """Heading and cells: a line a method, a column for each that it is compared with."""
    header, rows = _pair_cells(pairs)
    return header, [[method, *(" ".join(cell) for cell in cells)] for method, cells in rows]


def _pair_cells(pairs: Sequence[Pair]) -> tuple[list[str], list[tuple[str, list[tuple[str, ...]]]]]:
    others = list(dict.fromkeys(pair.over for pair in pairs))
    cells = {(pair.method, pair.over): ratio_cell(pair.ratio) for pair in pairs}
    methods = [method for method in dict.fromkeys(pair.method for pair in pairs) if method != AR]
    rows = [(method, [cells.get((method, over), (NONE,)) for over in others]) for method in methods]
    return ["", *others], rows


def pairs_tables(pairs: Sequence[Pair], width: int) -> list[Table]:
    """For the terminal."""
    header, rows = _pair_cells(pairs)
    columns = [Column(head, Kind.FIGURE if index else Kind.NAME) for index, head in enumerate(header)]
    return fitted_tables(TITLE, columns, [[method, *cells] for method, cells in rows], width)


def pairs_markdown(pairs: Sequence[Pair]) -> str:
    """The same for a page."""
    return f"## {TITLE}\n\n{MEANING}. {INTERVAL}\n\n{markdown_table(*pair_rows(pairs))}\n"


def pairs_json(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [asdict(pair) for pair in pairs]
