"""Saved acceptance estimators that were fitted to nothing, for the tests of what finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ecospec.harness.training.acceptance import Fitted, FittedRecordings
from ecospec.harness.training.acceptance_files import save
from ecospec.predictors.acceptance.isotonic import ALL, Curve
from ecospec.predictors.acceptance.judging import judge
from ecospec.predictors.acceptance.learned import INPUTS, Weights


def made_up(
    facts: Mapping[str, Any],
    temperatures: tuple[str, ...] = ("0",),
    *,
    learned: bool = True,
    seed: int = 0,
    prompts: tuple[str, ...] = (),
) -> None:
    """Save one for each temperature; ``prompts`` are those that it says it was fitted to."""
    rng = np.random.default_rng(seed)
    shapes = {"inputs": (INPUTS, 2), "state": (32, 2), "hidden_bias": (2,), "direct": (INPUTS,), "out": (2,)}
    weights = {each.name: rng.normal(size=shapes.get(each.name, (1,))).astype(np.float32) for each in fields(Weights)}
    judged = {"draft": judge(np.array([0.1, 0.6]), np.array([False, True]))}
    fitted = Fitted({ALL: Curve((0.1, 0.9), (0.2, 0.8))}, Weights(**weights) if learned else None, judged, 8, 2)
    save(
        FittedRecordings(
            facts=facts,
            target="tiny",
            drafter="eagle3",
            fitted=dict.fromkeys(temperatures, fitted),
            prompts=dict.fromkeys(temperatures, frozenset(prompts)),
            suites=dict.fromkeys(temperatures, ("gsm8k",)),
        )
    )
