"""The files in which reports are left, and the same in any one format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ecospec.harness.pairs import pairs_json, pairs_markdown, pairs_of
from ecospec.harness.paper_tables import paper_tables
from ecospec.harness.report import report_json
from ecospec.harness.report_csv import report_csv
from ecospec.harness.report_html import report_html
from ecospec.harness.report_markdown import report_markdown
from ecospec.harness.run_folder import MANIFEST
from ecospec.harness.run_reading import RunData
from ecospec.harness.summary import summary_json, summary_markdown
from ecospec.harness.summary_html import summary_html
from ecospec.harness.writing import write_text

REPORT_PAGE, SUMMARY_PAGE = "report.html", "summary.html"


def write_reports(run: RunData) -> None:
    """Write ``report.json``, ``report.md``, ``report.csv`` and, last, ``report.html`` into the run folder."""
    for kind, name in (("json", "report.json"), ("markdown", "report.md"), ("csv", "report.csv")):
        write_text(run.folder / name, rendered(run.folder, [run], kind))
    write_text(run.folder / REPORT_PAGE, report_html(run))


def write_summaries(folder: Path, runs: Sequence[RunData]) -> None:
    """Write ``summary.json``, ``summary.md`` and ``summary.html`` into the folder of several runs."""
    for kind, name in (("json", "summary.json"), ("markdown", "summary.md")):
        write_text(folder / name, rendered(folder, runs, kind))
    write_text(folder / SUMMARY_PAGE, summary_html(runs, folder.resolve().name, averaged(runs), folder))


def rendered(folder: Path, runs: Sequence[RunData], kind: str) -> str:
    """One run's report, or the summary over several, as text.

    Args:
        folder: that was asked for.
        kind: markdown, csv, json or paper.
    """
    if kind == "csv":
        return report_csv(runs)
    if kind == "paper":
        return paper_tables(runs)
    one = is_run(folder)
    reports = {run.name: run.report for run in runs}
    if kind == "json":
        plain = report_json(runs[0].report) if one else summary_json(reports, averaged(runs))
        if not one and averaged(runs):
            plain["pairs"] = pairs_json(pairs_of(runs))
        return json.dumps(plain, indent=1) + "\n"
    if one:
        return report_markdown(runs[0].report, runs[0].manifest, [run.unfinished for run in runs if run.missing])
    lines = [f"{run.name}: {run.unfinished}" for run in runs if run.missing]
    pairs = pairs_of(runs) if averaged(runs) else []
    blocks = [pairs_markdown(pairs).rstrip()] if pairs else []
    return "\n\n".join([summary_markdown(reports, averaged(runs)).rstrip(), *blocks, *lines]) + "\n"


def write_page(folder: Path, runs: Sequence[RunData], output: Path | None) -> Path:
    """Write one run's page, or that over several, and the pages of those that lack theirs; gives the file."""
    if is_run(folder):
        path = output or folder / REPORT_PAGE
        write_text(path, report_html(runs[0]))
        return path
    for run in runs:
        if not (run.folder / REPORT_PAGE).is_file():
            write_text(run.folder / REPORT_PAGE, report_html(run))
    path = output or folder / SUMMARY_PAGE
    write_text(path, summary_html(runs, folder.resolve().name, averaged(runs), path.parent))
    return path


def is_run(folder: Path) -> bool:
    """Whether a folder is one run's, and not that of several."""
    return (folder / MANIFEST).is_file()


def averaged(runs: Sequence[RunData]) -> bool:
    """Whether runs differ in nothing but their suite, so that a mean over them says something."""
    suites = {run.manifest["suite"] for run in runs}
    others = {tuple(run.manifest[key] for key in ("target", "temperature", "batch_size", "budget")) for run in runs}
    return len(suites) == len(runs) and len(others) == 1
