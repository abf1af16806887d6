"""One profile: what is measured of which parts, and what comes of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import ClassVar

import numpy as np
import torch
import transformers

import ecospec
from ecospec.errors import UserError
from ecospec.harness.bandwidth import copy_bandwidth
from ecospec.harness.chat import Chat
from ecospec.harness.costs.fitting import Timing, fit_cost_model
from ecospec.harness.costs.forcing import Cell
from ecospec.harness.costs.measuring import WARM_UP_ROUNDS, Note, Sweep, TextPass, TextRuns, typical
from ecospec.harness.costs.saved import CostKey, Drafting, Fit, Point, SavedCostModel, StepRest
from ecospec.harness.decoding import Speculation
from ecospec.harness.distributed import from_rank_0, summed
from ecospec.harness.drafters.contract import BoundDrafter
from ecospec.harness.loading import LoadedTarget, check_experts
from ecospec.harness.manifest import checkpoint_hash, device_facts
from ecospec.harness.placement import Placement
from ecospec.harness.processes import process_count
from ecospec.harness.requests import Renderer, Request
from ecospec.policies import AcceptanceNeed, Confidence, MarginalCost
from ecospec.predictors.acceptance.asking import AskedEstimator
from ecospec.predictors.contract import BoundPredictor
from ecospec.suites import Problem

TREE_REQUESTS = 6
"""Requests whose draft trees are looked at."""
LEAST_ROUNDS = 4
"""For the quartiles of a cell's passes."""
DRIFT_MOST = 0.20
"""How much the copy bandwidth may change from the beginning to the end."""
SPREAD_MOST = 0.25
"""How far apart the quartiles of a cell's passes may be, in shares of the lower one."""
CONFIDENCE = "confidence"
"""The label of the method that drafts and predicts nothing."""


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        name: of the target, for readers.
        drafter: None to measure the target alone.
        drafter_spec, drafter_sha256: what the saved model knows it by.
        predictors: by label; of those that look at true routing, ``oracles``, no time is measured.
    """

    name: str
    loaded: LoadedTarget
    device: str
    placement: str | None
    draft_steps: int
    draft_topk: int
    budget: int
    drafter: BoundDrafter | None = None
    drafter_name: str = ""
    drafter_spec: str = ""
    drafter_sha256: str | None = None
    predictors: Mapping[str, BoundPredictor] = field(default_factory=dict)
    oracles: Sequence[str] = ()
    estimators: Mapping[str, AskedEstimator] = field(default_factory=dict)

    @property
    def drafting(self) -> tuple[str, str | None, int, int]:
        """What a `Drafting` is known by."""
        return (self.drafter_spec, self.drafter_sha256, self.draft_steps, self.draft_topk)

    def methods(self) -> dict[str, Speculation]:
        """Confidence; marginal-cost with each predictor; a policy that asks each estimator; none without a drafter."""
        if self.drafter is None:
            return {}
        sizes = (self.budget, self.draft_steps, self.draft_topk)
        confidence = Speculation(Confidence(), self.drafter, *sizes, drafter_name=self.drafter_name)
        return {
            CONFIDENCE: confidence,
            **{
                f"predictor {label}": Speculation(
                    MarginalCost(),
                    self.drafter,
                    *sizes,
                    drafter_name=self.drafter_name,
                    predictor=predictor,
                    predictor_name=label,
                )
                for label, predictor in self.predictors.items()
            },
            **{
                f"estimator {name}": Speculation(
                    _Estimating(), self.drafter, *sizes, drafter_name=self.drafter_name, estimator=estimator
                )
                for name, estimator in self.estimators.items()
            },
        }


class _Estimating(Confidence):
    """Confidence by an estimator's probabilities: it is there for their time."""

    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.ESTIMATED


