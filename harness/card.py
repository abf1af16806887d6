"""The card of a bundle: what its parts were trained on, how, and how good they are, as Markdown made from its facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecospec.harness.accuracy import ALL
from ecospec.harness.report_markdown import markdown_table

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
        "A small Mixture-of-Experts target, an EAGLE-3 drafter and expert predictors, for running the",
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
    if facts["accuracy"]:
        lines += ["## Accuracy of the predictors", "", *_accuracy_lines(facts["accuracy"]), ""]
    if facts.get("acceptance"):
        rows = [
            [temperature, name, *(f"{score:.4f}" for score in scores.values())]
            for temperature, found in facts["acceptance"].items()
            for name, scores in found.items()
        ]
        lines += [
            *("## Acceptance estimators", ""),
            "On prompts that they were not fitted to; reliability curves are in `predictor/acceptance/CARD.md`:",
            "",
            markdown_table(["T", "estimator", "Brier score", "log loss", "calibration error"], rows),
            "",
        ]
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


def _accuracy_lines(found: Mapping[str, Any]) -> list[str]:
    """What ``ecospec-bench card`` measures: on what the target answers, and on draft trees."""
    # The mean over all texts last.
    sources = sorted(next(iter(found.values()))["accuracy"], key=lambda name: name == ALL)
    layers = range(len(next(iter(found.values()))["by_layer"]))
    depths = next(iter(found.values()))["by_depth"]
    rows = [[f"answers, {name}", *(_percent(each["accuracy"][name]) for each in found.values())] for name in sources]
    rows += [[f"answers, MoE layer {i}", *(_percent(each["by_layer"][i]) for each in found.values())] for i in layers]
    rows += [[f"draft trees, depth {d}", *(_percent(each["by_depth"][d]) for each in found.values())] for d in depths]
    for name, key in (("predicted", "predicted"), ("true", "true"), ("mean error", "mean_absolute_error")):
        costs = [f"{each['marginal_cost'][key]:.2f}" for each in found.values()]
        rows.append([f"marginal cost of a selected node, {name}", *costs])
    return [
        "Share of the true experts that were predicted, on the first problems of every suite, as `ecospec-bench card`",
        "measures it again:",
        "",
        markdown_table(["over", *found], rows),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def command(part: str, record: Mapping[str, Any]) -> str:
    """The command line that a training record came from."""
    recipe = record["recipe"]
    part, _, kind = part.partition(" ")
    words = ["ecospec-bench train", part, *(["--kind", kind] if kind else [])]
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
