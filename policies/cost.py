"""What a decode step costs: the model that cost-aware policies weigh acceptance against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

LARGEST = 1e12
"""What seconds or pairs can be at most: far beyond any device, and small enough that no sum or product overflows."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of a decode step, linear in what its verification pass reads and computes.

        T_verify = a + b · (unique (layer, expert) pairs) + c · tokens

    Attributes:
        fixed_seconds: a, what a pass takes whatever it verifies.
        pair_seconds: b, for each (layer, expert) pair that the pass reads.
        token_seconds: c, for each token that it verifies.
        other_seconds: the rest of the step (draft, predict, estimate, select, commit), the same whatever is selected.
        pairs_by_tokens: unique pairs that a pass over 1, 2, … tokens reads on average, as measured on text. Each is at
            least the one before it.

    Raises:
        ValueError: a number is negative, not finite or above `LARGEST`, all seconds are 0, or the pairs fall.
    """

    fixed_seconds: float
    pair_seconds: float
    token_seconds: float
    other_seconds: float = 0.0
    pairs_by_tokens: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        seconds = (self.fixed_seconds, self.pair_seconds, self.token_seconds, self.other_seconds)
        for value in (*seconds, *self.pairs_by_tokens):
            if not 0 <= value <= LARGEST:  # also false for nan
                raise ValueError(f"a cost model holds numbers from 0 to {LARGEST:g}, got {value}")
        if not any(seconds):
            raise ValueError("a cost model in which a step costs nothing")
        if any(after < before for before, after in pairwise(self.pairs_by_tokens)):
            raise ValueError(f"more tokens never read fewer experts, got {self.pairs_by_tokens}")

    def verify_seconds(self, tokens: float, expert_pairs: float) -> float:
        """Seconds to verify `tokens` tokens that touch `expert_pairs` unique (layer, expert) pairs in all."""
        return self.fixed_seconds + self.pair_seconds * expert_pairs + self.token_seconds * tokens

    def step_seconds(self, tokens: float, expert_pairs: float) -> float:
        """Seconds of the whole step: verification and all that goes with it."""
        return self.other_seconds + self.verify_seconds(tokens, expert_pairs)

    def expected_pairs(self, tokens: int) -> float:
        """Unique pairs that a pass over so many tokens of text reads on average.

        Beyond what was measured, every further token adds what the last one added.

        Raises:
            ValueError: `tokens` is below 1, or none were measured.
        """
        if tokens < 1:
            raise ValueError(f"expected at least 1 token, got {tokens}")
        measured = self.pairs_by_tokens
        if not measured:
            raise ValueError("this cost model was made without pairs_by_tokens")
        if tokens <= len(measured):
            return measured[tokens - 1]
        last = measured[-1] - measured[-2] if len(measured) > 1 else measured[-1]
        return measured[-1] + last * (tokens - len(measured))


def rate_order(expected_tokens: float, seconds: float) -> tuple[float, float]:
    """What to compare selections by: the larger is the better.

    That is the expected tokens per second. A step that takes no time at all has an infinite rate, whatever it emits:
    it is better than any that takes some, and of several such the one with the most expected tokens is the best, since
    every token of it is for nothing.
    """
    rate = expected_tokens / seconds if seconds > 0 else math.inf
    return rate, expected_tokens if rate == math.inf else 0.0
