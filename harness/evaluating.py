"""The ``evaluate`` command: predictors against traces, and against the draft trees of a decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ecospec.errors import UserError
from ecospec.harness.accuracy import Accuracy, accuracy_json, accuracy_of, accuracy_tables
from ecospec.harness.accuracy import held_out_of as read_held_out
from ecospec.harness.config import RunConfig
from ecospec.harness.decoding import Speculation
from ecospec.harness.drafters.contract import BoundDrafter
from ecospec.harness.drafters.heads import BoundHead
from ecospec.harness.drafters.loading import choose_drafter, load_drafter
from ecospec.harness.loading import LoadedTarget, target_view
from ecospec.harness.plugins import load_plugins
from ecospec.harness.preparing import (
    check_options,
    create_predictors,
    eos_ids,
    load_target_of,
    resolve_device,
    with_drafter,
)
from ecospec.harness.tree_accuracy import (
    TreeAccuracy,
    answered,
    states_of_text,
    tree_accuracy_json,
    tree_accuracy_of,
    tree_tables,
)
from ecospec.policies import MarginalCost
from ecospec.predictors.asking import bind
from ecospec.predictors.traces import TracedText, open_trace

TREES = 8


@dataclass(frozen=True)
class Evaluation:
    """By predictor: accuracy over what the target wrote, and over draft trees, where these were asked for."""

    written: dict[str, Accuracy]
    drafted: dict[str, TreeAccuracy]

    def tables(self) -> list[Table]:
        """Tables for the terminal."""
        return accuracy_tables(self.written) + (tree_tables(self.drafted) if self.drafted else [])

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        found = accuracy_json(self.written)
        return {name: {**found[name], **tree_accuracy_json(self.drafted.get(name))} for name in found}


def evaluate(config: RunConfig, folders: Sequence[Path], held_out_of: Path | None, trees: int | None) -> Evaluation:
    """Judge predictors by traces.

    Args:
        config: target, drafter, predictors, and the size of draft trees; nothing else is used.
        folders: traces of that target.
        held_out_of: a training from these traces; only what it held out counts. None for all texts.
        trees: so many texts are decoded anew, to judge by draft trees; None for `TREES` where there are a drafter and
            texts with answers.

    Raises:
        UserError: a part or a trace does not fit, or there is nothing to judge by.
    """
    check_options(config, drafter=False)
    drafts = config.target is None or config.drafter is not None
    by_default = trees is None
    trees = TREES * drafts if trees is None else trees
    if trees < 0:
        raise UserError(f"--trees {trees}: expected an integer of at least 0")
    if trees and not drafts:
        raise UserError(f"--trees {trees} with --target, but without --drafter: expected a drafter as well")
    if trees and config.budget < 2:
        raise UserError(
            f"--budget {config.budget}: selects no drafted node to judge by; expected at least 2, or --trees 0"
        )
    plugins = load_plugins()
    predictors = create_predictors(plugins, config.predictor)
    drafter = choose_drafter(plugins, config.drafter, config.drafter_revision).drafter
    only = None if held_out_of is None else read_held_out(held_out_of)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, dtype = resolve_device(config)
    loaded, bundle = load_target_of(config, device, dtype)
    view = target_view(loaded.target, bundle and bundle / "predictor")
    drafting: BoundDrafter | None = None
    if drafts:
        drafting = load_drafter(drafter, loaded, bundle)
        view = with_drafter(view, drafting, drafter.name)
    bound = {label: bind(predictor, view) for label, predictor in predictors.items()}
    opened = [open_trace(folder, view) for folder in folders]
    texts = [text for trace in opened for text in trace if only is None or text.given in only]
    if not texts:
        raise UserError("none of the traces' texts was held out by that training; expected the traces it was made from")
    states = partial(states_of_text, loaded.target, drafting.head) if isinstance(drafting, BoundHead) else None
    written = {
        label: accuracy_of(predictor.name, bound[label], view, texts, oracle=predictor.oracle, states_of=states)
        for label, predictor in predictors.items()
    }
    drafted: dict[str, TreeAccuracy] = {}
    if by_default and not answered(texts, 1):
        trees = 0
    if trees and drafting is not None:
        sizes = (config.budget, config.draft_steps, config.draft_topk)
        for label, predictor in predictors.items():
            method = Speculation(
                MarginalCost(), drafting, *sizes, bound[label], predictor.oracle, predictor.name, drafter.name
            )
            drafted[label] = _drafted(loaded, method, texts, trees)
    return Evaluation(written, drafted)


def _drafted(loaded: LoadedTarget, method: Speculation, texts: Sequence[TracedText], trees: int) -> TreeAccuracy:
    chosen = answered(texts, trees)
    if not chosen:
        raise UserError("the traces have no answers, so there are no draft trees to judge by; expected --trees 0")
    return tree_accuracy_of(loaded, method, chosen, eos_ids(loaded.target.model, loaded.tokenizer))


def write_json(evaluation: Evaluation, path: Path) -> None:
    """Write the values to a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(evaluation.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
