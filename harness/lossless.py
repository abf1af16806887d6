"""The lossless check: every emitted token is compared with what AR emits from the same prefix.

``exact``: no difference. ``ties``: every difference is at a position where the target's two best choices
are closer than the numeric noise measured between the two shapes of forward pass. ``violated``: anything
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from torch import Tensor

from ecospec.harness.choosing import TokenChooser
from ecospec.harness.decoding import decode_ar
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target
from ecospec.policies import DraftTree

EXACT, TIES, VIOLATED, UNCHECKED = "exact", "ties", "violated", "unchecked"


@dataclass(frozen=True)
class Difference:
    """A position where a method emitted another token than AR does from the same prefix.

    Attributes:
        ar_token, method_token: None where an output had already ended.
        gap: how much AR prefers its own token, in logits (scores, when sampling).
        noise: largest difference of such gaps between the two shapes of pass over the same tokens.
    """

    position: int
    ar_token: int | None
    method_token: int | None
    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Whether noise alone explains it."""
        return self.ar_token is not None and self.method_token is not None and self.gap <= self.noise


@dataclass(frozen=True)
class LosslessCheck:
    """The verdict over one output, with its differences."""

    differences: tuple[Difference, ...] = ()

    @property
    def verdict(self) -> str:
        """exact, ties or violated."""
        if not self.differences:
            return EXACT
        return TIES if all(d.is_tie for d in self.differences) else VIOLATED


def first_difference(ar: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, the end of the shorter one included."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ar, tokens, strict=False)))
    return None if same == len(ar) == len(tokens) else same


def check_output(
    target: Target,
    prompt: Sequence[int],
    ar_tokens: Sequence[int],
    tokens: Sequence[int],
    chooser: TokenChooser,
    new_rule: Callable[[], StopRule],
    block: int,
) -> LosslessCheck:
    """Compare an output with AR's; after a tie, AR is run again from the output's own prefix.

    Args:
        ar_tokens: what AR emitted for the prompt.
        new_rule: a fresh stop rule, as both runs had.
        block: tokens verified in one pass, the other shape of pass for measuring noise.
    """
    differences: list[Difference] = []
    reference = list(ar_tokens)
    while (at := first_difference(reference, tokens)) is not None:
        if at >= len(reference) or at >= len(tokens):
            ar_token = reference[at] if at < len(reference) else None
            token = tokens[at] if at < len(tokens) else None
            differences.append(Difference(at, ar_token, token, float("inf"), 0.0))
            break
        gap, noise = _gap_and_noise(target, prompt, tokens[:at], reference[at], tokens[at], chooser, block)
        differences.append(Difference(at, reference[at], tokens[at], gap, noise))
        if not differences[-1].is_tie:
            break
        reference = decode_ar(target, prompt, chooser, new_rule(), forced=tokens[: at + 1]).tokens
    return LosslessCheck(tuple(differences))


def _gap_and_noise(
    target: Target,
    prompt: Sequence[int],
    prefix: Sequence[int],
    ar_token: int,
    token: int,
    chooser: TokenChooser,
    block: int,
) -> tuple[float, float]:
    """AR's preference for its token after ``prefix``, and how much such preferences vary with the shape of
    the pass: the largest change of the gap between the two best choices over all positions so far."""
    single = _scores_token_by_token(target, prompt, prefix, chooser)
    blocks = _scores_in_blocks(target, prompt, prefix, chooser, block)
    noise = 0.0
    for one, other in zip(single, blocks, strict=True):
        best = one.topk(2).indices
        noise = max(noise, abs(float((one[best[0]] - one[best[1]]) - (other[best[0]] - other[best[1]]))))
    return float(single[-1][ar_token] - single[-1][token]), noise


def _scores_token_by_token(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], chooser: TokenChooser
) -> list[Tensor]:
    """Scores at positions 0 to len(tokens), each token in a pass of its own, as AR does it."""
    session = target.new_session(len(prompt) + len(tokens) + 1)
    scores = [chooser.scores(session.prefill(prompt).logits[-1], 0)]
    for position, token in enumerate(tokens, 1):
        scores.append(chooser.scores(session.decode(token).logits[0], position))
    return scores


def _scores_in_blocks(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], chooser: TokenChooser, block: int
) -> list[Tensor]:
    """The same positions, ``block`` tokens a pass, as verification does it."""
    session = target.new_session(len(prompt) + len(tokens) + block)
    scores = [chooser.scores(session.prefill(prompt).logits[-1], 0)]
    for start in range(0, len(tokens), block):
        part = np.asarray(tokens[start : start + block])
        chain = DraftTree(part, np.arange(len(part)) - 1, np.ones(len(part)))
        logits = session.verify(chain, np.arange(len(part))).logits
        session.commit(range(len(part)))
        scores += [chooser.scores(row, start + i + 1) for i, row in enumerate(logits)]
    return scores
