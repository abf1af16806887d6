"""The fit of a cost model against planted numbers, hand calculation and an independent solver."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import linregress

from ecospec.harness.costs.fitting import Timing, fit_cost_model
from ecospec.harness.costs.forcing import sweep_cells, token_counts

LAYERS = 6
CELLS = sweep_cells(token_counts(16), 64, 8)
A, B, C = 8e-3, 90e-6, 400e-6


def timings(a: float, b: float, c: float, noise: float = 0.0, seed: int = 0) -> list[Timing]:
    """What the embedded target's sweep would give, with log-normal noise."""
    rng = np.random.default_rng(seed)
    made = []
    for cell in CELLS:
        pairs = cell.active_experts * LAYERS
        exact = a + b * pairs + c * cell.tokens
        made.append(Timing(cell.tokens, pairs, float(exact * np.exp(noise * rng.normal())), cell.held_out))
    return made


def test_planted_numbers_are_found_without_noise() -> None:
    fit = fit_cost_model(timings(A, B, C))
    assert [each.seconds for each in (fit.fixed, fit.pair, fit.token)] == pytest.approx([A, B, C])
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.held_out_error == pytest.approx(0.0, abs=1e-9)
    assert fit.warnings == ()


def test_planted_numbers_lie_in_the_intervals_as_often_as_these_say() -> None:
    """95 % intervals over 200 noisy sweeps: 190 expected, and 5 standard deviations of a binomial are 15."""
    covered = np.zeros(3)
    for seed in range(200):
        fit = fit_cost_model(timings(A, B, C, noise=0.03, seed=seed))
        for i, (each, true) in enumerate(((fit.fixed, A), (fit.pair, B), (fit.token, C))):
            assert each.interval is not None
            covered[i] += each.interval.low <= true <= each.interval.high
        assert fit.pair.seconds == pytest.approx(B, rel=0.1)
        assert not any("expert is not distinguishable" in warning for warning in fit.warnings)
    assert (np.abs(covered - 190) <= 15).all(), covered


def test_r_squared_and_the_held_out_error_by_hand() -> None:
    """T = 1 + pairs + tokens, but for the last, 1 more, and of two held out one takes 20 where the model says 10."""
    exact = [Timing(n, p, 1.0 + p + n) for n, p in ((1, 2), (2, 2), (2, 4), (3, 3), (3, 6), (4, 8))]
    fit = fit_cost_model([*exact, Timing(2, 3, 6.0, held_out=True), Timing(3, 6, 20.0, held_out=True)])
    assert fit.held_out_error == pytest.approx(0.5)
    assert any("at a held-out number of experts the model is 50 % off" in warning for warning in fit.warnings)
    last = dataclasses.replace(exact[-1], seconds=14.0)
    bent = fit_cost_model([*exact[:-1], last])
    seconds = np.array([each.seconds for each in (*exact[:-1], last)])
    model = np.array([bent.verify_seconds(each.tokens, each.expert_pairs) for each in (*exact[:-1], last)])
    by_hand = 1 - ((seconds - model) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    assert bent.r_squared == pytest.approx(by_hand)
    assert 0.9 < by_hand < 0.999


def test_it_is_the_least_sum_of_squared_relative_residuals() -> None:
    cells = [each for each in timings(A, B, C, noise=0.1, seed=3) if not each.held_out]
    fit = fit_cost_model(cells)

    def loss(values: np.ndarray) -> float:
        a, b, c = values * (A, B, C)
        return sum(((a + b * each.expert_pairs + c * each.tokens) / each.seconds - 1) ** 2 for each in cells)

    found = minimize(loss, np.ones(3), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 9999})
    assert [each.seconds for each in (fit.fixed, fit.pair, fit.token)] == pytest.approx(found.x * (A, B, C), rel=1e-4)


def test_standard_errors_are_those_of_a_line() -> None:
    """With all T nearly 1 the weights are, and with tokens that do not matter, pairs give an ordinary regression."""
    rng = np.random.default_rng(0)
    pairs = np.arange(40)
    tokens = rng.permutation(40) % 7
    seconds = 1.0 + 1e-6 * pairs + 1e-5 * rng.normal(size=40)
    fit = fit_cost_model([Timing(int(n), int(p), float(t)) for n, p, t in zip(tokens, pairs, seconds, strict=True)])
    line = linregress(pairs, seconds)
    assert fit.pair.standard_error == pytest.approx(line.stderr, rel=0.1)


def test_a_machine_on_which_experts_cost_nothing_is_told_apart() -> None:
    """At 5 % noise: of 100 sweeps with b = 0 at most 5 % or so look otherwise; of those with b, none."""
    warned = [
        any("expert is not distinguishable from 0" in warning for warning in fit_cost_model(each).warnings)
        for each in (timings(2e-2, 0.0, 1e-5, 0.05, seed) for seed in range(100))
    ]
    assert sum(warned) >= 90


def test_noise_is_warned_of() -> None:
    said = " ".join(fit_cost_model(timings(A, B, C, noise=1.0)).warnings)
    assert "below 0.9: experts and tokens explain too little" in said
    assert "at a held-out number of experts the model is" in said


def test_coefficients_below_0_are_held_there_and_named() -> None:
    fit = fit_cost_model(timings(A, B, -50e-6))
    assert fit.token.seconds == 0.0
    assert fit.token.interval is not None
    assert fit.token.interval.high < 0
    assert "the time per token c came out below 0 and is held at 0" in fit.warnings
    # the others make up for it as well as they can: no other pair of numbers of at least 0 is closer
    assert fit.pair.seconds > 0


def test_a_single_token_that_takes_another_path_is_named() -> None:
    cells = timings(A, B, C)
    slow = [dataclasses.replace(each, seconds=2 * each.seconds) if each.tokens == 1 else each for each in cells]
    assert any("a pass over one token is" in warning for warning in fit_cost_model(slow).warnings)


@pytest.mark.parametrize(("off", "said"), [(0.3, "30 % longer"), (-0.3, "30 % less"), (0.1, "")])
def test_real_draft_trees_that_take_other_times_are_named(off: float, said: str) -> None:
    found = " ".join(fit_cost_model(timings(A, B, C), text_error=off).warnings)
    assert (said in found) if said else not found


def test_cells_that_do_not_determine_the_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit_cost_model([Timing(n, 8 * n, 1.0 + n) for n in range(1, 9)])


def test_a_fit_without_freedom_or_held_out_cells_says_so() -> None:
    fit = fit_cost_model([Timing(1, 2, 3.0), Timing(2, 2, 4.0), Timing(2, 4, 6.0)])
    assert (fit.pair.standard_error, fit.pair.interval, fit.held_out_error) == (None, None, None)
    assert any("no cell could be held out" in warning for warning in fit.warnings)
