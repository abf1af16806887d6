"""What can be said of predictors from their configs and headers, by the code that loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.doctor.drafter_part import DrafterPart
from ecospec.harness.doctor.findings import Diagnosis
from ecospec.harness.doctor.headers import read_headers, stand_in
from ecospec.harness.target import Geometry
from ecospec.predictors import feature, learned, token_frequency
from ecospec.predictors.asking import bind
from ecospec.predictors.checkpoint import check_tensors, read_predictor_config
from ecospec.predictors.contract import DrafterView, Predictor, TargetView
from ecospec.predictors.pretrained import UNLOADABLE

PART = "predictor"
KINDS = (learned.KIND, feature.KIND, token_frequency.KIND)
LARGEST_HASHED_BYTES = 1 << 28
"""Of a drafter's files: above this, comparing them with those that a predictor was trained with takes too long."""


@dataclass(frozen=True)
class PredictorPart:
    """What a predictor holds: elements in the run's type on the device, and bytes in the machine's memory."""

    label: str
    elements: int
    host_bytes: int


def look_at_predictor(
    said: Diagnosis,
    label: str,
    predictor: Predictor,
    target: Geometry,
    drafter: DrafterPart | None,
    bundle: Path | None,
) -> PredictorPart | None:
    """Describe a predictor and check it against target and drafter; None where there is none that loads."""
    view = TargetView(
        moe_layers=target.moe_layers,
        experts=target.experts,
        top_k=target.top_k,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        embedding=None,
        bundle=bundle,
        drafter=None if drafter is None else DrafterView(drafter.hidden_size, drafter.folder),
    )
    said.fact(PART, "predictor", label)
    try:
        if predictor.oracle:
            bind(predictor, view)  # nothing to load: it asks the target
            return PredictorPart(label, 0, 0)
        path = getattr(predictor, "path", None)
        if predictor.name not in KINDS:
            said.note(f"predictor {label}: not one of ecospec's own, so it is not looked into")
            return None
        if path is None and bundle is None:
            raise UserError(
                f"predictor {predictor.name!r}: no trained predictor belongs to this target; expected "
                f"{predictor.name}:path=FOLDER (docs/predictors.md has the commands that train one)"
            )
        folder = Path(path) if path is not None else Path(str(bundle)) / predictor.name
        return _look(said, label, predictor.name, folder, view, drafter)
    except UserError as error:
        said.problem(str(error))
        return None


def _look(
    said: Diagnosis, label: str, kind: str, folder: Path, view: TargetView, drafter: DrafterPart | None
) -> PredictorPart:
    config = read_predictor_config(folder, kind, view)
    headers, wrong = read_headers(f"predictor {folder}", folder)
    if wrong:
        raise UserError("; ".join(wrong))
    if kind == feature.KIND:
        _look_at_its_drafter(said, folder, config, view, drafter)
    found = {name: stand_in(header) for name, header in headers.items()}
    try:
        with torch.device("meta"):
            expected = _expected(kind, config, view)
    except UNLOADABLE as error:
        raise UserError(f"predictor {folder}: its config describes no {kind} predictor ({error})") from error
    check_tensors(folder, found, expected)
    said.fact(PART, "kind", kind)
    elements = sum(tensor.numel() for tensor in expected.values())
    if kind == token_frequency.KIND:
        return PredictorPart(label, 0, 8 * elements)  # held as int64 beside the target
    if kind == feature.KIND:  # and a table of what it makes of every token
        elements += view.vocab_size * view.moe_layers * int(config["rank"])
    return PredictorPart(label, elements, 0)


def _expected(kind: str, config: dict[str, Any], view: TargetView) -> dict[str, Tensor]:
    """The tensors of a predictor's file."""
    if kind == token_frequency.KIND:
        return {"top_experts": torch.empty(view.vocab_size, view.moe_layers, view.top_k)}
    if kind == feature.KIND:
        size = 0 if view.drafter is None else view.drafter.hidden_size
        rank = int(config["rank"])
        return feature.FeaturePredictor(view.hidden_size, size, view.moe_layers, view.experts, rank).state_dict()
    model = learned.ExpertPredictor(view.hidden_size, view.moe_layers, view.experts, config["backbone"])
    return learned.used_tensors(model)


def _look_at_its_drafter(
    said: Diagnosis, folder: Path, config: dict[str, Any], view: TargetView, drafter: DrafterPart | None
) -> None:
    if drafter is None or view.drafter is None:
        raise UserError(f"predictor {folder}: it reads a drafter's states, and there is none that fits")
    size = sum(path.stat().st_size for path in drafter.folder.glob("*") if path.suffix in (".safetensors", ".bin"))
    if 0 < size <= LARGEST_HASHED_BYTES:
        feature.check_drafter(folder, config, view.drafter)
        return
    trained = config.get("drafter")
    made_for = trained.get("hidden_size") if isinstance(trained, dict) else None
    if made_for != drafter.hidden_size:
        raise UserError(
            f"predictor {folder}: trained on the states of a drafter with hidden_size = {made_for}, but drafter "
            f"{drafter.folder} has {drafter.hidden_size}"
        )
    said.note(f"predictor {folder}: whether it was trained with this very drafter is compared by a run")
