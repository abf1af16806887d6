"""The lossless check tells exact outputs, numeric ties and violations apart."""

from __future__ import annotations

import numpy as np
import torch
from tiny_models import random_tokens, rule_for, run_ar, tiny_model

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.lossless import LosslessCheck, check_output, first_difference
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target

PROMPT = random_tokens(np.random.default_rng(5), 9)


def twin_target() -> Target:
    """A target in which token 2i+1 always has the logit of token 2i: every choice is a tie."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    return Target(model)


def checked(target: Target, tokens: list[int], ar: list[int]) -> LosslessCheck:
    chooser = TokenChooser(Sampling(), "r")

    def rule() -> StopRule:
        return rule_for(PROMPT, 12, context=target.context)

    return check_output(target, PROMPT, ar, tokens, chooser, rule, block=4)


def test_lengths_count_as_differences() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([], []) is None


def test_equal_outputs_are_exact() -> None:
    target = Target(tiny_model())
    ar = run_ar(target, PROMPT, n=12).tokens
    assert checked(target, list(ar), ar).verdict == "exact"


def test_another_token_is_a_violation_with_its_position_and_margin() -> None:
    target = Target(tiny_model())
    ar = run_ar(target, PROMPT, n=12).tokens
    other = [*ar[:5], (ar[5] + 1) % 64, *ar[6:]]
    check = checked(target, other, ar)
    assert check.verdict == "violated"
    (difference,) = check.differences
    assert (difference.position, difference.ar_token, difference.method_token) == (5, ar[5], other[5])
    assert difference.gap > difference.noise


def test_a_shorter_output_is_a_violation_even_where_every_choice_is_a_tie() -> None:
    target = twin_target()
    ar = run_ar(target, PROMPT, n=12).tokens
    assert checked(target, ar[:7], ar).verdict == "violated"
    assert checked(target, [*ar, 3], ar).verdict == "violated"


def test_a_choice_between_equal_logits_is_a_tie_and_the_rest_is_compared_from_the_new_prefix() -> None:
    target = twin_target()
    chooser = TokenChooser(Sampling(), "r")
    ar = run_ar(target, PROMPT, n=12).tokens
    from ecospec.harness.decoding import decode_ar

    swapped = ar[3] ^ 1
    after = decode_ar(target, PROMPT, chooser, rule_for(PROMPT, 12), forced=[*ar[:3], swapped]).tokens
    assert after[4:] != ar[4:]
    check = checked(target, after, ar)
    assert check.verdict == "ties"
    assert [d.position for d in check.differences] == [3]
    assert check.differences[0].gap == 0.0
    # The same tie, and then a token that AR does not emit from there.
    worse = next(t for t in range(64) if t // 2 != after[8] // 2)
    assert checked(target, [*after[:8], worse, *after[9:]], ar).verdict == "violated"
