"""A cost model of round numbers, which was reckoned and not measured."""

from __future__ import annotations

from pathlib import Path

from ecospec.harness.costs.saved import (
    Coefficient,
    CostKey,
    Drafting,
    Fit,
    SavedCostModel,
    StepRest,
    cost_model_text,
)

KEY = CostKey("none", "cpu", None, "float32", "", 1, None, None, "", "", "")
DRAFTING = Drafting("mine", None, 3, 2, StepRest(1e-3, 0.0, 1e-4, 1e-4, 0.0), {}, (4.0, 6.0, 7.0), 5)


def projected(pair_seconds: float = 1e-4) -> SavedCostModel:
    """It fits any device."""
    return SavedCostModel(
        key=KEY,
        target="tiny",
        moe_layers=2,
        experts=8,
        top_k=2,
        expert_bytes=1000,
        always_read_bytes=1000,
        fit=Fit(Coefficient(1e-3), Coefficient(pair_seconds), Coefficient(1e-5)),
        points=(),
        ar_seconds=None,
        copy_bytes_per_second=1e10,
        context=10,
        pairs_by_tokens=(4.0, 6.0, 7.0, 8.0),
        windows=0,
        projection="round numbers",
    )


def fixed_costs(path: Path, pair_seconds: float) -> Path:
    """The same in a file."""
    path.write_text(cost_model_text(projected(pair_seconds)), encoding="utf-8")
    return path
