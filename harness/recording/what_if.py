"""Costs to reckon a replay with: a measured cost model, or a projection to a published device and geometry.

A projection's file is YAML. It assumes that a pass reads its weights once, at a share of the device's bandwidth, and
takes some fixed time besides; and that the target in question has, layer by layer, the experts in use that the recorded
one has, in proportion to K. Nothing of it is measured, and every table that comes of it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ecospec.errors import UserError, nearest, one_line
from ecospec.harness.checked import first_problem
from ecospec.harness.costs.projected import projected_for
from ecospec.harness.costs.saved import SavedCostModel, read_cost_model
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.harness.yaml_file import read_yaml
from ecospec.policies import CostModel, ExpertSets, count_pairs
from ecospec.policies.growing import grow_by_score

FOLDER = Path(__file__).resolve().parent.parent / "projections"
SUFFIXES = (".yaml", ".yml")
POSITIONS = 200
"""Recorded positions, evenly spread, over which the pairs of n nodes are averaged."""


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, not a truth value")
    return value


Count = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=1_000_000)]
Bytes = Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0, le=1e18)]
Seconds = Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0, le=1e6)]
"""What published devices and models stay far within, and no product of which overflows."""


@checked_dataclass(
    frozen=True,
    config=ConfigDict(extra="forbid", allow_inf_nan=False, alias_generator=lambda name: name.replace("_", "-")),
)
class Projection:
    """A target on a device, as published or assumed.

    Attributes:
        name: what the table is headed with.
        source: where the figures are from, and which of them are assumed.
        bandwidth: bytes per second that the device can read. bandwidth_share: of it, what a pass reaches.
        moe_layers, experts, top_k: of the target; K of the experts of a layer are a token's.
        expert_bytes: of one routed expert. always_read_bytes: what a pass reads whatever is routed.
        fixed_seconds: of a pass, besides reading. token_seconds: for every token of a pass.
        draft_seconds, predict_seconds, estimate_seconds, other_seconds: of a step.
    """

    name: str
    source: str
    bandwidth: Annotated[float, BeforeValidator(_no_truth_value), Field(ge=1e6, le=1e18)]
    moe_layers: Count
    experts: Count
    top_k: Count
    expert_bytes: Annotated[Bytes, Field(ge=1)]
    always_read_bytes: Bytes
    bandwidth_share: Annotated[float, BeforeValidator(_no_truth_value), Field(ge=1e-3, le=1)] = 1.0
    fixed_seconds: Seconds = 0.0
    token_seconds: Seconds = 0.0
    draft_seconds: Seconds = 0.0
    predict_seconds: Seconds = 0.0
    estimate_seconds: Seconds = 0.0
    other_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"top-k {self.top_k} of {self.experts} experts: expected at most as many")

    def cost(
        self, predicts: bool, estimates: bool, recorded: Mapping[str, Any], pairs_by_tokens: Sequence[float]
    ) -> CostModel:
        """Seconds of a step in terms of the recorded target's tokens and (layer, expert) pairs.

        Args:
            predicts, estimates: whether a step asks a predictor, and an acceptance estimator.
            recorded: the geometry of the recorded target. pairs_by_tokens: of its own pairs.
        """
        speed = self.bandwidth * self.bandwidth_share
        asking = (self.predict_seconds if predicts else 0.0) + (self.estimate_seconds if estimates else 0.0)
        return CostModel(
            fixed_seconds=self.fixed_seconds + self.always_read_bytes / speed,
            pair_seconds=self.expert_bytes / speed * self.experts_scale(recorded) * self.layers_scale(recorded),
            token_seconds=self.token_seconds,
            other_seconds=self.draft_seconds + self.other_seconds + asking,
            pairs_by_tokens=tuple(pairs_by_tokens),
        )

    def experts_scale(self, recorded: Mapping[str, Any]) -> float:
        """Experts of a layer in use for each that is in use in a layer of the recorded target."""
        return float(self.top_k / recorded["top_k"])

    def layers_scale(self, recorded: Mapping[str, Any]) -> float:
        """MoE layers for each of the recorded target's."""
        return float(self.moe_layers / recorded["moe_layers"])


@dataclass(frozen=True)
class ReplayCosts:
    """What a replay is reckoned with.

    Attributes:
        name: of the device or the projection. note: what to say of the seconds.
        cost: the model of a method with this predictor (a label), or with none, and this acceptance estimator or none.
        experts_scale: what E of the recording is multiplied by.
        projected: whether nothing of it was measured.
        estimators: whose time is in it, by name; None where that is the projection's to say.
    """

    name: str
    note: str
    cost: Callable[[str | None, str | None], CostModel]
    experts_scale: float = 1.0
    projected: bool = False
    estimators: frozenset[str] | None = None


