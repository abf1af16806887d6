"""Choosing a token: the law of the draws, and what they depend on."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser, filtered

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 1.5])
WARM = Sampling(temperature=1.0)


def fit(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of chi-square for these counts under a law."""
    counts, law = counts.double().flatten(), law.double().flatten()
    return float(chisquare(counts.numpy(), (law / law.sum() * counts.sum()).numpy()).pvalue)


def draws(logits: torch.Tensor, count: int, **sampling: float) -> torch.Tensor:
    """How often each token was drawn over requests of their own."""
    chosen = [
        TokenChooser(Sampling(**sampling), f"request {i}").choose(logits, 0)  # type: ignore[arg-type]
        for i in range(count)
    ]
    return torch.bincount(torch.tensor(chosen), minlength=len(logits))


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    chooser = TokenChooser(Sampling(), "r")
    assert chooser.choose(torch.tensor([0.0, 3.0, 3.0, 1.0]), 5) == 1
    assert chooser.choose_greedy(torch.tensor([[0.0, 1.0], [2.0, 1.0]])) == [1, 0]
    assert TokenChooser(WARM, "r").choose_greedy(torch.zeros(2, 2)) is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    counts = draws(LOGITS, 3000, temperature=temperature)
    assert fit(counts, (LOGITS / temperature).softmax(-1)) > 1e-3
    assert fit(counts, (LOGITS / temperature / 1.5).softmax(-1)) < 1e-6  # a neighbouring temperature does not fit


def test_positions_are_drawn_independently() -> None:
    """Pairs of neighbouring positions of one request fill the product of the two laws."""
    logits = LOGITS[:3]
    pairs = torch.zeros(3, 3)
    for request in range(3000):
        chooser = TokenChooser(WARM, str(request))
        pairs[chooser.choose(logits, 0), chooser.choose(logits, 1)] += 1
    law = logits.softmax(-1)
    assert fit(pairs, torch.outer(law, law)) > 1e-3


def test_the_noise_depends_on_seed_request_and_position_alone() -> None:
    def scores(seed: int = 1, request: str = "a", position: int = 4, before: int = 0) -> torch.Tensor:
        chooser = TokenChooser(Sampling(temperature=1.0, seed=seed), request)
        for other in range(before):  # neither what was drawn before nor the logits matter
            chooser.choose(torch.randn(50), other)
        return chooser.scores(torch.zeros(50), position)

    same = scores()
    assert torch.equal(scores(before=9), same)
    for different in (scores(seed=2), scores(request="b"), scores(position=5)):
        assert not torch.equal(different, same)
    # neither of two ways to write one key
    assert not torch.equal(scores(seed=1, request="1", position=1), scores(seed=11, request="", position=1))
    shifted = TokenChooser(WARM, "a").scores(LOGITS, 3) - TokenChooser(WARM, "a").scores(torch.zeros(6), 3)
    torch.testing.assert_close(shifted, LOGITS - LOGITS.max(), atol=1e-5, rtol=0)


def test_the_scores_are_what_is_maximised() -> None:
    chooser = TokenChooser(WARM, "r")
    for position in range(20):
        assert chooser.choose(LOGITS, position) == int(chooser.scores(LOGITS, position).argmax())
    assert torch.equal(TokenChooser(Sampling(), "r").scores(LOGITS, 0), LOGITS)


def kept(logits: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0) -> list[int]:
    out = filtered(logits, top_p, top_k)
    inside = torch.isfinite(out)
    assert torch.equal(out[inside], logits[inside])
    return inside.nonzero().flatten().tolist()


def test_top_k_keeps_the_k_likeliest() -> None:
    assert kept(LOGITS, top_k=1) == [0]
    assert kept(LOGITS, top_k=3) == [0, 2, 5]
    assert kept(LOGITS, top_k=6) == kept(LOGITS, top_k=99) == kept(LOGITS) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept(logits, top_p=0.4) == [1]
    assert kept(logits, top_p=0.6) == [1, 3]  # 0.5 falls short, and the token that crosses the bound is kept
    assert kept(logits, top_p=0.74) == [1, 3]
    assert kept(logits, top_p=0.8) == [1, 2, 3]
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-6) == [1]  # never nothing


def test_top_p_works_on_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    # of the best two, 0.5 is two thirds
    assert kept(logits, top_k=2, top_p=0.6) == [1]
    assert kept(logits, top_k=2, top_p=0.7) == [1, 3]


@pytest.mark.parametrize("top_p", [1e-9, 1e-50, 5e-324])
def test_the_likeliest_token_stays_however_small_top_p_is(top_p: float) -> None:
    best = int(LOGITS.argmax())
    assert filtered(LOGITS, top_p, 0).isfinite().nonzero().flatten().tolist() == [best]
    assert TokenChooser(Sampling(temperature=1.0, top_p=top_p), "r").choose(LOGITS, 0) == best


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_near_greedy(temperature: float) -> None:
    best = int(LOGITS.argmax())
    counts = draws(LOGITS * 100, 200, temperature=temperature)
    assert counts[best] == 200


def test_what_is_filtered_is_never_drawn_and_the_rest_keeps_its_law() -> None:
    counts = draws(LOGITS, 2000, temperature=1.0, top_k=3)
    assert counts[[1, 3, 4]].sum() == 0
    assert fit(counts[[0, 2, 5]], LOGITS[[0, 2, 5]].softmax(-1)) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1: expected a number of at least 0"),
        ({"temperature": math.nan}, "temperature nan: expected a number of at least 0"),
        ({"temperature": math.inf}, "temperature inf: expected a number of at least 0"),
        ({"top_p": 0.0}, "top-p 0.0: expected a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top-p 1.1: expected a number above 0 and at most 1"),
        ({"top_p": math.nan}, "top-p nan: expected a number above 0 and at most 1"),
        ({"top_k": -1}, "top-k -1: expected 0 (no limit) or a positive integer"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**wrong)  # type: ignore[arg-type]
    assert str(caught.value) == message
