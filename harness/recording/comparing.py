"""A replay's methods, its table, and what it says under it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ecospec.errors import UserError, nearest
from ecospec.harness.plugins import load_plugins
from ecospec.harness.recording.folder import Recording, open_recording
from ecospec.harness.recording.replay import DRAFT, TRUE, ReplayedRequest, ReplayMethod, plain_decoding, replay
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.harness.recording.what_if import ReplayCosts, read_costs
from ecospec.harness.records import AR
from ecospec.harness.report import LEAST_HEADROOM, YARDSTICKS
from ecospec.harness.report_notes import NONE
from ecospec.harness.stats import Ratio, paired_ratio
from ecospec.policies import AcceptanceNeed, ExpertNeed, Policy, spec_of

CONFIDENCE = "confidence"


@dataclass(frozen=True)
class ReplayAsked:
    """What a replay is asked for; see the command's options."""

    policies: tuple[str, ...]
    budgets: tuple[int, ...] = (4,)
    predictors: tuple[str, ...] = ()
    estimator: str | None = None
    cost_model: Path | None = None
    limit: int | None = None


@dataclass(frozen=True)
class ReplayRow:
    """One method over all requests.

    Attributes:
        acceptance_length: α. active_experts: E, per MoE layer. verified_tokens: per step.
        projected_experts: E of the target that seconds are projected to; None without a projection.
        speedup: of the modelled seconds over plain decoding's; None without a cost model.
        over_confidence: over the confidence policy at the same γ.
        headroom: share of the way from confidence to each yardstick at the same γ, in modelled speed-up, by its
            policy's name.
    """

    label: str
    budget: int | None
    sees_ahead: bool
    steps: int
    acceptance_length: float
    active_experts: float
    projected_experts: float | None
    verified_tokens: float
    overlap: float | None
    speedup: Ratio | None
    over_confidence: Ratio | None
    headroom: Mapping[str, float | None]


@dataclass(frozen=True)
class Replayed:
    """What came of a replay.

    Attributes:
        notes: what the table must not be used for. costs: name of what seconds are reckoned with.
    """

    recording: Recording
    rows: tuple[ReplayRow, ...]
    requests: tuple[ReplayedRequest, ...]
    notes: tuple[str, ...]
    costs: str | None

    def to_json(self) -> dict[str, Any]:
        """All figures, and the sums by request that they are made of."""
        return {
            "schema": 1,
            "recording": str(self.recording.folder),
            "costs": self.costs,
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
            "requests": [asdict(each) for each in self.requests],
        }


def policies_of(asked: ReplayAsked, manifest: Mapping[str, Any]) -> dict[str, Policy]:
    """The policies by their specs, all that is asked for being checked before any request is read.

    Raises:
        UserError: an unknown policy, a label that is not in the recording, or a cost model that is missing.
    """
    plugins = load_plugins()
    policies = {spec_of(policy): policy for policy in map(plugins.create_policy, asked.policies)}
    known = [*manifest["predictors"], TRUE]
    for label in asked.predictors:
        if label not in known:
            raise UserError(f"predictor {label!r} is not in the recording: {nearest(label, known)}")
    estimators = [*manifest["estimators"], DRAFT]
    if asked.estimator is not None and asked.estimator not in estimators:
        raise UserError(
            f"acceptance estimator {asked.estimator!r} is not in the recording: {nearest(asked.estimator, estimators)}"
        )
    for budget in asked.budgets:
        if budget < 1:
            raise UserError(f"--budget {budget}: expected an integer of at least 1")
    for policy in policies.values():
        if policy.needs_cost_model and asked.cost_model is None:
            raise UserError(f"policy {policy.name!r} needs a cost model; expected --cost-model")
    return policies


