"""A report as one page that needs nothing else: no request, no script; light and dark, desk and phone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ecospec.harness.expert_plots import cost_plot, expert_plots
from ecospec.harness.plots import Plot
from ecospec.harness.report import Report
from ecospec.harness.report_facts import run_facts
from ecospec.harness.report_notes import INTERVAL, NONE, headline, notes
from ecospec.harness.report_plots import report_plots
from ecospec.harness.report_text import table_lines
from ecospec.harness.run_reading import RunData
from ecospec.harness.verdict import BAD, GOOD, OPEN, verdict_of

TEMPLATES = Path(__file__).parent / "templates"
SIGNS = {GOOD: ("✓", "holds"), OPEN: ("?", "cannot be told"), BAD: ("✗", "does not hold")}
"""What stands before a claim, and its name for those who do not see it."""
BESIDE = ("report.md", "report.csv", "report.json", "manifest.json")
"""Files of a run folder that the page links to, where they are."""


def environment() -> Environment:
    """The templates, in which every value is escaped but a plot's own element."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["inline"] = inline
    found.filters["breakable"] = breakable
    found.filters["words_kept"] = words_kept
    found.globals["signs"] = SIGNS
    found.globals["interval"] = INTERVAL
    found.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return found


def inline(svg: str, description: str) -> Markup:
    """A plot's element with a description for those who do not see it."""
    return Markup(svg).replace("<svg ", Markup('<svg class="plot" role="img" aria-label="{}" ').format(description), 1)


def breakable(text: str) -> Markup:
    """A label that a narrow column may break behind the signs within a path or a parameter, and nowhere else."""
    return Markup(re.sub(r"([/:=,])(?=\S)", r"\1<wbr>", str(escape(text))))


def words_kept(text: str) -> Markup:
    """A figure that a narrow column may break between its words only: a ratio and its interval, and not an interval."""
    return Markup(" ").join(Markup('<span class="kept">{}</span>').format(word) for word in text.split())


def report_html(run: RunData) -> str:
    """The whole page of one run."""
    report, manifest = run.report, run.manifest
    verdict = verdict_of(report, manifest, run.missing)
    depths = depth_lines(report)
    said = [*([run.unfinished] if run.missing else []), *notes(report, manifest)]
    return (
        environment()
        .get_template("report.html")
        .render(
            title=str(manifest.get("suite") or run.name),
            headline=headline(report, manifest),
            verdict=verdict,
            plots=plots_of(run, verdict.method),
            rows=report.rows,
            lines=table_lines(report),
            notes=said,
            depths=depths,
            deepest=max((len(cells) for _, cells in depths), default=0),
            facts=run_facts(manifest),
            manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
            files=BESIDE,
        )
    )


def plots_of(run: RunData, method: str | None) -> list[Plot]:
    """All that the run has figures for; nothing of a run without a finished prompt.

    Args:
        method: whose heatmap is open.
    """
    model: Mapping[str, Any] | None = run.manifest.get("cost_model")
    return [
        *report_plots(run.report),
        *([cost_plot(model)] if model else []),
        *expert_plots(run.report, run.activations, method),
    ]


def depth_lines(report: Report) -> list[tuple[str, list[str]]]:
    """By method: accepted of reached steps, by depth."""
    rows = [row for row in report.rows if row.reached_by_depth]
    deepest = max((len(row.reached_by_depth) for row in rows), default=0)
    lines = []
    for row in rows:
        accepted = [*row.accepted_by_depth, *[0] * deepest]
        cells = [f"{a} of {r}" for r, a in zip(row.reached_by_depth, accepted, strict=False)]
        lines.append((row.label, [*cells, *[NONE] * (deepest - len(cells))]))
    return lines
