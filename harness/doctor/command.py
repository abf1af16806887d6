"""``ecospec-bench doctor``: looks at all parts in turn and prints what it found."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecospec.errors import UserError, one_line
from ecospec.harness.app import console_width, quieten
from ecospec.harness.config import RunConfig
from ecospec.harness.doctor.drafter_part import DrafterPart, look_at_drafter
from ecospec.harness.doctor.findings import Diagnosis
from ecospec.harness.doctor.memory import Load, look_at_memory
from ecospec.harness.doctor.other_drafters import look_at_any, look_at_language_model, look_at_layer, own_folder
from ecospec.harness.doctor.predictor_part import PredictorPart, look_at_predictor
from ecospec.harness.doctor.target_part import TargetPart, Wanted, look_at_target
from ecospec.harness.drafters.builtin import Eagle3, LanguageModel, Mtp
from ecospec.harness.drafters.loading import choose_drafter
from ecospec.harness.hub import Checkpoint, find_checkpoint
from ecospec.harness.loading import check_experts, embedded_facts, embedded_folder
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import create_policies, create_predictors, resolve_device
from ecospec.harness.target import Geometry
from ecospec.harness.unused import say_unused, unused_options
from ecospec.policies import ExpertNeed, Policy
from ecospec.predictors.pretrained import UNLOADABLE

EXIT_PROBLEM = 2


@dataclass(frozen=True)
class Asked:
    """What the doctor is asked besides the options of a run.

    Attributes:
        max_context: tokens to reckon KV caches with; None for the target's context.
        spread: whether the target is spread over all devices.
    """

    max_context: int | None
    spread: bool
    as_json: bool


def doctor_command(config: RunConfig, asked: Asked, named: Collection[str] = ()) -> int:
    """Print the diagnosis; returns the exit code.

    Args:
        named: the options that the user has given; of those that nothing uses it is said so.
    """
    quieten()
    said = diagnose(config, asked)
    say_unused(unused_options(config, named, load_plugins()))
    if asked.as_json:
        print(json.dumps(as_dict(said), indent=1))
    else:
        print_diagnosis(said, Console(width=console_width()))
    return 0 if said.fits else EXIT_PROBLEM


def diagnose(config: RunConfig, asked: Asked) -> Diagnosis:
    """Look at target, drafter, predictors and memory.

    Raises:
        UserError: an option that means nothing, or a hub name that cannot be had.
    """
    if asked.max_context is not None and asked.max_context < 1:
        raise UserError(f"--max-context {asked.max_context}: expected an integer of at least 1")
    if config.batch_size < 1:
        raise UserError(f"--batch-size {config.batch_size}: expected an integer of at least 1")
    plugins = load_plugins()
    policies = create_policies(plugins, config.policy)
    needed = any(policy.needs is ExpertNeed.PREDICTED for policy in policies.values())
    predictors = create_predictors(plugins, config.predictor)  # their names are wrong whether they are needed or not
    predictors = predictors if needed else {}
    device, dtype = resolve_device(config)
    bundle = embedded_folder() if config.target is None else None
    said = Diagnosis()
    found = (
        Checkpoint(bundle / "target", None)
        if bundle
        else find_checkpoint("target", str(config.target), config.target_revision, weights=False)
    )
    widen = config.widen or (int(embedded_facts()["widen"]) if bundle else 1)
    wanted = Wanted(device, dtype, widen, config.trust_remote_code)
    name = "embedded" if bundle else str(config.target)
    try:
        target = look_at_target(said, name, found, wanted)
    except (UserError, *UNLOADABLE) as error:
        said.problem(f"target {name}: {one_line(error) or type(error).__name__}")
        target = None
    drafter, parts = None, []
    if target is not None and target.geometry is not None:
        drafter = _look_at_drafter(said, config, plugins, found, target, target.geometry)
        own = bundle and bundle / "predictor"
        _refuse_dense(said, target, policies)
        looked = [
            look_at_predictor(said, label, each, target.geometry, drafter, own)
            for label, each in predictors.items()
            if target.geometry.moe_layers
        ]
        parts = [part for part in looked if isinstance(part, PredictorPart)]
    if target is not None:
        limit = target.geometry.context if target.geometry else 1
        if asked.max_context is not None and target.geometry is not None and asked.max_context > limit:
            said.problem(f"--max-context {asked.max_context} is above the target's context of {limit}")
        context = min(asked.max_context or limit, limit)
        devices = torch.cuda.device_count() if asked.spread and device != "cpu" else 1
        look_at_memory(said, Load(device, max(1, devices), dtype, context, config.batch_size), target, drafter, parts)
    return said


def _refuse_dense(said: Diagnosis, part: TargetPart, policies: Mapping[str, Policy]) -> None:
    """Say which policies need experts, where there are none."""
    for policy in policies.values():
        if part.target is not None and policy.needs is not ExpertNeed.NONE:
            try:
                check_experts(part.target, f"policy {policy.name!r}")
            except UserError as error:
                said.problem(str(error))


def _look_at_drafter(
    said: Diagnosis, config: RunConfig, plugins: Plugins, target: Checkpoint, part: TargetPart, geometry: Geometry
) -> DrafterPart | None:
    """Describe and check the drafter, of whatever kind."""
    if config.drafter is None and config.target is not None:
        said.problem(
            "drafter: none; expected --drafter with the folder of an EAGLE-3 head for that target, or mtp, "
            "lm:path=FOLDER or ngram"
        )
        return None
    if config.drafter is None:
        return look_at_drafter(said, "embedded", Checkpoint(embedded_folder() / "drafter", None), geometry)
    drafter = choose_drafter(plugins, config.drafter, config.drafter_revision, weights=False)
    if isinstance(drafter.drafter, Mtp):
        return look_at_layer(said, own_folder(drafter.drafter.path, target), part, geometry)
    if not isinstance(drafter.drafter, Eagle3 | LanguageModel) or drafter.drafter.path is None:
        look_at_any(said, drafter.drafter)
        return None
    found = Checkpoint(drafter.drafter.path, drafter.commit)
    if isinstance(drafter.drafter, LanguageModel):
        return look_at_language_model(said, found, geometry, target)
    return look_at_drafter(said, config.drafter, found, geometry)


def as_dict(said: Diagnosis) -> dict[str, Any]:
    """All of it for a program: facts by part and name, findings in order, and whether all fits."""
    parts: dict[str, Any] = {}
    predictors: list[dict[str, Any]] = []
    for fact in said.facts:
        if fact.part != "predictor":
            parts.setdefault(fact.part, {})[fact.name.strip()] = fact.value
        elif fact.name == "predictor":
            predictors.append({"predictor": fact.value})
        else:
            predictors[-1][fact.name] = fact.value
    findings = [asdict(finding) for finding in said.findings]
    return {"fits": said.fits, **parts, "predictors": predictors, "findings": findings}


def print_diagnosis(said: Diagnosis, console: Console) -> None:
    """A table of facts, then the findings, then the verdict."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("part", "what", "found"):
        table.add_column(column, overflow="fold")
    last = ""
    for fact in said.facts:
        if last not in ("", fact.part):
            table.add_section()
        table.add_row(*map(Text, ("" if fact.part == last else fact.part, fact.name, fact.text)))
        last = fact.part
    console.print(table)
    for finding in said.findings:
        console.print(Text(f"{finding.level}: {finding.text}"), soft_wrap=True)
    problems = sum(finding.level == "problem" for finding in said.findings)
    verdict = "all parts fit" if said.fits else f"{problems} problem{'s' if problems > 1 else ''}: a run would stop"
    console.print(Text(verdict), soft_wrap=True)