def methods_of(
    asked: ReplayAsked, policies: Mapping[str, Policy], manifest: Mapping[str, Any], costs: ReplayCosts | None
) -> list[ReplayMethod]:
    """Every policy at every budget; one that looks at predicted experts, with every predictor."""
    predictors = asked.predictors or tuple(manifest["predictors"][:1]) or (TRUE,)
    estimator = asked.estimator or [*manifest["estimators"], DRAFT][0]
    methods = []
    for budget in asked.budgets:
        for spec, policy in policies.items():
            for predictor in predictors if policy.needs is ExpertNeed.PREDICTED else predictors[:1]:
                several = policy.needs is ExpertNeed.PREDICTED and len(predictors) > 1
                label = f"{spec} with {predictor}" if several else spec
                asked_for = predictor if policy.needs is ExpertNeed.PREDICTED and predictor != TRUE else None
                cost = None if costs is None else costs.cost(asked_for)
                methods.append(ReplayMethod(label, policy, budget, predictor, estimator, cost))
    return methods


def replay_recording(folder: Path, asked: ReplayAsked) -> Replayed:
    """Replay a recording.

    Raises:
        UserError: it cannot be read, or lacks what is asked for.
    """
    if asked.limit is not None and asked.limit < 1:
        raise UserError(f"--limit {asked.limit}: expected an integer of at least 1")
    whole = open_recording(folder)
    policies = policies_of(asked, whole.manifest)
    recording = replace(whole, entries=whole.entries[: asked.limit])
    chosen = {entry.id: request for entry, request in recording.requests()}
    if not any(request.positions for request in chosen.values()):
        raise UserError(
            f"recording {folder}: every output in it ended at its first token, which the prefill gives, so that there "
            "is no step to replay; expected a recording of longer outputs"
        )
    costs = None
    if asked.cost_model is not None:
        costs = read_costs(asked.cost_model, recording.manifest, list(chosen.values()))
    methods = methods_of(asked, policies, recording.manifest, costs)
    geometry, missing = recording.manifest["geometry"], recording.manifest["outputs"] - len(whole.entries)
    plain = plain_decoding(chosen, None if costs is None else costs.cost(None))
    found: list[list[ReplayedRequest]] = [[] for _ in methods]
    for each in replay(chosen.items(), methods, geometry["experts"]):
        for column, replayed in zip(found, each, strict=True):
            column.append(replayed)
    return Replayed(
        recording,
        tuple(_rows(plain, methods, found, geometry["moe_layers"], costs)),
        (*plain, *(each for column in found for each in column)),
        tuple(_notes(asked, recording, chosen.values(), methods, costs, missing)),
        None if costs is None else costs.name,
    )


def _rows(
    plain: Sequence[ReplayedRequest],
    methods: Sequence[ReplayMethod],
    found: Sequence[Sequence[ReplayedRequest]],
    layers: int,
    costs: ReplayCosts | None,
) -> list[ReplayRow]:
    def faster(slow: Sequence[ReplayedRequest] | None, fast: Sequence[ReplayedRequest]) -> Ratio | None:
        if slow is None or any(each.seconds is None for each in (*slow, *fast)):
            return None
        pairs = [(a, b) for a, b in zip(slow, fast, strict=True) if b.steps]
        return paired_ratio([a.seconds or 0.0 for a, _ in pairs], [b.seconds or 0.0 for _, b in pairs])

    def rate(budget: int, name: str) -> float | None:
        for method, each in zip(methods, found, strict=True):
            if method.budget == budget and method.policy.name == name:
                ratio = faster(plain, each)
                return None if ratio is None else ratio.value
        return None

    baselines = {m.budget: each for m, each in zip(methods, found, strict=True) if m.policy.name == CONFIDENCE}
    columns = [(None, plain), *zip(methods, found, strict=True)]
    rows = []
    for method, each in columns:
        steps = sum(request.steps for request in each)
        experts = sum(request.expert_pairs for request in each) / steps / layers if steps else 0.0
        overlaps = [(request.overlap, request.steps) for request in each if request.overlap is not None]
        speedup = faster(plain, each)
        base = None if method is None else rate(method.budget, CONFIDENCE)
        headroom: dict[str, float | None] = {}
        judged = method is not None and method.policy.name not in (CONFIDENCE, *YARDSTICKS)
        if judged and method is not None and base is not None and speedup is not None and speedup.value is not None:
            for name in YARDSTICKS:
                most = rate(method.budget, name)
                if most is not None:
                    headroom[name] = (speedup.value - base) / (most - base) if most > base * LEAST_HEADROOM else None
        rows.append(
            ReplayRow(
                label=AR if method is None else method.label,
                budget=None if method is None else method.budget,
                sees_ahead=method is not None and method.sees_ahead,
                steps=steps,
                acceptance_length=sum(request.emitted for request in each) / steps if steps else 0.0,
                active_experts=experts,
                projected_experts=experts * costs.experts_scale if costs is not None and costs.projected else None,
                verified_tokens=sum(request.selected for request in each) / steps if steps else 0.0,
                overlap=sum(o * n for o, n in overlaps) / sum(n for _, n in overlaps) if overlaps else None,
                speedup=speedup,
                over_confidence=None if method is None else faster(baselines.get(method.budget), each),
                headroom=headroom,
            )
        )
    return rows


