"""The cost model's arithmetic, and what it refuses."""

from __future__ import annotations

import pytest

from ecospec.policies import CostModel

MODEL = CostModel(0.010, 0.0001, 0.001, other_seconds=0.004, pairs_by_tokens=(48.0, 80.0, 100.0))


def test_verification_costs_what_its_pairs_and_tokens_cost() -> None:
    # 10 ms + 100 pairs · 0.1 ms + 4 tokens · 1 ms = 24 ms; with the rest of the step 28 ms
    assert MODEL.verify_seconds(4, 100) == pytest.approx(0.024)
    assert MODEL.step_seconds(4, 100) == pytest.approx(0.028)


@pytest.mark.parametrize(("tokens", "pairs"), [(1, 48), (2, 80), (3, 100), (4, 120), (6, 160)])
def test_expected_pairs_are_the_measured_ones_and_go_on_in_a_straight_line(tokens: int, pairs: float) -> None:
    assert MODEL.expected_pairs(tokens) == pytest.approx(pairs)


def test_expected_pairs_of_a_single_measurement_are_its_multiples() -> None:
    assert CostModel(1, 0, 0, pairs_by_tokens=(8.0,)).expected_pairs(3) == 24.0


def test_nothing_is_expected_of_no_token_or_without_a_measurement() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        MODEL.expected_pairs(0)
    with pytest.raises(ValueError, match="without pairs_by_tokens"):
        CostModel(1, 0, 0).expected_pairs(1)


@pytest.mark.parametrize(
    "values",
    [
        {"fixed_seconds": -1.0},
        {"pair_seconds": float("nan")},
        {"token_seconds": float("inf")},
        {"other_seconds": -1e-9},
        {"pairs_by_tokens": (1.0, float("nan"))},
        {"fixed_seconds": 0.0, "pair_seconds": 0.0, "token_seconds": 0.0},
        {"pairs_by_tokens": (3.0, 2.0)},
    ],
)
def test_nonsense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"cost model|never read fewer"):
        CostModel(**{"fixed_seconds": 1.0, "pair_seconds": 1.0, "token_seconds": 1.0, **values})  # type: ignore[arg-type]
