"""How good estimates of acceptance are: Brier score, log loss, and the reliability curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ecospec.policies.arrays import FloatArray

BINS = 10
SMALLEST = 1e-6
"""A probability of 0 for what happened would cost an infinite log loss; it counts as this."""


@dataclass(frozen=True)
class Bin:
    """Nodes whose estimate lies in one tenth from 0 to 1: their mean estimate, and the share that was accepted."""

    nodes: int
    estimated: float
    accepted: float


@dataclass(frozen=True)
class Judgement:
    """Estimates against what happened.

    Attributes:
        brier: mean (estimate − accepted)². log_loss: mean −log of the probability given to what happened, in nats.
        calibration_error: mean |estimated − accepted| of the bins, by their nodes.
        bins: those with nodes, from low to high.
    """

    nodes: int
    brier: float
    log_loss: float
    calibration_error: float
    bins: tuple[Bin, ...]


def judge(estimates: FloatArray, accepted: npt.NDArray[np.bool_]) -> Judgement:
    """Judge n estimates, n > 0.

    Raises:
        ValueError: there is none, or their numbers differ.
    """
    if not len(estimates) or estimates.shape != accepted.shape:
        raise ValueError(f"{estimates.shape} estimates of {accepted.shape} nodes")
    happened = accepted.astype(np.float64)
    given = np.clip(np.where(accepted, estimates, 1 - estimates), SMALLEST, 1.0)
    places = np.minimum((estimates * BINS).astype(int), BINS - 1)
    bins = tuple(
        Bin(int(own.sum()), float(estimates[own].mean()), float(happened[own].mean()))
        for own in (places == each for each in range(BINS))
        if own.any()
    )
    return Judgement(
        nodes=len(estimates),
        brier=float(((estimates - happened) ** 2).mean()),
        log_loss=float(-np.log(given).mean()),
        calibration_error=sum(abs(each.estimated - each.accepted) * each.nodes for each in bins) / len(estimates),
        bins=bins,
    )
