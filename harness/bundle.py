"""Packing a trained target, drafter and predictor into one folder, with a card made from their records."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.card import card
from ecospec.harness.config import RunConfig
from ecospec.predictors.acceptance import folder as acceptance_folder

TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
HEAD_FILES = ("config.json", "model.safetensors")
ACCEPTANCE_FILES = (acceptance_folder.FACTS, acceptance_folder.WEIGHTS, acceptance_folder.CARD)
RECORD, FACTS, CARD, TABLE = "training.json", "bundle.json", "CARD.md", "token-frequency"
PROBLEMS, ANSWER_TOKENS, TREES = 4, 48, 8
"""What accuracies are measured on: so many problems of each suite, so many tokens of each answer, so many decoded."""
TOLERANCE = 0.01
"""How far an accuracy on another machine may be from the recorded one; of a cost, its share."""


def write_bundle(
    target: Path,
    drafter: Path,
    predictors: Sequence[Path],
    output: Path,
    *,
    widen: int,
    report: Path | None,
    acceptance: Path | None = None,
) -> None:
    """Copy the parts to ``output``, measure the predictors there, and write ``bundle.json`` and ``CARD.md``.

    Args:
        predictors: trainings of different kinds; the token-frequency table is that of the first.
        widen: the factor by which the target's experts are to be widened at load.
        report: ``report.json`` of a run with these parts, for the card's acceptance lengths.
        acceptance: folder of estimators that were fitted to this target and drafter.

    Raises:
        UserError: a part lacks a file, or two predictors are of one kind.
    """
    seen = None if report is None else measured(report)
    kinds = {folder: _kind(folder) for folder in predictors}
    if len(set(kinds.values())) < len(predictors):
        raise UserError(
            f"{len(predictors)} trained predictors of kinds {', '.join(kinds.values())}; expected one of each"
        )
    plan = [(target / name, output / "target" / name) for name in TARGET_FILES]
    plan += [(drafter / name, output / "drafter" / name) for name in HEAD_FILES]
    parts = [*kinds.items(), (predictors[0], TABLE)]
    for folder, kind in parts:
        plan += [(folder / kind / name, output / "predictor" / kind / name) for name in HEAD_FILES]
    if acceptance is not None:
        own = [
            *ACCEPTANCE_FILES,
            *([acceptance_folder.PLOT] if (acceptance / acceptance_folder.PLOT).is_file() else []),
        ]
        plan += [(acceptance / name, output / "predictor" / "acceptance" / name) for name in own]
    missing = [source for source, _ in plan if not source.is_file()]
    missing += [part / RECORD for part in (target, drafter) if not (part / RECORD).is_file()]
    if missing:
        raise UserError(f"no file {missing[0]}; expected the output folders of the train commands")
    if widen < 1:
        raise UserError(f"--widen {widen}: expected an integer of at least 1")
    facts: dict[str, Any] = {
        "widen": widen,
        "sha256": {path.relative_to(output).as_posix(): sha256(source) for source, path in plan},
        "bytes": sum(source.stat().st_size for source, _ in plan),
        "training": {
            "target": _read(target / RECORD),
            "drafter": _read(drafter / RECORD),
            **{f"predictor {kind}": _read(folder / RECORD) for folder, kind in kinds.items()},
        },
        "acceptance": None if acceptance is None else judged(acceptance),
        "measured": seen,
        "accuracy": None,
    }
    try:
        card(facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"a {RECORD} is not what a train command writes (it lacks {error})") from error
    try:
        for source, destination in plan:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from error
    facts["accuracy"] = measured_accuracy(output, [*kinds.values(), TABLE])
    (output / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (output / CARD).write_text(card(facts), encoding="utf-8")


def judged(folder: Path) -> dict[str, Any]:
    """Scores of fitted estimators on the prompts that were held out, by temperature and estimator.

    Raises:
        UserError: it is no folder of fitted estimators.
    """
    facts = _read(folder / acceptance_folder.FACTS)
    try:
        return {
            temperature: {
                name: {score: each[score] for score in ("brier", "log_loss", "calibration_error")}
                for name, each in found.items()
                if isinstance(each, Mapping)
            }
            for temperature, found in facts["judged"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / acceptance_folder.FACTS}: not what was fitted (it lacks {error})") from error


def measured_accuracy(folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """How often a bundle's predictors are right: `evaluate` on what its target answers to the embedded samples.

    A few problems of every suite; the same on every machine, up to float noise in the target's choices.
    """
    from ecospec.harness.evaluating import evaluate
    from ecospec.harness.tracing import Tracer
    from ecospec.suites import SUITES

    config = RunConfig(
        suite="",
        policy=("marginal-cost",),
        predictor=tuple(f"{kind}:path={folder / 'predictor' / kind}" for kind in kinds),
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        data="embedded",
        limit=PROBLEMS,
        max_new_tokens=ANSWER_TOKENS,
        batch_size=PROBLEMS,
        device="cpu",
    )
    with TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace"
        Tracer(config, list(SUITES), None).collect(trace, lambda text: None)
        found = evaluate(config, [trace], None, TREES).as_json()
    return dict(zip(kinds, found.values(), strict=True))


def check_card(folder: Path) -> list[str]:
    """Make a bundle's card anew and compare: the page with its facts, and their accuracies with measured ones.

    Returns:
        What does not agree, a line each.

    Raises:
        UserError: there is no bundle.
    """
    facts = _read(folder / FACTS)
    try:
        page = card(facts)
        files, recorded = facts["sha256"], facts["accuracy"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FACTS}: not that of a bundle (it lacks {error})") from error
    try:
        wrong = [f"{name}: its hash is not the recorded one" for name in files if sha256(folder / name) != files[name]]
        if (folder / CARD).read_text(encoding="utf-8") != page:
            wrong.append(f"{CARD}: it is not the page of {FACTS}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: not a whole bundle ({error})") from error
    before, now = dict(_figures(recorded)), dict(_figures(measured_accuracy(folder, list(recorded))))
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name, math.nan), now.get(name, math.nan)
        allowed = TOLERANCE * max(1.0, abs(a))
        if not abs(a - b) <= allowed:
            wrong.append(f"{name}: recorded {a:.4f}, measured {b:.4f}")
    return wrong


def _figures(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested values, by their place."""
    if isinstance(found, Mapping | list):
        for key, value in found.items() if isinstance(found, Mapping) else enumerate(found):
            yield from _figures(value, f"{name}.{key}".lstrip("."))
    elif "tokens" not in name and "nodes" not in name:
        yield name, float(found)


def _kind(folder: Path) -> str:
    """What kind of predictor a training made."""
    record = _read(folder / RECORD)
    try:
        return str(record["shape"]["kind"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / RECORD}: not that of a predictor's training (it lacks {error})") from error


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> Any:
    """A JSON file.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from error


def measured(path: Path) -> list[dict[str, Any]]:
    """Acceptance length and active experts per method from a run's ``report.json``.

    Raises:
        UserError: it is not a run's report.
    """
    report = _read(path)
    try:
        return _rows(report)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not a run's report.json (it lacks {error})") from error


def _rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"method": row["label"], "alpha": row["acceptance_length"], "active_experts": row["active_experts"]}
        for row in report["rows"]
    ]
