"""What ``ecospec-bench profile`` does: load, measure, save, and leave a folder."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ecospec.errors import UserError
from ecospec.harness.app import EXIT_INTERRUPTED, as_user_errors
from ecospec.harness.config import RunConfig
from ecospec.harness.costs.forcing import sweep_cells, token_counts
from ecospec.harness.costs.preparing import CONTEXT, progress, subject_of, texts_of
from ecospec.harness.costs.profiling import Plan, Subject, placement_text, profile, steps_of
from ecospec.harness.costs.replacing import check_store, replaced_by
from ecospec.harness.costs.report import (
    PROFILE_JSON,
    PROFILE_MD,
    check_new,
    new_folder,
    profile_json,
    profile_markdown,
    summary_lines,
    write_folder,
)
from ecospec.harness.costs.saved import SavedCostModel
from ecospec.harness.costs.store import save_cost_model
from ecospec.harness.drafters.loading import choose_drafter, load_drafter
from ecospec.harness.loading import check_experts, target_view
from ecospec.harness.outputs import check_folder
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import (
    Parts,
    check_options,
    create_predictors,
    load_target_of,
    resolve_device,
    with_drafter,
)
from ecospec.harness.several import suites_asked
from ecospec.predictors.acceptance.asking import bind_estimator
from ecospec.predictors.acceptance.builtin import Isotonic, Learned
from ecospec.predictors.asking import bind
from ecospec.suites import EMBEDDED

MOST_TOKENS = 1024


@dataclass(frozen=True)
class Asked:
    """What a profile is asked for besides a run's options.

    Attributes:
        suites: whose texts are decoded.
        max_tokens: of a pass.
        context: tokens in the KV memory; None for what a prompt has.
        rounds: how often every pass is measured.
    """

    suites: tuple[str, ...]
    max_tokens: int
    context: int | None
    rounds: int


def profile_command(config: RunConfig, asked: Asked) -> int:
    """Returns the exit code."""
    for name, value, least, most in (
        ("max-tokens", asked.max_tokens, 2, MOST_TOKENS),
        ("rounds", asked.rounds, 3, 100_000),
    ):
        if not least <= value <= most:
            raise UserError(f"--{name} {value}: expected an integer from {least} to {most}")
    if asked.context is not None and asked.context < 1:
        raise UserError(f"--context {asked.context}: expected an integer of at least 1")
    folder = config.output or new_folder()
    check_new(folder)
    check_folder(f"--output {folder}", folder)
    check_store()
    plugins = load_plugins()
    with as_user_errors(config):
        try:
            saved = measure(config, asked, plugins)
        except KeyboardInterrupt:
            print("ecospec-bench: interrupted; nothing was saved", file=sys.stderr)
            return EXIT_INTERRUPTED
    write_folder(folder, lambda partial: write_files(saved, partial))
    replaced = replaced_by(saved)
    path = save_cost_model(saved)
    for line in summary_lines(saved):
        print(line)
    print(f"saved for later runs: {path}")
    if replaced is not None:
        print(replaced)
    print(f"profile folder: {folder}")
    return 0


def measure(config: RunConfig, asked: Asked, plugins: Plugins) -> SavedCostModel:
    """Load the parts, the cheap checks first, and profile them."""
    check_options(config, drafter=False)
    suites = suites_asked(",".join(asked.suites), asked.suites)
    for suite in suites:
        plugins.find_suite(suite)
    specs = config.predictor or (("feature", "learned", "token-frequency") if config.target is None else ())
    drafted = config.target is None or config.drafter is not None
    if specs and not drafted:
        raise UserError(f"--predictor {specs[0]} without --drafter: what is predicted are draft trees; expected both")
    predictors = create_predictors(plugins, specs) if specs else {}
    chosen = choose_drafter(plugins, config.drafter, config.drafter_revision) if drafted else None
    device, dtype = resolve_device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded, bundle = load_target_of(config, device, dtype)
    check_experts(loaded.target, "a cost model")
    geometry = loaded.target.geometry
    cells = sweep_cells(token_counts(asked.max_tokens), geometry.experts, geometry.top_k)
    context = asked.context
    if context is None:
        context = max(1, min(CONTEXT, geometry.context - asked.max_tokens))
    plan = Plan(cells, asked.rounds, context)
    if chosen is None:
        subject = Subject(
            name=config.target or EMBEDDED,
            loaded=loaded,
            device=device,
            placement=placement_text(loaded.target.model, config.parallel),
            draft_steps=config.draft_steps,
            draft_topk=config.draft_topk,
            budget=config.budget,
        )
    else:
        parts = Parts(loaded, load_drafter(chosen.drafter, loaded, bundle), chosen.drafter.name, bundle)
        view = with_drafter(
            target_view(loaded.target, bundle and bundle / "predictor"), parts.drafter, parts.drafter_name
        )
        bound = {label: bind(each, view) for label, each in predictors.items() if not each.oracle}
        # A fitted estimator that belongs to this target there may not be; a run that asks one adds its time.
        fitted = (Learned(), Isotonic()) if config.target is None else ()
        estimators = [bind_estimator(each, view, config.temperature) for each in fitted]
        subject = subject_of(config, replace(parts, bound=bound), chosen, device, predictors, estimators)
    texts = texts_of(config, loaded, suites, str(config.data), asked.rounds, config.max_new_tokens, plugins)
    with progress("profiling", steps_of(plan, subject)) as note:
        return profile(subject, plan, texts, note)


def write_files(saved: SavedCostModel, folder: Path) -> None:
    """All files of a profile."""
    from ecospec.harness.costs.plots import write_plots

    figures = write_plots(saved, folder)
    (folder / PROFILE_JSON).write_text(json.dumps(profile_json(saved), indent=1) + "\n", encoding="utf-8")
    (folder / PROFILE_MD).write_text(profile_markdown(saved, figures), encoding="utf-8")
