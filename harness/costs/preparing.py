"""A cost model for a run: the saved one, or one that is measured now, visibly."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecospec.harness.chat import chat_of
from ecospec.harness.config import RunConfig
from ecospec.harness.costs.forcing import TOKENS, sweep_cells
from ecospec.harness.costs.measuring import Note
from ecospec.harness.costs.profiling import (
    Plan,
    Subject,
    Texts,
    key_of,
    placement_text,
    profile,
    profile_drafting,
    requests_of,
    steps_of,
)
from ecospec.harness.costs.projected import projected_for
from ecospec.harness.costs.replacing import check_store, replaced_by
from ecospec.harness.costs.saved import SavedCostModel, from_manifest
from ecospec.harness.costs.store import add_drafting, find_cost_model, load_cost_model, path_of, save_cost_model
from ecospec.harness.costs.words import formula
from ecospec.harness.decoding import Speculation
from ecospec.harness.distributed import from_rank_0
from ecospec.harness.drafters.loading import ChosenDrafter
from ecospec.harness.loading import LoadedTarget, check_experts
from ecospec.harness.manifest import folder_hash
from ecospec.harness.plugins import Plugins
from ecospec.harness.preparing import MethodParts, Parts, eos_ids
from ecospec.harness.processes import process_rank
from ecospec.harness.requests import Renderer
from ecospec.harness.run_folder import MANIFEST, read_manifest
from ecospec.policies import AcceptanceNeed
from ecospec.predictors.acceptance.asking import AskedEstimator
from ecospec.predictors.contract import Predictor
from ecospec.suites import EMBEDDED, load_suite

SUITES = ("gsm8k", "humaneval", "mtbench")
"""Whose embedded samples are decoded: mathematics, code and conversation."""
NEW_TOKENS = 48
"""Most tokens of a decode's output."""
CONTEXT = 200
"""Tokens in the sweep's KV memory: a prompt of the suites."""
MOST_TOKENS = 64
"""Passes over more are not measured unless a run's γ allows them: the model goes on in a straight line."""
ROUNDS_IN_A_RUN, LEVELS_IN_A_RUN, TOKENS_IN_A_RUN = 10, 5, (1, 2, 4, 8)
"""A run that has to profile first does so in less time, over fewer cells."""
SECONDS_IN_A_RUN = 60.0
"""After which it begins no further round."""


def cost_model_for(
    config: RunConfig,
    parts: Parts,
    chosen: ChosenDrafter,
    device: str,
    predictors: Mapping[str, Predictor],
    path: Path | None = None,
    estimators: Sequence[AskedEstimator] = (),
) -> SavedCostModel:
    """The cost model of a run, narrowed to its drafter and tree size.

    The saved one of this device and target is taken. What it lacks is measured first, and saved: all of it, larger
    passes, or steps with this drafter, tree size or predictor.

    Args:
        chosen: the drafter that the parts were loaded with.
        predictors: those of the run, by label; of those that ``parts`` has bound, steps are measured.
        path: a file to take in place of the saved model.
        estimators: those that the run asks.

    Raises:
        UserError: the target is dense or cannot be profiled, or the file was measured on something else.
    """
    return from_rank_0(lambda: _cost_model_for(config, parts, chosen, device, predictors, path, estimators))


def resumed_cost_model(config: RunConfig) -> SavedCostModel | None:
    """The model that a run began with, from its manifest; None for a new run, and for one that had none."""
    if not config.resume or config.output is None or not (config.output / MANIFEST).is_file():
        return None
    found = read_manifest(config.output / MANIFEST).get("cost_model")
    return None if found is None else from_manifest(found, f"--resume: {config.output / MANIFEST}")


def with_costs(
    speculations: Mapping[str, Speculation], methods: Sequence[MethodParts], saved: SavedCostModel
) -> dict[str, Speculation]:
    """The methods with the cost model that each is given: of a step with its own predictor and estimator."""
    predictors = {each.label: each.predictor for each in methods}
    priced = dict(speculations)
    for label, each in speculations.items():
        if each.policy.needs_cost_model:
            asked = each.estimator if each.policy.acceptance is AcceptanceNeed.ESTIMATED else None
            estimator = None if asked is None else asked.name
            priced[label] = dataclasses.replace(each, cost_model=saved.for_method(predictors[label], estimator))
    return priced


