"""A replay's methods, its table, and what it says under it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ecospec.errors import UserError, nearest
from ecospec.harness.fitted_tables import Cell, Column, Kind, fitted_tables
from ecospec.harness.plugins import load_plugins
from ecospec.harness.recording.estimating import FittedEstimator, fitted_for
from ecospec.harness.recording.folder import Recording
from ecospec.harness.recording.pooling import open_recordings
from ecospec.harness.recording.replay import DRAFT, TRUE, ReplayedRequest, ReplayMethod, plain_decoding, replay
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.harness.recording.what_if import ReplayCosts, read_costs
from ecospec.harness.records import AR
from ecospec.harness.report import LEAST_HEADROOM, YARDSTICKS
from ecospec.harness.report_notes import NONE
from ecospec.harness.report_text import ratio_cell
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

    recordings: tuple[Recording, ...]
    rows: tuple[ReplayRow, ...]
    requests: tuple[ReplayedRequest, ...]
    notes: tuple[str, ...]
    costs: str | None

    def to_json(self) -> dict[str, Any]:
        """All figures, and the sums by request that they are made of."""
        return {
            "schema": 2,
            "recordings": [str(recording.folder) for recording in self.recordings],
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
            f"acceptance estimator {asked.estimator!r} is not in the recording: "
            f"{nearest(asked.estimator, estimators)}; what 'record --acceptance' asks can be replayed"
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
                estimates = policy.acceptance is AcceptanceNeed.ESTIMATED and estimator != DRAFT
                cost = (
                    None if costs is None else costs.cost(asked_for, estimator.partition(":")[0] if estimates else None)
                )
                methods.append(ReplayMethod(label, policy, budget, predictor, estimator, cost))
    return methods


def replay_recordings(folders: Sequence[Path], asked: ReplayAsked) -> Replayed:
    """Replay one recording, or several as one.

    Raises:
        UserError: one cannot be read, they do not belong together, or they lack what is asked for.
    """
    if asked.limit is not None and asked.limit < 1:
        raise UserError(f"--limit {asked.limit}: expected an integer of at least 1")
    whole = open_recordings(folders)
    recordings = tuple(replace(recording, entries=recording.entries[: asked.limit]) for recording in whole)
    fitted = fitted_for(asked.estimator, recordings) if asked.estimator is not None else None
    manifest = whole[0].manifest
    if fitted is not None:
        manifest = {**manifest, "estimators": [*manifest["estimators"], asked.estimator]}
    policies = policies_of(asked, manifest)
    chosen = {entry.id: request for recording in recordings for entry, request in recording.requests()}
    if not any(request.positions for request in chosen.values()):
        raise UserError(
            f"recording {', '.join(str(each.folder) for each in whole)}: every output in it ended at its first token, "
            "which the prefill gives, so that there is no step to replay; expected a recording of longer outputs"
        )
    if fitted is not None:
        chosen = {each: fitted.added_to(request) for each, request in chosen.items()}
    costs = None
    if asked.cost_model is not None:
        costs = read_costs(asked.cost_model, manifest, list(chosen.values()))
    methods = methods_of(asked, policies, manifest, costs)
    geometry = manifest["geometry"]
    plain = plain_decoding(chosen, None if costs is None else costs.cost(None, None))
    found: list[list[ReplayedRequest]] = [[] for _ in methods]
    for each in replay(chosen.items(), methods, geometry["experts"]):
        for column, replayed in zip(found, each, strict=True):
            column.append(replayed)
    return Replayed(
        recordings,
        tuple(_rows(plain, methods, found, geometry["moe_layers"], costs)),
        (*plain, *(each for column in found for each in column)),
        tuple(_notes(asked, whole, recordings, chosen.values(), methods, costs, fitted)),
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
    whole: Sequence[Recording],
    recordings: Sequence[Recording],
    requests: Collection[RecordedRequest],
    methods: Sequence[ReplayMethod],
    costs: ReplayCosts | None,
    fitted: FittedEstimator | None,
) -> list[str]:
    manifest = recordings[0].manifest
    folders = ", ".join(str(each.folder) for each in recordings)
    suites = ", ".join(dict.fromkeys(str(each.manifest["suite"]) for each in recordings))
    notes = [
        f"replayed from {folders}: {len(requests)} requests of {suites}, "
        f"{manifest['target']}, T = {manifest['temperature']:g}; α and E are those of a live run"
    ]
    if len(recordings) > 1:
        pooled = "α and E are pooled over the steps of all suites"
        notes.append(pooled if costs is None else f"{pooled}, speed-ups over their seconds")
    without = sum(request.positions == 0 for request in requests)
    if without:
        notes.append(f"{without} of {len(requests)} outputs ended at their first token: they have no step")
    for each in whole:
        outputs = each.manifest["outputs"]
        if outputs > len(each.entries):
            missing = outputs - len(each.entries)
            notes.append(
                f"{each.folder}: interrupted: {missing} of {outputs} requests are not recorded (--resume goes on)"
            )
    policies = [method.policy for method in methods]
    if asked.predictors and not any(policy.needs is ExpertNeed.PREDICTED for policy in policies):
        notes.append(f"--predictor {', '.join(asked.predictors)}: no policy here looks at predicted experts")
    if asked.estimator is not None and not any(policy.acceptance is AcceptanceNeed.ESTIMATED for policy in policies):
        notes.append(f"--acceptance {asked.estimator}: no policy here looks at estimates of acceptance")
    if costs is not None:
        notes.append(costs.note if costs.projected else f"speed-ups are modelled, not measured: {costs.note}")
    if any(method.policy.acceptance is AcceptanceNeed.ESTIMATED for method in methods):
        how = _saved(manifest, methods[0].estimator) if fitted is None else fitted.note
        notes.append(f"acceptance as estimated by {methods[0].estimator}{how}")
        name = methods[0].estimator.partition(":")[0]
        if costs is not None and costs.estimators is not None and name not in (DRAFT, *costs.estimators):
            notes.append(
                f"the cost model has no T_estimate of {name}, so that these speed-ups leave it out; a run that asks it "
                "measures it"
            )
    ahead = sorted({method.label for method in methods if method.sees_ahead})
    if ahead:
        notes.append(f"{', '.join(ahead)}: looks at what only an extra pass over the tree can tell; a yardstick")
    ties = sum(entry.ties for each in recordings for entry in each.entries)
    if ties:
        notes.append(f"at {ties} positions the recorded pass chose another token than plain decoding did")
    return notes


def _saved(manifest: Mapping[str, Any], label: str) -> str:
    """Where the recording found an estimator that its user named no folder of, and a hash of that."""
    columns = [manifest.get(name) or [] for name in ("estimators", "estimators_folders", "estimators_sha256")]
    for name, folder, sha256 in zip(*columns, strict=False):
        if name == label and folder is not None:
            return f", when it was recorded: {folder} (sha256 {str(sha256)[:12]})"
    return ""


def replay_tables(found: Replayed, width: int) -> list[Table]:
    """A line a method and budget; several tables where all columns side by side are wider than ``width``."""
    modelled = any(row.speedup is not None for row in found.rows)
    projected = any(row.projected_experts is not None for row in found.rows)
    columns = [Column("method", Kind.NAME), Column("γ", Kind.NAME), Column("α"), Column("E")]
    columns += [Column("E, projected")] if projected else []
    columns += [Column("verified"), Column("overlap")]
    if modelled:
        speedup = "projected speed-up" if projected else "modelled speed-up"
        columns += [Column(speedup), Column("over confidence"), Column("headroom closed")]
    rows: list[list[Cell]] = []
    for row in found.rows:
        cells: list[Cell] = [
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
            cells += [ratio_cell(row.speedup), ratio_cell(row.over_confidence), tuple(closed) or NONE]
        rows.append(cells)
    return fitted_tables("replay" if found.costs is None else f"replay, {found.costs}", columns, rows, width)
