"""What the ``train`` commands do: options become a recipe, and the recipe a training. Imports torch when called."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.outputs import check_folder


def check_training(options: dict[str, Any]) -> None:
    """Refuse options that no training can have, before anything is written.

    Raises:
        UserError: naming the option, the value and what was expected.
    """
    import torch

    traces = options.get("trace", ())
    if "trace" in options and bool(traces) == (options["corpus"] is not None):
        raise UserError("train predictor takes either --trace, once or several times, or --corpus")
    elsewhere = ("steps", "own_text") if traces else ("epochs", "batch_size") if "trace" in options else ()
    for name in elsewhere:
        if options.get(name):
            other = "--corpus" if traces else "--trace"
            raise UserError(
                f"--{name.replace('_', '-')} {options[name]}: it goes with {other}; expected to be left out"
            )
    for name, most in (("steps", 2**31), ("threads", 1024)):
        if options[name] is not None and not 1 <= options[name] <= most:
            raise UserError(f"--{name} {options[name]}: expected an integer from 1 to {most}")
    for name in ("epochs", "batch_size", "patience"):
        if options.get(name) is not None and not 1 <= options[name] <= 2**31:
            raise UserError(f"--{name.replace('_', '-')} {options[name]}: expected an integer of at least 1")
    if options.get("own_text", 0) < 0 or 0 < options.get("own_text", 0) < 16:
        raise UserError(f"--own-text {options['own_text']}: expected 0, or an integer of at least 16")
    if not 0 <= options["seed"] < 2**63:
        raise UserError(f"--seed {options['seed']}: expected an integer from 0 to 2^63 - 1")
    if not (math.isfinite(options["seconds"]) and options["seconds"] >= 0):
        raise UserError(f"--seconds {options['seconds']}: expected a number of at least 0")
    rate = options["learning_rate"]
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--learning-rate {rate}: expected a number above 0")
    device = options["device"]
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        found = "a" if torch.cuda.is_available() else "no"
        raise UserError(f"--device {device}: expected cpu, or cuda where there is one; {found} CUDA device is present")
    check_folder(f"--output {options['output']}", options["output"])


def train_command(kind: str, options: dict[str, Any]) -> None:
    """Train one part; the options not given are the recipe's."""
    # oneDNN compiles a kernel per shape; with its default cache the small products of a step evict each other.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
    import torch

    from ecospec.harness.loading import embedded_folder
    from ecospec.harness.training import drafter, predictor, target
    from ecospec.harness.training.traced import TracedRecipe, train_on_traces
    from ecospec.predictors.training import CHECKPOINT

    check_training(options)
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    traces: tuple[Path, ...] = options.get("trace", ())
    recipes: dict[str, Any] = {
        "target": target.TargetRecipe(),
        "drafter": drafter.DrafterRecipe(),
        "predictor": TracedRecipe() if traces else predictor.PredictorRecipe(),
    }
    fields = {field.name for field in dataclasses.fields(recipes[kind])}
    changed = {key: value for key, value in options.items() if key in fields and value is not None}
    recipe = dataclasses.replace(recipes[kind], **changed)
    common = {"recipe": recipe, "device": options["device"], "resume": options["resume"]}
    corpus, output = options["corpus"], options["output"]
    if kind == "predictor":
        common |= {"kind": options["kind"], "drafter": _drafter_for(options)}
    try:
        if kind == "target":
            figures = target.train_target(corpus, output, **common)
        elif kind == "drafter":
            figures = drafter.train_drafter(options["target"], corpus, output, **common)
        else:
            folder = options["target"] or embedded_folder() / "target"
            if traces:
                figures = train_on_traces(folder, traces, output, **common)
            else:
                figures = predictor.train_predictor(folder, corpus, output, **common)
    except KeyboardInterrupt:
        if (output / CHECKPOINT).exists():
            print(f"the same command with --resume goes on from the checkpoint in {output}", file=sys.stderr)
        raise
    if kind == "predictor":
        print(f"use it by --predictor {options['kind']}:path={Path(output) / options['kind']}")
        table = figures["held_out_overlap_token_frequency"]
        if figures["held_out_overlap"] <= table:
            print(f"it is right no more often than a table of token ids ({table:.3f}): more texts or steps may help")
    print(json.dumps(figures))
    print(f"written to {Path(output)}")


def _drafter_for(options: dict[str, Any]) -> Path | None:
    """The drafter whose states a predictor is to read; None for the embedded one, or where none is read."""
    drafter: Path | None = options["drafter"]
    if options["kind"] != "feature" and drafter is not None:
        raise UserError(f"--drafter {drafter}: a {options['kind']} predictor reads none; it goes with --kind feature")
    if options["kind"] == "feature" and options["backbone"] is not None:
        raise UserError(f"--backbone {options['backbone']}: a feature predictor has none; it goes with --kind learned")
    if options["kind"] == "feature" and drafter is None and options["target"] is not None:
        raise UserError("--kind feature with a --target of your own; expected --drafter with the EAGLE-3 head for it")
    return drafter
