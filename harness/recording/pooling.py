"""Several recordings read as one: those of several suites, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.recording.folder import MANIFEST, Recording, open_recording

SHARED = (
    *("target", "widened", "target_sha256", "target_facts", "geometry", "dtype"),
    *("drafter_spec", "drafter_sha256", "drafter_facts", "draft_steps", "draft_topk"),
    *("chat_template", "chat_template_sha256", "chat_switches", "system_prompt", "eos"),
    *("temperature", "top_p", "top_k", "seed", "max_new_tokens"),
    *("predictors", "predictor_sha256", "estimators", "estimators_sha256"),
)
"""Facts of the manifest that recordings must agree in for one table to be about all of them."""


def folders_in(folder: Path) -> list[Path]:
    """The recordings at a path: the folder itself, or all that are directly in it, by name."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return found or [folder]


def open_recordings(folders: Sequence[Path]) -> tuple[Recording, ...]:
    """Open recordings that are to be replayed together.

    Raises:
        UserError: one cannot be opened; or they differ in what decides a replay, or hold one request twice.
    """
    recordings = tuple(open_recording(each) for folder in folders for each in folders_in(folder))
    first = recordings[0]
    owners: dict[str, Path] = {}
    for each in recordings:
        different = _difference(first.manifest, each.manifest)
        if different is not None:
            raise UserError(
                f"{each.folder} was recorded with {different} = {each.manifest.get(different)!r}, {first.folder} with "
                f"{first.manifest.get(different)!r}; expected recordings that differ in their suites alone"
            )
        for entry in each.entries:
            if entry.id in owners:
                raise UserError(
                    f"request {entry.id} is in {owners[entry.id]} and in {each.folder}; expected each request once"
                )
            owners[entry.id] = each.folder
    return recordings


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    return next((name for name in SHARED if one.get(name) != other.get(name)), None)