def _cost_model_for(
    config: RunConfig,
    parts: Parts,
    chosen: ChosenDrafter,
    device: str,
    predictors: Mapping[str, Predictor],
    path: Path | None,
    estimators: Sequence[AskedEstimator],
) -> SavedCostModel:
    loaded = parts.loaded
    check_experts(loaded.target, "a cost model")
    subject = subject_of(config, parts, chosen, device, predictors, estimators)
    key = key_of(loaded, device, subject.placement)
    saved = from_rank_0(lambda: find_cost_model(key)) if path is None else load_cost_model(path, key)
    if saved is not None and saved.projection is not None:
        return projected_for(saved, subject.drafting, f"--cost-model {path}")
    methods = subject.methods()
    tree = next(iter(methods.values())).tree_size
    # By the tree and not by γ, so that one model serves runs at every γ.
    most = max(TOKENS[-1], min(tree, MOST_TOKENS))
    needed = min(config.budget, tree)
    if saved is None or (path is None and saved.most_tokens < needed):
        why = "no cost model for this target on this device"
        if saved is not None:
            why = f"the cost model of this target goes to {saved.most_tokens} tokens a pass, and this run to {needed}"
        check_store()
        _say(f"{why}: profiling first, into {path_of(key)}")
        geometry = loaded.target.geometry
        context = max(1, min(CONTEXT, geometry.context - most))
        cells = sweep_cells((*TOKENS_IN_A_RUN, most), geometry.experts, geometry.top_k, LEVELS_IN_A_RUN)
        plan = Plan(cells, ROUNDS_IN_A_RUN, context, most_seconds=SECONDS_IN_A_RUN)
        texts = texts_of(config, loaded, SUITES, EMBEDDED, ROUNDS_IN_A_RUN, NEW_TOKENS)
        with progress("profiling", steps_of(plan, subject)) as note:
            saved = profile(subject, plan, texts, note)
        replaced = replaced_by(saved)
        if process_rank() == 0:
            save_cost_model(saved)
        if replaced is not None:
            _say(replaced)
        _say(formula(saved))
    drafting = next((each for each in saved.draftings if each.is_for(subject.drafting)), None)
    known = {} if drafting is None else drafting.predicting
    wanted = {label: each for label, each in subject.predictors.items() if label not in known}
    timed = {} if drafting is None else drafting.estimating
    untimed = {name: each for name, each in subject.estimators.items() if name not in timed}
    if drafting is None or wanted or untimed or not set(subject.oracles) <= set(known):
        _say("the cost model has no steps of this drafter, tree size, predictor and estimator yet: measuring them")
        short = dataclasses.replace(subject, predictors=wanted, estimators=untimed)
        texts = texts_of(config, loaded, SUITES, EMBEDDED, ROUNDS_IN_A_RUN, NEW_TOKENS)
        with progress("measuring steps", ROUNDS_IN_A_RUN * (1 + len(short.methods()))) as note:
            fresh = profile_drafting(short, ROUNDS_IN_A_RUN, max(most, saved.most_tokens), texts, note)
        # What is known stays as it is: runs that were made by it can then be gone on with and compared.
        drafting = dataclasses.replace(
            drafting or fresh,
            predicting={**fresh.predicting, **known},
            estimating={**fresh.estimating, **timed},
        )
        saved = saved.with_drafting(drafting)
        if path is None and process_rank() == 0:
            saved = add_drafting(saved, drafting)
            drafting = next(each for each in saved.draftings if each.is_for(subject.drafting))
    for warning in saved.fit.warnings:
        _say(f"warning: cost model: {warning}")
    return saved.narrowed(drafting)


def subject_of(
    config: RunConfig,
    parts: Parts,
    chosen: ChosenDrafter,
    device: str,
    predictors: Mapping[str, Predictor],
    estimators: Sequence[AskedEstimator] = (),
) -> Subject:
    """What is to be profiled for a run."""
    oracles = [label for label, each in predictors.items() if each.oracle]
    return Subject(
        name=config.target or EMBEDDED,
        loaded=parts.loaded,
        device=device,
        placement=placement_text(parts.loaded.target.model, config.parallel),
        draft_steps=config.draft_steps,
        draft_topk=config.draft_topk,
        budget=config.budget,
        drafter=parts.drafter,
        drafter_name=parts.drafter_name,
        drafter_spec=chosen.spec,
        drafter_sha256=folder_hash(getattr(chosen.drafter, "path", None)),
        predictors={
            label: bound for label, bound in parts.bound.items() if label in predictors and label not in oracles
        },
        oracles=oracles,
        estimators={each.name: each for each in estimators},
    )


def texts_of(
    config: RunConfig,
    loaded: LoadedTarget,
    suites: Sequence[str],
    data: str,
    count: int,
    new_tokens: int,
    plugins: Plugins | None = None,
) -> Texts:
    """So many requests, or as many as there are, of the suites in turn.

    Raises:
        UserError: an unknown suite, data that cannot be had, or a prompt that does not fit.
    """
    chat = chat_of(loaded.tokenizer, mode=config.chat_template, thinking=config.thinking, system=config.system_prompt)
    renderer = Renderer(loaded.tokenizer, loaded.target.geometry, loaded.name, new_tokens, chat)
    each = -(-count // len(suites))
    more = None if plugins is None else plugins.suites.paths
    problems = [
        load_suite(name, data=data, limit=each, revision=config.revision, more=more).problems for name in suites
    ]
    turns = [column[row] for row in range(each) for column in problems if row < len(column)]
    return Texts(requests_of(renderer, turns[:count]), eos_ids(loaded.target.model, loaded.tokenizer), chat)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Note]:
    """A bar on the terminal, if there is one."""
    columns = [TextColumn(what), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()]
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=steps)
        yield lambda: bar.advance(task)


def _say(line: str) -> None:
    print(f"ecospec-bench: {line}", file=sys.stderr, flush=True)
