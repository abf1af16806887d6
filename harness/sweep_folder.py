"""A sweep's folder: a run folder for each run, and which cells are done in them.

A point of the grid has one run folder, ``gsm8k-t0-b1-g4``, and ``gsm8k-t0-b1-g4-2`` and so on for methods that the
grid got later. A run there counts for the sweep only if all options and files that decide its figures are today's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.grid import Point
from ecospec.harness.records import read_records
from ecospec.harness.report import Report
from ecospec.harness.report_reading import read_report
from ecospec.harness.run_folder import (
    MANIFEST,
    RECORDS,
    RESUME_KEYS,
    discard_but_for,
    finished_prompts,
    first_difference,
    read_manifest,
)
from ecospec.harness.writing import is_unused

SWEEP_JSON, SWEEP_PAGE = "sweep.json", "sweep.md"
OF_METHODS = ("policy", "predictor", "methods", "predictor_sha256")
SHARED_KEYS = [key for key in RESUME_KEYS if key not in OF_METHODS]
"""What all runs of a point must share; their methods can differ."""


@dataclass(frozen=True)
class FoundRun:
    """A run folder of an earlier call, finished or not.

    Attributes:
        labels: each method's label in the run, by the `Cell.key` of the method.
        predictor_sha256: hashes of the predictors' folders, by the same keys.
    """

    point: Point
    folder: Path
    manifest: dict[str, Any]
    labels: dict[tuple[str, str | None], str]
    predictor_sha256: dict[tuple[str, str | None], str | None]

    @property
    def number(self) -> int:
        """The how manieth of its point it is."""
        return folder_number(self.point, self.folder.name) or 0


@dataclass(frozen=True)
class FinishedRun:
    """A run with its report."""

    found: FoundRun
    report: Report


def check_sweep_folder(parent: Path) -> None:
    """Check that a folder is new, empty, or an earlier sweep's; nothing is written.

    Raises:
        UserError: it is something else.
    """
    try:
        used = parent.exists() and not (parent.is_dir() and is_unused(parent))
    except OSError as error:
        raise UserError(f"--output {parent}: cannot be made ({error.strerror})") from error
    if used and not (parent / SWEEP_JSON).is_file():
        raise UserError(f"--output {parent}: not an empty folder; expected a new one, or the folder of a sweep")


def found_runs(parent: Path, point: Point) -> list[FoundRun]:
    """The run folders of a point, in the order in which they were made; empty ones are none.

    Raises:
        UserError: a folder that is no run's, or a damaged manifest.
    """
    paths = [path for path in parent.iterdir() if not _is_empty(path)] if parent.is_dir() else []
    numbered = {number: path for path in paths if (number := folder_number(point, path.name)) is not None}
    return [found_run(point, folder) for _, folder in sorted(numbered.items())]


def folder_number(point: Point, name: str) -> int | None:
    """The how manieth run folder of a point has a name; None where it is none of the point's."""
    match = re.fullmatch(re.escape(point.name) + r"(?:-(\d+))?", name)
    return int(match[1] or 1) if match else None


def _is_empty(path: Path) -> bool:
    return path.is_dir() and is_unused(path)


def found_run(point: Point, folder: Path) -> FoundRun:
    """A run folder and the methods in it.

    Raises:
        UserError: see `found_runs`.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"--output {folder.parent}: {folder.name} in it is no run folder; give another --output")
    manifest = read_manifest(folder / MANIFEST, option=f"--output {folder.parent}")
    try:
        parts = {(each["policy"], each["predictor"]): each for each in manifest["method_parts"]}
        labels = {key: str(each["label"]) for key, each in parts.items()}
        hashes = {key: each["predictor_sha256"] for key, each in parts.items()}
        asked = [*manifest["policy"], *manifest["predictor"]]
        if not all(isinstance(spec, str) for spec in asked):
            raise TypeError("a policy or predictor is no text")
    except (KeyError, TypeError) as error:
        raise UserError(
            f"--output {folder.parent}: {folder / MANIFEST} is not of this version ({error}); give another --output"
        ) from error
    return FoundRun(point, folder, manifest, labels, hashes)


def refuse_others(
    found: Sequence[FoundRun],
    identity: Mapping[str, Any],
    predictor_sha256: Mapping[tuple[str, str | None], str | None],
) -> None:
    """Refuse runs whose figures could not stand beside those of today's options.

    Args:
        identity: today's `Bench.identity`.
        predictor_sha256: today's hashes, by the `Cell.key` of the method.

    Raises:
        UserError: naming the first difference.
    """
    now = json.loads(json.dumps(dict(identity)))  # what a manifest keeps of it
    for run in found:
        difference = first_difference(run.manifest, now, SHARED_KEYS)
        for key, sha256 in predictor_sha256.items():
            if difference is None and key in run.labels and run.predictor_sha256[key] != sha256:
                difference = f"predictor_sha256 of {key[1]} = {run.predictor_sha256[key]!r}, now it is {sha256!r}"
        if difference is not None:
            raise UserError(
                f"--output {run.folder.parent}: {run.folder.name} was run with {difference}; expected the same "
                "options, or another --output"
            )


def finished_run(found: FoundRun, prompt_ids: Collection[str]) -> FinishedRun | None:
    """The run with its report; None where it was stopped before every prompt was finished and the report written.

    Raises:
        UserError: damaged records.
    """
    report, records = read_report(found.folder / "report.json"), found.folder / RECORDS
    if report is None or not records.is_file() or not set(found.labels.values()) <= {row.label for row in report.rows}:
        return None
    done = finished_prompts(read_records(records), found.manifest["methods"])
    return FinishedRun(found, report) if set(prompt_ids) <= done else None


def new_run_folder(parent: Path, point: Point, taken: Collection[Path]) -> Path:
    """The first folder of a point that is neither there nor taken."""
    number, folder = 1, parent / point.name
    while folder in taken or (folder.exists() and not _is_empty(folder)):
        number += 1
        folder = parent / f"{point.name}-{number}"
    return folder


def discard_sweep(parent: Path) -> None:
    """Remove the folder of a sweep in which no run folder is left; others stay as they are."""
    discard_but_for(parent, (SWEEP_JSON, SWEEP_PAGE))
