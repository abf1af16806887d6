"""The cost model's fit, and what speaks against believing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.stats import t as student

from ecospec.harness.costs.saved import Coefficient, Fit, Interval

R_SQUARED_LEAST = 0.9
HELD_OUT_MOST = 0.10
"""How far off the model may be at a cell that it was fitted without."""
SINGLE_MOST = 0.15
"""How far off it may be at a single token, which takes other paths through the libraries than several."""
TEXT_MOST = 0.20
"""How far off it may be, in the median, for passes over real draft trees."""
NAMES = ("fixed time a", "time per expert b", "time per token c")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """One cell: what a pass reads, how long it took, and whether the fit does without it."""

    tokens: int
    expert_pairs: int
    seconds: float
    held_out: bool = False


def fit_cost_model(timings: Sequence[Timing], text_error: float | None = None) -> Fit:
    """T = a + b · pairs + c · tokens by least squares of the *relative* residuals.

    A pass that takes twice as long is twice as uncertain, so each cell is weighed by 1 / T². The coefficients that are
    used are those of the fit bounded at 0, since no pass gets faster by reading more; where the bound does not act
    these are the unbounded ones, to which standard errors and intervals (Student's t) belong. R² is the ordinary one,
    1 − Σ residual² / Σ (T − mean)², of the cells that were fitted.

    Raises:
        ValueError: the cells do not determine the three numbers.
    """
    kept = [each for each in timings if not each.held_out]
    design, seconds = _design(kept), np.array([each.seconds for each in kept])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError("these cells do not determine a, b and c; expected experts and tokens that vary by themselves")
    relative = design / seconds[:, None]
    scale = np.abs(relative).max(axis=0)  # numbers of pairs are hundreds of times larger than 1
    relative = relative / scale
    ones = np.ones(len(kept))
    free = np.linalg.lstsq(relative, ones, rcond=None)[0] / scale
    bounded = nnls(relative, ones)[0] / scale
    freedom = len(kept) - design.shape[1]
    errors = _standard_errors(relative, ones - relative @ (free * scale), freedom, scale)
    coefficients = []
    for used, value, error in zip(bounded, free, errors, strict=True):
        interval = None
        if error is not None:
            half = float(student.ppf(0.975, freedom)) * error
            interval = Interval(float(value) - half, float(value) + half)
        coefficients.append(Coefficient(float(used), error, interval))
    r_squared = _r_squared(seconds, design @ bounded)
    fixed, pair, token = coefficients
    fit = Fit(fixed, pair, token, r_squared=r_squared, text_error=text_error)
    held_out = _worst(fit, [each for each in timings if each.held_out])
    return replace(fit, held_out_error=held_out, warnings=tuple(_warnings(fit, free, held_out, timings)))


def _design(timings: Sequence[Timing]) -> Floats:
    return np.array([[1.0, each.expert_pairs, each.tokens] for each in timings])


def _standard_errors(relative: Floats, residuals: Floats, freedom: int, scale: Floats) -> list[float | None]:
    if freedom < 1:
        return [None] * len(scale)
    variance = float(residuals @ residuals) / freedom
    covariance = variance * np.linalg.inv(relative.T @ relative)
    return [float(value) for value in np.sqrt(np.diag(covariance)) / scale]


def _r_squared(seconds: Floats, model: Floats) -> float:
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return 1.0 - float(((seconds - model) ** 2).sum()) / spread if spread else 0.0


def _worst(fit: Fit, timings: Sequence[Timing]) -> float | None:
    return max((abs(_off(fit, each)) for each in timings), default=None)


def _off(fit: Fit, timing: Timing) -> float:
    """(model − T) / T of a cell."""
    return fit.verify_seconds(timing.tokens, timing.expert_pairs) / timing.seconds - 1.0


def _warnings(fit: Fit, free: Floats, held_out: float | None, timings: Sequence[Timing]) -> list[str]:
    said = []
    for name, value in zip(NAMES, free, strict=True):
        if value < 0:
            said.append(f"the {name} came out below 0 and is held at 0")
    if not fit.pair.is_distinguishable:
        said.append(
            "the time per expert is not distinguishable from 0: verification here is not bound by reading experts, and "
            "a policy that saves experts saves no time"
        )
    if fit.r_squared is not None and fit.r_squared < R_SQUARED_LEAST:
        said.append(
            f"R² is {fit.r_squared:.3f}, below {R_SQUARED_LEAST}: experts and tokens explain too little of how long a "
            "pass takes"
        )
    if held_out is None:
        said.append("no cell could be held out, so that nothing says how well the model foretells")
    elif held_out > HELD_OUT_MOST:
        said.append(
            f"at a held-out number of experts the model is {100 * held_out:.0f} % off; expected "
            f"{100 * HELD_OUT_MOST:.0f} % at most"
        )
    single = [abs(_off(fit, each)) for each in timings if each.tokens == 1]
    if single and max(single) > SINGLE_MOST:
        said.append(
            f"a pass over one token is {100 * max(single):.0f} % off the model: it takes another path through the "
            "libraries than several"
        )
    if fit.text_error is not None and abs(fit.text_error) > TEXT_MOST:
        said.append(
            f"passes over real draft trees take {100 * abs(fit.text_error):.0f} % "
            f"{'longer' if fit.text_error > 0 else 'less'} than the model says"
        )
    return said
