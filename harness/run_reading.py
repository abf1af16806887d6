"""A run folder read back, finished or not: its manifest, its records and the report that they amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.activations import ACTIVATIONS, Activations, total_activations
from ecospec.harness.records import PromptRecord, read_records
from ecospec.harness.report import MethodInfo, Report, summarise
from ecospec.harness.run_folder import MANIFEST, RECORDS, finished_prompts, named_runs, read_manifest


@dataclass(frozen=True)
class RunData:
    """What a report in any format is made of.

    Attributes:
        name: the run folder's name, or that of a run in a folder of several.
        activations: by method, over the prompts that all methods finished; empty of a dense target.
        missing: prompts that are not finished; above 0 in a run that was interrupted or is going on.
    """

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    report: Report
    activations: Mapping[str, Activations]
    missing: int = 0

    @property
    def unfinished(self) -> str:
        """What is to be said of an unfinished run; empty for a finished one."""
        if not self.missing:
            return ""
        total = self.report.prompts + self.missing
        return f"interrupted: {self.report.prompts} of {total} prompts are finished, and only these are counted"


def report_of(records: Sequence[PromptRecord], manifest: Mapping[str, Any]) -> Report:
    """The report that records amount to, under the run's manifest."""
    geometry = manifest["geometry"]
    return summarise(
        records,
        moe_layers=geometry["moe_layers"],
        top_k=geometry["top_k"],
        expert_bytes=geometry["expert_bytes"],
        always_read_bytes=geometry["always_read_bytes"],
        methods=[MethodInfo(label, label in manifest["true_routing"]) for label in manifest["methods"]],
        check=manifest["check"],
        baseline=manifest["methods"][1],
        copy_bytes_per_second=manifest["copy_bytes_per_second"],
    )


def run_data(
    folder: Path, manifest: Mapping[str, Any], records: Sequence[PromptRecord], report: Report, name: str = ""
) -> RunData:
    """What a run left, with the sums of its activations."""
    finished = finished_prompts(records, manifest["methods"])
    activations = total_activations(folder / ACTIVATIONS, manifest["methods"], finished)
    missing = manifest["outputs"] - len(finished)
    return RunData(name or folder.resolve().name, folder, manifest, report, activations, missing)


def read_run(folder: Path, name: str = "") -> RunData:
    """A run folder, of a finished run or of an interrupted one.

    Raises:
        UserError: it is none, is damaged, or is of another version.
    """
    manifest = read_manifest(folder / MANIFEST, option="report", whole=True)
    path = folder / RECORDS
    records = read_records(path) if path.exists() else []
    try:
        return run_data(folder, manifest, records, report_of(records, manifest), name)
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"report: {folder / MANIFEST} is not a manifest of this version ({error!r})") from error


def read_runs(folder: Path) -> list[RunData]:
    """A run folder, or all run folders in a folder of several or of a sweep, as they were asked for or begun.

    Raises:
        UserError: there is no run in it; see `read_run`.
    """
    if (folder / MANIFEST).is_file():
        return [read_run(folder)]
    if not folder.is_dir():
        raise UserError(f"report: {folder} is no folder; expected that of a run, of several runs or of a sweep")
    runs = [read_run(path, path.name) for path in sorted(folder.iterdir()) if (path / MANIFEST).is_file()]
    if not runs:
        raise UserError(f"report: {folder} holds no run (no manifest.json in it or in a folder of it)")
    asked = named_runs(folder)
    return sorted(runs, key=lambda run: (_place(run.name, asked), str(run.manifest.get("started", ""))))


def not_begun(folder: Path, runs: Sequence[RunData]) -> list[str]:
    """The runs that were asked for into a folder of several and of which nothing is there yet."""
    there = {run.name for run in runs}
    return [] if (folder / MANIFEST).is_file() else [name for name in named_runs(folder) if name not in there]


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)
