"""Packing a trained target, drafter and predictor into one folder, with a card made from their records."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecospec.errors import UserError

TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
HEAD_FILES = ("config.json", "model.safetensors")
RECORD = "training.json"


def write_bundle(
    target: Path, drafter: Path, predictor: Path, output: Path, *, widen: int, report: Path | None
) -> None:
    """Copy the three parts to ``output`` and write ``bundle.json`` and ``CARD.md``.

    Args:
        widen: the factor by which the target's experts are to be widened at load.
        report: ``report.json`` of a run with these parts, for the card's acceptance lengths.

    Raises:
        UserError: a part lacks a file.
    """
    plan = [(target / name, output / "target" / name) for name in TARGET_FILES]
    plan += [(drafter / name, output / "drafter" / name) for name in HEAD_FILES]
    for kind in ("learned", "token-frequency"):
        plan += [(predictor / kind / name, output / "predictor" / kind / name) for name in HEAD_FILES]
    missing = [source for source, _ in plan if not source.is_file()]
    missing += [part / RECORD for part in (target, drafter, predictor) if not (part / RECORD).is_file()]
    if missing:
        raise UserError(f"no file {missing[0]}; expected the output folders of the three train commands")
    if widen < 1:
        raise UserError(f"--widen {widen}: expected an integer of at least 1")
    facts: dict[str, Any] = {
        "widen": widen,
        "sha256": {path.relative_to(output).as_posix(): sha256(source) for source, path in plan},
        "bytes": sum(source.stat().st_size for source, _ in plan),
        "training": {
            part: _read(folder / RECORD)
            for part, folder in (("target", target), ("drafter", drafter), ("predictor", predictor))
        },
        "measured": None if report is None else measured(report),
    }
    try:
        text = card(facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"a {RECORD} is not what a train command writes (it lacks {error})") from error
    try:
        for source, destination in plan:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from error
    (output / "bundle.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (output / "CARD.md").write_text(text, encoding="utf-8")


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
    except (OSError, ValueError) as error:
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


UNSAID = ("step", "start")
"""What a card does not repeat, or must not: a folder of the machine it was made on."""

# Licence and origin of the corpus's sources, for the card.
SOURCES = {
    "gsm8k-train": ("MIT", "openai/grade-school-math, train split"),
    "math-test": ("MIT", "hendrycks/math, test split without MATH-500"),
    "aqua-test": ("Apache-2.0", "google-deepmind/AQuA, test split"),
    "svamp": ("MIT", "SVAMP"),
    "mbpp": ("CC-BY-4.0", "google-research MBPP"),
    "cpython-3.11": ("PSF-2.0", "Python 3.11 standard library"),
    "mmlu-stem": ("MIT", "hendrycks/test MMLU, STEM questions"),
    "openbookqa-train": ("Apache-2.0", "OpenBookQA, train split"),
    "self-instruct": ("Apache-2.0", "yizhongw/self-instruct, seed and user-oriented tasks"),
    "oasst-en100": ("Apache-2.0", "LAION-AI/Open-Assistant, en_100_tree"),
    "oasst-seed": ("Apache-2.0", "LAION-AI/Open-Assistant, seed data"),
    "t0-qasc": ("CC-BY-4.0", "QASC, Allen Institute for AI"),
    "t0-quartz": ("CC-BY-4.0", "QuaRTz, Allen Institute for AI"),
    "t0-ropes": ("CC-BY-4.0", "ROPES, Allen Institute for AI"),
    "t0-quoref": ("CC-BY-4.0", "Quoref, Allen Institute for AI"),
    "t0-commongen": ("MIT", "CommonGen"),
    "t0-commonsenseqa": ("MIT", "CommonsenseQA"),
}


def card(facts: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    lines = [
        "# The embedded model",
        "",
        "A small Mixture-of-Experts target, an EAGLE-3 drafter and two expert predictors, for running the",
        "bench on a CPU. They are test equipment: the target's text reads like worked problems and its",
        "answers are mostly wrong.",
        "",
        f"At load the target's routed experts are widened ×{facts['widen']} without changing the function",
        "(each inner neuron repeated, its down-projection column divided), so that reading experts",
        "takes most of a verification pass. It is not bound by bandwidth: see the share of copy bandwidth in a report.",
        "",
        f"All files together: {facts['bytes'] / 2**20:.1f} MiB.",
        "",
    ]
    for part, record in facts["training"].items():
        made = "Made by (of a run that was resumed, the values are those of its last leg):"
        lines += [f"## {part.capitalize()}", "", made, "", f"    {command(part, record)}", ""]
        if "started_from" in record:
            earlier = record["started_from"]
            lines += [f"START, after {earlier['figures']['steps']} steps:", "", f"    {command(part, earlier)}", ""]
        lines += ["| figure | value |", "|---|---|"]
        for group in ("shape", "recipe", "figures"):
            lines += [f"| {name} | {_shown(value)} |" for name, value in record[group].items() if name not in UNSAID]
        lines.append("")
    if facts["measured"]:
        lines += ["## Measured", "", "| method | α | E |", "|---|---|---|"]
        lines += [
            f"| {m['method']} | {_shown(m['alpha'])} | {_shown(m['active_experts'])} |" for m in facts["measured"]
        ]
        lines.append("")
    tokens = facts["training"]["target"]["train_tokens_by_source"]
    lines += ["## Text", "", "| source | licence | tokens in the stream | origin |", "|---|---|---|---|"]
    for name, count in sorted(tokens.items(), key=lambda item: -item[1]):
        licence, origin = SOURCES.get(name, ("see the corpus", name))
        lines.append(f"| {name} | {licence} | {count:,} | {origin} |")
    lines += [
        "",
        f"SHA-256 of the corpus file: `{facts['training']['target']['corpus_sha256']}`. Test questions of the",
        "suites were removed from it. MATH test, MBPP, MMLU, AQuA and SVAMP are other people's evaluation",
        "sets: do not score this model on them.",
        "",
        "## Files",
        "",
        "| file | SHA-256 |",
        "|---|---|",
    ]
    lines += [f"| {name} | `{digest}` |" for name, digest in facts["sha256"].items()]
    return "\n".join(lines) + "\n"


def command(part: str, record: Mapping[str, Any]) -> str:
    """The command line that a training record came from."""
    recipe = record["recipe"]
    words = ["ecospec-bench train", part]
    if part != "target":
        words.append("--target TARGET")
    words.append(f"--corpus CORPUS --output OUTPUT --steps {recipe['steps']}")
    if recipe["seconds"]:
        words.append(f"--seconds {recipe['seconds']:g}")
    words.append(f"--learning-rate {recipe['learning_rate']:g} --seed {recipe['seed']}")
    if recipe.get("own_text"):
        words.append(f"--own-text {recipe['own_text']}")
    if recipe.get("start"):
        words.append("--start START")
    if recipe.get("patience"):
        words.append(f"--patience {recipe['patience']}")
    if recipe.get("backbone"):
        words.append("--backbone BACKBONE")
    return " ".join(words)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"