def _notes(
    asked: ReplayAsked,
    recording: Recording,
    requests: Collection[RecordedRequest],
    methods: Sequence[ReplayMethod],
    costs: ReplayCosts | None,
    missing: int,
) -> list[str]:
    manifest = recording.manifest
    notes = [
        f"replayed from {recording.folder}: {len(recording.entries)} requests of {manifest['suite']}, "
        f"{manifest['target']}, T = {manifest['temperature']:g}; α and E are those of a live run"
    ]
    without = sum(request.positions == 0 for request in requests)
    if without:
        notes.append(f"{without} of {len(requests)} outputs ended at their first token: they have no step")
    if missing:
        notes.append(f"interrupted: {missing} of {manifest['outputs']} requests are not recorded (--resume goes on)")
    policies = [method.policy for method in methods]
    if asked.predictors and not any(policy.needs is ExpertNeed.PREDICTED for policy in policies):
        notes.append(f"--predictor {', '.join(asked.predictors)}: no policy here looks at predicted experts")
    if asked.estimator is not None and not any(policy.acceptance is AcceptanceNeed.ESTIMATED for policy in policies):
        notes.append(f"--acceptance {asked.estimator}: no policy here looks at estimates of acceptance")
    if costs is not None:
        notes.append(costs.note if costs.projected else f"speed-ups are modelled, not measured: {costs.note}")
    if any(method.policy.acceptance is AcceptanceNeed.ESTIMATED for method in methods):
        notes.append(f"acceptance as estimated by {methods[0].estimator}")
    ahead = sorted({method.label for method in methods if method.sees_ahead})
    if ahead:
        notes.append(f"{', '.join(ahead)}: looks at what only an extra pass over the tree can tell; a yardstick")
    ties = sum(entry.ties for entry in recording.entries)
    if ties:
        notes.append(f"at {ties} positions the recorded pass chose another token than plain decoding did")
    return notes


def replay_tables(found: Replayed) -> list[Table]:
    """One table, a line a method and budget."""
    modelled = any(row.speedup is not None for row in found.rows)
    table = Table(
        title=Text("replay" if found.costs is None else f"replay, {found.costs}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    projected = any(row.projected_experts is not None for row in found.rows)
    heads = ["method", "γ", "α", "E", *(["E, projected"] if projected else []), "verified", "overlap"]
    heads += (
        ["projected speed-up" if projected else "modelled speed-up", "over confidence", "headroom closed"]
        if modelled
        else []
    )
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    for row in found.rows:
        cells = [
            row.label,
            NONE if row.budget is None else str(row.budget),
            f"{row.acceptance_length:.3f}",
            f"{row.active_experts:.2f}",
            *([] if row.projected_experts is None else [f"{row.projected_experts:.2f}"]),
            f"{row.verified_tokens:.2f}",
            NONE if row.overlap is None else f"{row.overlap * 100:.1f} %",
        ]
        if modelled:
            closed = [f"{name} {value * 100:.0f} %" for name, value in row.headroom.items() if value is not None]
            cells += [_ratio(row.speedup), _ratio(row.over_confidence), ", ".join(closed) or NONE]
        table.add_row(*map(Text, cells))
    return [table]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None or ratio.value is None:
        return NONE
    if ratio.interval is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.interval.low:.3f}–{ratio.interval.high:.3f})"
