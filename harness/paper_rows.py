"""The methods of finished runs with what was run, for tables over several runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecospec.harness.records import AR
from ecospec.harness.report import MethodRow
from ecospec.harness.run_reading import RunData

OF_THE_TARGET = {
    "drafter": "drafter {}",
    "widened": "experts widened ×{}",
    "chat_template": "chat template {}",
    "dtype": "{}",
    "device": "{}",
    "device_name": "{}",
}
"""What runs of another target often differ in as well."""
OTHERS = {
    "draft_steps": "{} draft steps",
    "draft_topk": "draft top-{}",
    "top_p": "top-p {}",
    "top_k": "top-k {}",
    "seed": "seed {}",
    "threads": "{} threads",
}
"""What is said only where runs differ in it; so is `OF_THE_TARGET`."""


@dataclass(frozen=True)
class Setting:
    """What the runs of one table share, but for the axis that is its columns.

    Attributes:
        of_target, others: of `OF_THE_TARGET` and `OTHERS`, what the runs differ in, in words.
    """

    target: str
    temperature: float
    batch_size: int
    budget: int
    max_new_tokens: int
    limit: int | None
    acceptance: str | None
    of_target: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def words(self, *left_out: str) -> str:
        """As in a table's title."""
        parts = {
            "target": self.target,
            "temperature": f"T = {self.temperature:g}",
            "budget": f"γ = {self.budget}",
            "max_new_tokens": f"at most {self.max_new_tokens} tokens",
            "limit": "" if self.limit is None else f"{self.limit} problems",
            "acceptance": f"acceptance {self.acceptance}" if self.acceptance else "",
            "batch_size": f"batches of {self.batch_size}" if self.batch_size > 1 else "",
            "of_target": ", ".join(self.of_target),
            "others": ", ".join(self.others),
        }
        return ", ".join(text for key, text in parts.items() if text and key not in left_out)


@dataclass(frozen=True)
class PaperRow:
    """One method of one run, under its full name."""

    setting: Setting
    suite: str
    method: str
    predictor: str | None
    row: MethodRow


def paper_rows(runs: Sequence[RunData]) -> tuple[list[PaperRow], list[str]]:
    """Every method of every suite and setting once, and a line for what is left out.

    Of two runs with the same method, suite and setting, the earlier one's figures stand.
    """
    parts = [{each["label"]: each for each in run.manifest["method_parts"]} for run in runs]
    several = _targets_with_several_predictors(runs, parts)
    differing = {key for key in (*OF_THE_TARGET, *OTHERS) if len({str(run.manifest.get(key)) for run in runs}) > 1}
    rows: dict[tuple[Setting, str, str], PaperRow] = {}
    owners: dict[tuple[Setting, str, str], str] = {}
    left_out: dict[tuple[str, str], list[str]] = {}
    for run, found in zip(runs, parts, strict=True):
        setting, suite = _setting(run.manifest, differing), run.manifest["suite"]
        for row in run.report.rows:
            made_of: Mapping[str, Any] = found.get(row.label, {"policy": row.label, "predictor": None})
            predictor = made_of["predictor"]
            named = predictor and setting.target in several
            name = f"{made_of['policy']} with {predictor}" if named else str(made_of["policy"])
            key = (setting, suite, name)
            if key in rows:
                left_out.setdefault((run.name, owners[key]), []).append(name)
                continue
            rows[key] = PaperRow(setting, suite, name, predictor, row)
            owners[key] = run.name
    said = [
        f"{run}: {', '.join(names)} stand above as they are in {owner}, which has the same suite and setting"
        for (run, owner), names in left_out.items()
    ]
    return list(rows.values()), said


def methods_of(rows: Iterable[PaperRow]) -> list[str]:
    """Plain decoding first, the others as they come."""
    return sorted(dict.fromkeys(each.method for each in rows), key=lambda name: name != AR)


def _targets_with_several_predictors(
    runs: Sequence[RunData], parts: Sequence[Mapping[str, Mapping[str, Any]]]
) -> set[str]:
    # By target: another target has another predictor, and the methods of both have to stand in one line.
    found: dict[str, set[str]] = {}
    for run, methods in zip(runs, parts, strict=True):
        used = {each["predictor"] for each in methods.values()} - {None}
        found.setdefault(str(run.manifest["target"]), set()).update(used)
    return {target for target, predictors in found.items() if len(predictors) > 1}


def _setting(manifest: Mapping[str, Any], differing: set[str]) -> Setting:
    def words(keys: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(text.format(manifest.get(key)) for key, text in keys.items() if key in differing)

    return Setting(
        target=str(manifest["target"]),
        temperature=manifest["temperature"],
        batch_size=manifest["batch_size"],
        budget=manifest["budget"],
        max_new_tokens=manifest["max_new_tokens"],
        limit=manifest.get("limit"),
        acceptance=manifest["acceptance"] if manifest.get("estimated") else None,
        of_target=words(OF_THE_TARGET),
        others=words(OTHERS),
    )
