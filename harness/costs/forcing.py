"""Which experts the passes of a sweep are forced to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ecospec.errors import UserError

TOKENS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
"""Tokens of a pass, unless others are asked for: the sizes of small draft trees."""
LEVELS = 6
"""At how many values of E each number of tokens is measured, at most."""


@dataclass(frozen=True)
class Cell:
    """Passes of one kind.

    Attributes:
        tokens: n.
        active_experts: E, unique experts in each layer.
        held_out: whether the fit is made without it.
    """

    tokens: int
    active_experts: int
    held_out: bool = False


def token_counts(most: int) -> tuple[int, ...]:
    """How many tokens to measure up to ``most``; above 16 in steps of half."""
    counts = [n for n in TOKENS if n < most]
    n = TOKENS[-1]
    while (n := n * 3 // 2) < most:
        counts.append(n)
    return (*counts, most)


def sweep_cells(tokens: Sequence[int], experts: int, top_k: int, levels: int = LEVELS) -> list[Cell]:
    """E from K to its maximum, min(experts, n·K), at every n.

    Of every n with four values of E or more one is held out that is neither the first nor the last, another one from n
    to n, so that what is held out is spread over the sweep.

    Raises:
        UserError: E cannot be told from the number of layers, since every token uses all experts, or n is 1 alone.
    """
    if top_k >= experts:
        raise UserError(f"every token uses all {experts} experts, so that no pass reads more than another")
    if max(tokens) < 2:
        raise UserError("a cost model of passes over one token; expected at least 2")
    cells, turn = [], 0
    for n in sorted(set(tokens)):
        most = min(experts, n * top_k)
        values = sorted({round(value) for value in np.linspace(top_k, most, levels)})
        held = None
        if len(values) >= 4:
            held = values[1 + turn % (len(values) - 2)]
            turn += 1
        cells += [Cell(n, value, value == held) for value in values]
    return cells


def forced_routing(
    cell: Cell, layers: int, experts: int, top_k: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """int64 [layers, n, K]: in each layer exactly E experts, chosen anew, each token with K distinct ones.

    The n·K slots go round the chosen ones, so that each expert gets as many tokens as another, or one more.
    """
    n, union = cell.tokens, cell.active_experts
    if not top_k <= union <= min(experts, n * top_k):
        raise ValueError(f"{union} experts for {n} tokens; expected {top_k} to {min(experts, n * top_k)}")
    slots = np.arange(n * top_k).reshape(n, top_k) % union
    chosen = rng.permuted(np.broadcast_to(np.arange(experts), (layers, experts)), axis=1)[:, :union]
    return np.ascontiguousarray(chosen[:, slots])
