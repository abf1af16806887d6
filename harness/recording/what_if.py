"""Costs to reckon a replay with: a measured cost model, or a projection to a published device and geometry.

A projection's file is YAML. It assumes that a pass reads its weights once, at a share of the device's bandwidth, and
takes some fixed time besides; and that the target in question has, layer by layer, the experts in use that the recorded
one has, in proportion to K. Nothing of it is measured, and every table that comes of it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ecospec.errors import UserError, nearest
from ecospec.harness.costs.saved import SavedCostModel, read_cost_model
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.policies import CostModel, ExpertSets, count_pairs
from ecospec.policies.growing import grow_by_score

FOLDER = Path(__file__).resolve().parent.parent / "projections"
SUFFIXES = (".yaml", ".yml")
POSITIONS = 200
"""Recorded positions, evenly spread, over which the pairs of n nodes are averaged."""


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
        expert_bytes: of one routed expert. always_read_bytes: what a pass reads whatever is routed.
        fixed_seconds: of a pass, besides reading. token_seconds: for every token of a pass.
        draft_seconds, predict_seconds, other_seconds: of a step.
    """

    name: str
    source: str
    bandwidth: float = Field(gt=0)
    moe_layers: int = Field(gt=0)
    experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    expert_bytes: float = Field(gt=0)
    always_read_bytes: float = Field(ge=0)
    bandwidth_share: float = Field(default=1.0, gt=0, le=1)
    fixed_seconds: float = Field(default=0.0, ge=0)
    token_seconds: float = Field(default=0.0, ge=0)
    draft_seconds: float = Field(default=0.0, ge=0)
    predict_seconds: float = Field(default=0.0, ge=0)
    other_seconds: float = Field(default=0.0, ge=0)

    def cost(self, predicts: bool, recorded: Mapping[str, Any], pairs_by_tokens: Sequence[float]) -> CostModel:
        """Seconds of a step in terms of the recorded target's tokens and (layer, expert) pairs.

        Args:
            recorded: the geometry of the recorded target. pairs_by_tokens: of its own pairs.
        """
        speed = self.bandwidth * self.bandwidth_share
        return CostModel(
            fixed_seconds=self.fixed_seconds + self.always_read_bytes / speed,
            pair_seconds=self.expert_bytes / speed * self.experts_scale(recorded) * self.layers_scale(recorded),
            token_seconds=self.token_seconds,
            other_seconds=self.draft_seconds + self.other_seconds + (self.predict_seconds if predicts else 0.0),
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
        cost: the model of a method with this predictor (a label), or with none.
        experts_scale: what E of the recording is multiplied by.
        projected: whether nothing of it was measured.
    """

    name: str
    note: str
    cost: Callable[[str | None], CostModel]
    experts_scale: float = 1.0
    projected: bool = False


def projection_names() -> list[str]:
    """The projections that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_projection(path: Path) -> Projection:
    """A projection's file.

    Raises:
        UserError: it cannot be read, or a value is missing, unknown or out of bounds.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(Projection).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"--cost-model {path}: {where}: {first['msg']} (docs/replay.md has the keys)") from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--cost-model {path}: not readable ({' '.join(str(error).split())})") from error


def read_costs(given: Path, manifest: Mapping[str, Any], requests: Sequence[RecordedRequest]) -> ReplayCosts:
    """Costs from a file, or from a projection that ships with the package, by its name.

    Args:
        manifest: of the recording. requests: of it; a projection's pairs by number of nodes are theirs.

    Raises:
        UserError: there is no such file, it is damaged, or a measured model is not of the recorded target.
    """
    if given.suffix not in SUFFIXES and not given.exists():
        known = projection_names()
        if str(given) not in known:
            raise UserError(f"--cost-model {given}: no such file or projection; {nearest(str(given), known)}")
        given = FOLDER / f"{given}.yaml"
    if given.suffix in SUFFIXES:
        projection = read_projection(given)
        geometry = manifest["geometry"]
        pairs = pairs_by_tokens(requests, geometry["experts"])
        return ReplayCosts(
            name=projection.name,
            note=f"PROJECTION to {projection.name}, not measured: {' '.join(projection.source.split())}",
            cost=lambda label: projection.cost(label is not None, geometry, pairs),
            experts_scale=projection.experts_scale(geometry),
            projected=True,
        )
    return _measured(read_cost_model(given, "--cost-model"), given, manifest)


def _measured(saved: SavedCostModel, path: Path, manifest: Mapping[str, Any]) -> ReplayCosts:
    """The saved model, with its steps of the recording's drafter and tree size."""
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
    return ReplayCosts(saved.key.device, "; ".join((note, *saved.fit.warnings)), narrowed.for_method)


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
