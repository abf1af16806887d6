"""The files in which a run's report is left, and the same in any one format."""

from __future__ import annotations

import json

from ecospec.harness.report import report_json
from ecospec.harness.report_csv import report_csv
from ecospec.harness.report_html import report_html
from ecospec.harness.report_markdown import report_markdown
from ecospec.harness.run_reading import RunData


def write_reports(run: RunData) -> None:
    """Write ``report.json``, ``report.md``, ``report.csv`` and, last, ``report.html`` into the run folder."""
    plain = json.dumps(report_json(run.report), indent=1) + "\n"
    (run.folder / "report.json").write_text(plain, encoding="utf-8")
    (run.folder / "report.md").write_text(report_markdown(run.report, run.manifest), encoding="utf-8")
    (run.folder / "report.csv").write_text(report_csv([run]), encoding="utf-8")
    (run.folder / "report.html").write_text(report_html(run), encoding="utf-8")