@dataclass(frozen=True)
class Plan:
    """How it is measured.

    Attributes:
        cells: of the sweep.
        rounds: how often each of them and each decode is measured.
        context: tokens in the sweep's KV memory.
        most_seconds: after which no further round begins, once there are `LEAST_ROUNDS`.
    """

    cells: Sequence[Cell]
    rounds: int
    context: int
    seed: int = 0
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Texts:
    """The requests of the real decodes, and how they end."""

    requests: Sequence[Request]
    eos: frozenset[int]
    chat: Chat | None


def requests_of(renderer: Renderer, problems: Sequence[Problem]) -> list[Request]:
    """The first prompt of every problem.

    Raises:
        UserError: one does not fit.
    """
    return [renderer.first(problem) for problem in problems]


def placement_text(model: object, parallel: str | None) -> str | None:
    """How a target in parts is spread, in words; None for one that is whole."""
    if process_count() > 1:
        return f"{parallel or 'tensor'} over {process_count()} processes"
    layers = Placement.layers(model)
    return ", ".join(f"{count} layers on {place}" for place, count in sorted(layers.items())) or None


def key_of(loaded: LoadedTarget, device: str, placement: str | None) -> CostKey:
    """What a measurement of this target on this device holds for."""
    facts = device_facts(device)
    kind = torch.device(device).type
    return CostKey(
        device=str(facts["name"]),
        kind=kind,
        threads=torch.get_num_threads() if kind == "cpu" else None,
        dtype=str(loaded.target.embedding.dtype).removeprefix("torch."),
        checkpoint_sha256=checkpoint_hash(loaded.folder),
        widened=loaded.widened,
        unpacked=loaded.unpacked,
        placement=placement,
        torch=torch.__version__,
        transformers=transformers.__version__,
        ecospec=ecospec.__version__,
    )


def sweep_prompt(requests: Sequence[Request], context: int) -> list[int]:
    """So many tokens of text: the prompts one behind the other, from the beginning again where they end."""
    tokens = [token for request in requests for token in request.ids]
    return [tokens[i % len(tokens)] for i in range(context)]


def steps_of(plan: Plan, subject: Subject) -> int:
    """How often `profile` calls its ``note``."""
    sweep = len(plan.cells) * (plan.rounds + WARM_UP_ROUNDS)
    return sweep + plan.rounds * (1 + len(subject.methods()))