def projection_names() -> list[str]:
    """The projections that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_projection(path: Path) -> Projection:
    """A projection's file.

    Raises:
        UserError: it cannot be read, or a value is missing, unknown or out of bounds.
    """
    found = read_yaml(f"--cost-model {path}", path)
    try:
        return TypeAdapter(Projection).validate_python(found)
    except (ValidationError, OverflowError) as error:  # the latter of an integer that no float can hold
        raise UserError(f"--cost-model {path}: {first_problem(error)} (docs/replay.md has the keys)") from error


def read_costs(given: Path, manifest: Mapping[str, Any], requests: Sequence[RecordedRequest]) -> ReplayCosts:
    """Costs from a file, or from a projection that ships with the package, by its name.

    Args:
        manifest: of the recording. requests: of it; a projection's pairs by number of nodes are theirs.

    Raises:
        UserError: there is no such file, it is damaged, or a measured model is not of the recorded target.
    """
    try:
        there = given.exists()
    except OSError as error:  # a name that no file can have
        raise UserError(f"--cost-model {given}: not readable ({error.strerror})") from error
    if given.suffix not in SUFFIXES and not there:
        known = projection_names()
        if str(given) not in known:
            raise UserError(f"--cost-model {given}: no such file or projection; {nearest(str(given), known)}")
        given = FOLDER / f"{given}.yaml"
    if given.suffix in SUFFIXES:
        projection = read_projection(given)
        geometry = manifest["geometry"]
        pairs = pairs_by_tokens(requests, geometry["experts"])
        try:
            costs = {
                (predicts, estimates): projection.cost(predicts, estimates, geometry, pairs)
                for predicts, estimates in product((False, True), repeat=2)
            }
        except ValueError as error:
            raise UserError(f"--cost-model {given}: cannot be reckoned with ({one_line(error)})") from error
        return ReplayCosts(
            name=projection.name,
            note="; ".join(
                (
                    f"PROJECTION to {projection.name}, not measured: {' '.join(projection.source.split())}",
                    *_overfull(projection, geometry, pairs),
                )
            ),
            cost=lambda predictor, estimator: costs[predictor is not None, estimator is not None],
            experts_scale=projection.experts_scale(geometry),
            projected=True,
        )
    return _measured(read_cost_model(given, "--cost-model"), given, manifest)


def _overfull(projection: Projection, recorded: Mapping[str, Any], pairs: Sequence[float]) -> Iterator[str]:
    """What to say where more experts would be read than there are."""
    most = max(pairs, default=0.0) / recorded["moe_layers"] * projection.experts_scale(recorded)
    if most > projection.experts:
        yield (
            f"whole trees would read {most:.0f} experts a layer of the {projection.experts} that it has: in proportion "
            "to K this recording cannot be carried over to it"
        )


def _measured(saved: SavedCostModel, path: Path, manifest: Mapping[str, Any]) -> ReplayCosts:
    """The saved model, with its steps of the recording's drafter and tree size.

    Raises:
        UserError: it was measured on another target, or has steps of other drafters alone.
    """
    if saved.projection is not None:
        return _saved_projection(saved, path, manifest)
    for what, own, recorded in (
        ("checkpoint", saved.key.checkpoint_sha256, str(manifest["target_sha256"])),
        ("dtype", saved.key.dtype, manifest["dtype"]),
    ):
        if own != recorded:
            raise UserError(
                f"--cost-model {path}: measured on another {what} ({own[:12]}) than was recorded ({recorded[:12]}); "
                "expected a profile of the recorded target, or a projection"
            )
    drafter = (manifest["drafter_spec"], manifest["drafter_sha256"])
    fitting = [each for each in saved.draftings if (each.drafter, each.drafter_sha256) == drafter]
    if not fitting:
        raise UserError(
            f"--cost-model {path}: it has no steps of drafter {manifest['drafter_spec']}; expected a profile with it"
        )
    sizes = (manifest["draft_steps"], manifest["draft_topk"])
    exact = [each for each in fitting if (each.draft_steps, each.draft_topk) == sizes]
    narrowed = saved.narrowed((exact or fitting)[0])
    other = narrowed.draftings[0]
    note = f"by the cost model of {saved.key.device}, R² {saved.fit.r_squared or 0:.3f}"
    if not exact:
        note += f"; drafting took its time at {other.draft_steps} steps, top-{other.draft_topk}"
    if saved.key.widened != manifest["widened"]:
        note += f"; its experts are widened ×{saved.key.widened}, the recorded ones ×{manifest['widened']}"
    return ReplayCosts(
        name=saved.key.device,
        note="; ".join((note, *saved.fit.warnings)),
        cost=narrowed.for_method,
        estimators=frozenset(other.estimating),
    )


def _saved_projection(saved: SavedCostModel, path: Path, manifest: Mapping[str, Any]) -> ReplayCosts:
    """A cost model that was reckoned and not measured: of no device, and so of no certain target either."""
    drafting = tuple(manifest[key] for key in ("drafter_spec", "drafter_sha256", "draft_steps", "draft_topk"))
    own = projected_for(saved, drafting, f"--cost-model {path}")
    return ReplayCosts(
        name=saved.target,
        note=f"PROJECTION of {saved.target}, not measured: {' '.join(str(saved.projection).split())}",
        cost=own.for_method,
        projected=True,
    )


def pairs_by_tokens(requests: Sequence[RecordedRequest], experts: int) -> list[float]:
    """Mean unique pairs of the 1, 2, … most confident nodes of recorded trees."""
    places = [(request, position) for request in requests for position in range(request.positions)]
    step = max(1, len(places) // POSITIONS)
    curves: list[list[int]] = []
    for request, position in places[::step]:
        tree = request.tree(position)
        sets = ExpertSets.from_topk(request.routing[:, request.rows(position)], experts)
        order = grow_by_score(tree, tree.size, tree.path_probs)
        unions = np.bitwise_or.accumulate(sets.bits[order], axis=0)
        curves.append(count_pairs(unions).tolist())
    most = max(map(len, curves), default=0)
    means: list[float] = []
    for count in range(most):
        reached = [curve[count] for curve in curves if len(curve) > count]
        means.append(max(float(np.mean(reached)), means[-1] if means else 0.0))
    return means
