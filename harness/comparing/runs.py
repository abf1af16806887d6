"""What a comparison needs of a run, from its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.records import PromptRecord, read_records
from ecospec.harness.run_folder import MANIFEST, RECORDS, finished_prompts, named_runs, read_manifest

REPORT = "report.json"


@dataclass(frozen=True)
class Method:
    """A column of the run.

    Attributes:
        true_routing: it looks at the target's true routing, and so its times mean nothing.
        policy, predictor: their specs; None for plain decoding, and for a policy that needs no predictor.
        predictor_sha256: of the predictor's folder; None where it has none of its own.
    """

    label: str
    true_routing: bool
    policy: str | None = None
    predictor: str | None = None
    predictor_sha256: str | None = None


@dataclass(frozen=True)
class Output:
    """One prompt by one method: `PromptRecord` without texts.

    Attributes:
        tokens: hash of the emitted token ids.
        length: how many they are.
        prefill_seconds, decode_seconds: None in a saved baseline.
    """

    prompt_id: str
    method: str
    tokens: str
    length: int
    reason: str
    steps: int
    emitted: int
    selected: int
    expert_pairs: float
    whole_steps: float
    overlap: float | None
    verdict: str
    score: float | None
    batch: str
    prefill_seconds: float | None = None
    decode_seconds: float | None = None

    @property
    def unit(self) -> str:
        """What an interval resamples: the batch, or the prompt by itself."""
        return self.batch or self.prompt_id


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        name: its folder's within a run of several; the suite's where it stands alone.
        facts: its manifest, or what a saved baseline keeps of it.
        outputs: by method, then by prompt.
    """

    name: str
    facts: Mapping[str, Any]
    moe_layers: int
    methods: tuple[Method, ...]
    outputs: Mapping[str, Mapping[str, Output]]

    @property
    def timed(self) -> bool:
        """Whether it holds times."""
        return any(output.decode_seconds is not None for found in self.outputs.values() for output in found.values())


def tokens_hash(tokens: Sequence[int]) -> str:
    """A short SHA-256 of token ids."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def output_of(record: PromptRecord) -> Output:
    """A record as it is compared."""
    return Output(
        prompt_id=record.prompt_id,
        method=record.method,
        tokens=tokens_hash(record.tokens),
        length=len(record.tokens),
        reason=record.reason,
        steps=record.steps,
        emitted=record.emitted,
        selected=record.selected,
        expert_pairs=record.expert_pairs,
        whole_steps=record.whole_steps,
        overlap=record.predicted_overlap,
        verdict=record.verdict,
        score=record.score,
        batch=record.batch,
        prefill_seconds=record.prefill_seconds,
        decode_seconds=record.decode_seconds,
    )


def by_method(outputs: Sequence[Output]) -> dict[str, dict[str, Output]]:
    """Outputs by method and prompt; of two of the same the later counts."""
    found: dict[str, dict[str, Output]] = {}
    for output in outputs:
        found.setdefault(output.method, {})[output.prompt_id] = output
    return found


def read_run_folders(folder: Path) -> list[Run]:
    """The run in a folder, or the runs of several suites, batch sizes or of a sweep.

    Raises:
        UserError: there is none, one is not finished, or one is damaged.
    """
    if (folder / MANIFEST).is_file():
        return [_read_run(folder, None, folder)]
    together = named_runs(folder)
    names = together or sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if not names:
        raise UserError(f"{folder} holds no run (no manifest.json); expected a run folder, or a file of --save")
    return [_read_run(folder / name, name, folder if together else folder / name) for name in names]


def _read_run(folder: Path, name: str | None, asked: Path) -> Run:
    """One run; ``asked`` is the folder of the command that it is of."""
    unfinished_error = UserError(f"{folder} is not finished; expected ecospec-bench --resume {asked} first")
    if folder != asked and not (folder / MANIFEST).is_file():  # not begun yet
        raise unfinished_error
    manifest = read_manifest(folder / MANIFEST, option="compare")
    records_path, report_path = folder / RECORDS, folder / REPORT
    if not records_path.is_file() or not report_path.is_file():
        raise unfinished_error
    records = read_records(records_path)
    try:
        report = json.loads(report_path.read_text(encoding="utf-8"))
        true_routing = {str(row["label"]): bool(row["true_routing"]) for row in report["rows"]}
        reported = int(report["prompts"])
        parts = {str(each["label"]): each for each in manifest["method_parts"]}
        methods = tuple(
            Method(
                label,
                true_routing[label],
                *(parts.get(label, {}).get(key) for key in ("policy", "predictor", "predictor_sha256")),
            )
            for label in manifest["methods"]
        )
        layers = int(manifest["geometry"]["moe_layers"])
        suite = str(manifest["suite"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder}: not a run of this version ({type(error).__name__}: {error})") from error
    labels = [method.label for method in methods]
    unfinished = {record.prompt_id for record in records} - finished_prompts(records, labels)
    # A report is of all prompts; one from before the run was gone on with says another number.
    if unfinished or not records or len({record.prompt_id for record in records}) != reported:
        raise unfinished_error
    outputs = by_method([output_of(record) for record in records if record.method in labels])
    return Run(name or suite, manifest, layers, methods, outputs)