def profile(subject: Subject, plan: Plan, texts: Texts, note: Note = lambda: None) -> SavedCostModel:
    """Measure all of it.

    Raises:
        UserError: the target is dense, its experts cannot be forced, or the context is too long.
    """
    target = subject.loaded.target
    check_experts(target, "a cost model")
    geometry = target.geometry
    most = max(cell.tokens for cell in plan.cells)
    if plan.context < 1 or plan.context + most > geometry.context:
        raise UserError(
            f"--context {plan.context}: expected at least 1 and, with passes of {most} tokens, at most "
            f"{geometry.context - most} in the target's context of {geometry.context}"
        )
    before = copy_bandwidth(subject.device)
    sweep = Sweep(target, plan.cells, sweep_prompt(texts.requests, plan.context), plan.seed)
    runs = TextRuns(subject.loaded, texts.requests, subject.methods(), texts.eos, chat=texts.chat is not None)
    for _ in range(WARM_UP_ROUNDS):
        sweep.round(note, counts=False)
    runs.warm_up()
    began = time.perf_counter()
    for number in range(plan.rounds):
        if number >= LEAST_ROUNDS and from_rank_0(lambda: time.perf_counter() - began > plan.most_seconds):
            break
        sweep.round(note)
        runs.round(number, note)
    after = copy_bandwidth(subject.device)
    bandwidth = summed((before + after) / 2)
    points = points_of(sweep, geometry.moe_layers, geometry.expert_bytes, geometry.always_read_bytes, bandwidth)
    drift = abs(after - before) / max(before, after)
    passes = runs.decodes[CONFIDENCE].passes() if subject.drafter is not None else []
    text = runs.text_pairs(min(most, geometry.context // 2))
    return SavedCostModel(
        key=key_of(subject.loaded, subject.device, subject.placement),
        target=subject.name,
        moe_layers=geometry.moe_layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        expert_bytes=geometry.expert_bytes,
        always_read_bytes=geometry.always_read_bytes,
        fit=_fit(points, passes, drift),
        points=tuple(points),
        ar_seconds=typical([each.seconds for each in runs.decodes[None].passes()]),
        copy_bytes_per_second=bandwidth,
        context=plan.context,
        pairs_by_tokens=text.means(),
        windows=text.places,
        draftings=() if subject.drafter is None else (drafting_of(subject, runs, most),),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def profile_drafting(subject: Subject, rounds: int, most: int, texts: Texts, note: Note = lambda: None) -> Drafting:
    """Measure what goes with verification, for a target whose verification has been measured."""
    runs = TextRuns(subject.loaded, texts.requests, subject.methods(), texts.eos, chat=texts.chat is not None)
    runs.warm_up()
    for number in range(rounds):
        runs.round(number, note)
    return drafting_of(subject, runs, most)


def drafting_of(subject: Subject, runs: TextRuns, most: int) -> Drafting:
    """What the decodes of a subject with a drafter came to.

    Raises:
        UserError: every output ended at its first token.
    """
    if not all(decodes.passes() for decodes in runs.decodes.values()):
        raise UserError("every output of the target's ended at its first token, so that no step could be measured")
    rest = runs.decodes[CONFIDENCE].rest()
    predicting: dict[str, StepRest] = {label: runs.decodes[f"predictor {label}"].rest() for label in subject.predictors}
    estimating = {name: runs.decodes[f"estimator {name}"].phase("estimate") for name in subject.estimators}
    trees = runs.tree_pairs(CONFIDENCE, most, TREE_REQUESTS)
    return Drafting(
        *subject.drafting,
        rest=rest,
        predicting={**predicting, **dict.fromkeys(subject.oracles, rest)},
        pairs_by_tokens=trees.means(),
        trees=trees.places,
        estimating=estimating,
    )


def points_of(
    sweep: Sweep, moe_layers: int, expert_bytes: int, always_read_bytes: int, bandwidth: float
) -> list[Point]:
    """The cells of a sweep, with the share of the copy bandwidth that each reached."""
    points = []
    for cell, seconds in sweep.seconds.items():
        median, high = (float(np.quantile(seconds, share)) for share in (0.5, 0.75))
        least = typical(seconds)
        pairs = cell.active_experts * moe_layers
        read = pairs * expert_bytes + always_read_bytes
        points.append(
            Point(
                cell.tokens,
                cell.active_experts,
                pairs,
                least,
                median,
                high,
                len(seconds),
                cell.held_out,
                read / least / bandwidth,
            )
        )
    return points


def _fit(points: Sequence[Point], passes: Sequence[TextPass], drift: float) -> Fit:
    timings = [Timing(p.tokens, p.expert_pairs, p.seconds, p.held_out) for p in points]
    try:
        fit = fit_cost_model(timings)
    except ValueError as error:
        raise UserError(f"the sweep is too small ({error})") from error
    if passes:
        off = typical([p.seconds / fit.verify_seconds(p.tokens, p.expert_pairs) - 1 for p in passes])
        fit = fit_cost_model(timings, off)
    spread = statistics.median((point.high - point.seconds) / point.seconds for point in points)
    said = []
    if spread > SPREAD_MOST:
        said.append(f"half of the passes of a cell are spread over {100 * spread:.0f} %: the machine is not at rest")
    if drift > DRIFT_MOST:
        said.append(
            f"the copy bandwidth changed by {100 * drift:.0f} % while this was measured: the machine is not at rest"
        )
    return replace(fit, warnings=(*fit.warnings, *said))
