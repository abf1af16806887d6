"""Before a run: its options are checked, and its parts loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ecospec.errors import UserError
from ecospec.harness.config import CHECKS, RunConfig
from ecospec.harness.decoding import Speculation
from ecospec.harness.drafters.contract import BoundDrafter, Drafter
from ecospec.harness.drafters.identity import parameters_of
from ecospec.harness.drafters.loading import load_drafter
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.eagle3_loading import load_eagle3
from ecospec.harness.estimators import saved_for, say_found, with_folder
from ecospec.harness.loading import (
    DTYPES,
    LoadedTarget,
    check_experts,
    embedded_facts,
    embedded_folder,
    load_target,
    target_view,
)
from ecospec.harness.placement import own_device, placement_of
from ecospec.harness.plugins import Plugins
from ecospec.harness.processes import process_count
from ecospec.harness.records import AR
from ecospec.harness.target import Target
from ecospec.policies import AcceptanceNeed, ExpertNeed, Policy, spec_of
from ecospec.predictors.acceptance.asking import AskedEstimator, bind_estimator
from ecospec.predictors.acceptance.contract import AcceptanceEstimator, SavedFolder
from ecospec.predictors.asking import bind
from ecospec.predictors.contract import BoundPredictor, Predictor, TargetView
from ecospec.predictors.pretrained import check_folder
from ecospec.suites import EMBEDDED, HUB

MOST_THREADS = 1024
MOST_NODES = 4096
"""Largest draft tree; its ancestor matrix is quadratic in the nodes."""


@dataclass(frozen=True)
class Parts:
    """What a run loads, and another run with the same target and drafter shares.

    Attributes:
        bundle: the folder of the embedded model where that is used.
        bound: predictors by label, each loaded when a run first asks for it.
        asked: the drafter before it was bound; None for one of which nothing is to be told from others.
        told: the saved estimators of which the user has been told.
    """

    loaded: LoadedTarget
    drafter: BoundDrafter
    drafter_name: str
    bundle: Path | None
    bound: dict[str, BoundPredictor] = field(default_factory=dict)
    asked: Drafter | None = None
    told: set[tuple[str, SavedFolder]] = field(default_factory=set)


@dataclass(frozen=True)
class MethodParts:
    """What a speculative method is made of; its label may leave out what all methods of a run share.

    Attributes:
        policy: the policy's spec.
        predictor: the predictor's spec; None for a policy that needs none.
    """

    label: str
    policy: str
    predictor: str | None


def data_of(config: RunConfig) -> str:
    """Where the problems come from: what was asked for, or what goes with the target."""
    return config.data if config.data is not None else (EMBEDDED if config.target is None else HUB)


def check_options(config: RunConfig, *, drafter: bool = True) -> None:
    """Refuse numbers and names that no run can have.

    Args:
        drafter: whether a drafter is needed.

    Raises:
        UserError: naming the option, the value and what was expected.
    """
    for name in ("target", "drafter"):
        revision = getattr(config, f"{name}_revision")
        if revision is not None and getattr(config, name) is None:
            raise UserError(f"--{name}-revision {revision} without --{name}: expected a hub name to go with it")
    for name in ("max_new_tokens", "budget", "draft_steps", "draft_topk", "batch_size", "threads", "widen"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected an integer of at least 1")
    if config.threads is not None and config.threads > MOST_THREADS:
        raise UserError(f"--threads {config.threads}: expected an integer of at most {MOST_THREADS}")
    nodes = 1 + config.draft_topk + (config.draft_steps - 1) * config.draft_topk**2
    if nodes > MOST_NODES:
        raise UserError(
            f"--draft-steps {config.draft_steps} with --draft-topk {config.draft_topk}: a draft tree of {nodes} "
            f"nodes; expected at most {MOST_NODES}"
        )
    if config.target is not None:
        if drafter and config.drafter is None:
            raise UserError(
                "--target without --drafter: expected the folder of an EAGLE-3 head for that target, or mtp, "
                "lm:path=FOLDER or ngram"
            )
        check_folder("target", config.target)
    placement_of(config)
    if config.check not in CHECKS:
        raise UserError(f"--check {config.check}: expected one of {', '.join(CHECKS)}")
    if not config.policy:
        raise UserError("no policy given; expected --policy NAME (see: ecospec-bench plugins)")


def create_policies(plugins: Plugins, specs: Sequence[str]) -> dict[str, Policy]:
    """Policies by label, in the order asked for; one asked for twice is run once."""
    policies: dict[str, Policy] = {}
    for spec in specs:
        policy = plugins.create_policy(spec)
        policies.setdefault(spec_of(policy), policy)
    if AR in policies:
        raise UserError(f"a policy cannot be called {AR}, the name of plain decoding")
    return policies


def create_predictors(plugins: Plugins, specs: Sequence[str]) -> dict[str, Predictor]:
    """Predictors by label, in the order asked for, each once.

    Raises:
        UserError: none is asked for, or one does not exist.
    """
    if not specs:
        raise UserError("no predictor given; expected --predictor NAME (see: ecospec-bench plugins)")
    predictors: dict[str, Predictor] = {}
    for spec in specs:
        predictor = plugins.create_predictor(spec)
        predictors.setdefault(spec_of(predictor), predictor)
    return predictors


def resolve_device(config: RunConfig) -> tuple[str, torch.dtype]:
    """The device and dtype that ``auto`` stands for."""
    cuda = torch.cuda.is_available()
    device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
    if process_count() > 1:
        device = own_device(config.device)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: expected cpu, cuda or cuda:N") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not cuda):
        expected = "cpu or cuda" if cuda else "cpu; no CUDA device is present"
        raise UserError(f"--device {device}: expected {expected}")
    if config.dtype == "auto":
        return device, torch.float32 if kind == "cpu" or config.target is None else torch.bfloat16
    if config.dtype not in DTYPES:
        raise UserError(f"--dtype {config.dtype}: expected auto, {', '.join(DTYPES)}")
    return device, DTYPES[config.dtype]


def load_target_of(config: RunConfig, device: str, dtype: torch.dtype) -> tuple[LoadedTarget, Path | None]:
    """The target, and the folder of the embedded model where that is used."""
    bundle = embedded_folder() if config.target is None else None
    widen = config.widen or (int(embedded_facts()["widen"]) if bundle else 1)
    name = str(bundle / "target") if bundle else str(config.target)
    loaded = load_target(
        name,
        dtype=dtype,
        device=device,
        widen=widen,
        revision=config.target_revision,
        trust_remote_code=config.trust_remote_code,
        placement=placement_of(config),
    )
    return loaded, bundle


def with_drafter(view: TargetView, drafter: BoundDrafter, name: str) -> TargetView:
    """The target as predictors may know it, with the drafter."""
    return replace(view, drafter=drafter.view, stateless=name if drafter.view is None else None)


def load_head(folder: Path, target: Target) -> Eagle3Head:
    """An EAGLE-3 head to train by, of whose feature layers the target gives the outputs from now on.

    Raises:
        UserError: it does not fit the target.
    """
    geometry = target.geometry
    head = load_eagle3(
        folder,
        target_vocab=geometry.vocab_size,
        target_hidden=geometry.hidden_size,
        target_layers=geometry.layers,
    )
    try:
        target.read_features(head.config.feature_layers or ())
    except UserError as error:
        raise UserError(f"drafter {folder}: {error}") from error
    return head


def method_parts(policies: Mapping[str, Policy], predictors: Mapping[str, Predictor]) -> list[MethodParts]:
    """The methods of a run: each policy, and where it needs a predictor, one for each of them."""
    methods = []
    for label, policy in policies.items():
        if policy.needs is not ExpertNeed.PREDICTED:
            methods.append(MethodParts(label, label, None))
            continue
        for name in predictors:
            methods.append(MethodParts(f"{label} with {name}" if len(predictors) > 1 else label, label, name))
    return methods


def load_parts(config: RunConfig, drafter: Drafter, device: str, dtype: torch.dtype) -> Parts:
    """Target and drafter; predictors are loaded when they are asked for."""
    loaded, bundle = load_target_of(config, device, dtype)
    return Parts(loaded, load_drafter(drafter, loaded, bundle), drafter.name, bundle, asked=drafter)


def load_speculations(
    config: RunConfig,
    policies: Mapping[str, Policy],
    predictors: Mapping[str, Predictor],
    estimator: AcceptanceEstimator,
    parts: Parts,
) -> dict[str, Speculation]:
    """A speculative method for each policy, by its label; where it needs a predictor, one for each of them.

    Raises:
        UserError: a predictor or the estimator does not fit the target.
    """
    sizes = (config.budget, config.draft_steps, config.draft_topk)
    wanted = any(policy.acceptance is AcceptanceNeed.ESTIMATED for policy in policies.values())
    asked = bound_estimator(estimator, parts, config.temperature) if wanted else None
    methods: dict[str, Speculation] = {}
    for method in method_parts(policies, predictors):
        policy = policies[method.policy]
        if policy.needs is not ExpertNeed.NONE:
            check_experts(parts.loaded.target, f"policy {policy.name!r}")
        if method.predictor is None:
            methods[method.label] = Speculation(
                policy, parts.drafter, *sizes, drafter_name=parts.drafter_name, estimator=asked
            )
            continue
        predictor = predictors[method.predictor]
        methods[method.label] = Speculation(
            policy,
            parts.drafter,
            *sizes,
            drafter_name=parts.drafter_name,
            predictor=bound_predictor(method.predictor, predictor, parts),
            predictor_is_oracle=predictor.oracle,
            predictor_name=predictor.name,
            estimator=asked,
        )
    return methods


def estimators_of(methods: Mapping[str, Speculation]) -> list[AskedEstimator]:
    """The acceptance estimators that any method asks."""
    asking = [each for each in methods.values() if each.policy.acceptance is AcceptanceNeed.ESTIMATED]
    return list(dict.fromkeys(each.estimator for each in asking if each.estimator is not None))


def view_of(parts: Parts) -> TargetView:
    """What predictors and estimators may know of a run's target and drafter."""
    view = target_view(parts.loaded.target, parts.bundle and parts.bundle / "predictor")
    view = with_drafter(view, parts.drafter, parts.drafter_name)
    if parts.asked is None or view.stateless is None:
        return view
    return replace(view, stateless_facts=partial(parameters_of, parts.asked))


def bound_predictor(label: str, predictor: Predictor, parts: Parts) -> BoundPredictor:
    """The predictor for this target, loaded once."""
    if label not in parts.bound:
        parts.bound[label] = bind(predictor, view_of(parts))
    return parts.bound[label]


def bound_estimator(estimator: AcceptanceEstimator, parts: Parts, temperature: float) -> AskedEstimator:
    """The estimator for this target, drafter and temperature: of the folder that its user named, or the target's own,
    or the one that is saved for them, which is said on the terminal, once.

    Raises:
        UserError: there is none, or it does not fit.
    """
    view = view_of(parts)
    saved = saved_for(estimator, view, temperature)
    asked = bind_estimator(with_folder(estimator, saved), view, temperature, saved)
    if saved is not None and (estimator.name, saved) not in parts.told:
        parts.told.add((estimator.name, saved))
        say_found(estimator, saved)
    return asked


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that the checkpoint or its tokenizer calls the end of a sequence.

    Raises:
        UserError: one is no token id.
    """
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [] if value is None else [value]
        wrong = [each for each in values if not isinstance(each, int)]
        if wrong:
            raise UserError(f"the target's eos_token_id is {wrong[0]!r}; expected a token id or a list of them")
        found.update(values)
    return frozenset(found)
