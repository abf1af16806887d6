"""Choosing a token: one object for AR and for verification.

Sampling adds noise that is a function of (seed, request, position) alone (the exponential form of
Gumbel-max), so that AR and speculative runs with one seed emit the same tokens at T > 0 too. A drafted
child is then accepted exactly when it is the token the target draws there: it is accepted with the
target's own probability, which is speculative sampling with a one-hot draft.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; ``top_p`` 1 and ``top_k`` 0 filter nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: expected a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: expected a number above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: expected 0 (no limit) or a positive integer")


class TokenChooser:
    """Chooses the tokens of one request."""

    def __init__(self, sampling: Sampling, request: str) -> None:
        self.sampling = sampling
        self.request = request
        self._generators: dict[torch.device, torch.Generator] = {}

    def choose(self, logits: Tensor, position: int) -> int:
        """The token at ``position`` (0 is the first emitted one), given logits [V]."""
        return int(self.scores(logits, position).argmax())

    def choose_greedy(self, logits: Tensor) -> list[int] | None:
        """At temperature 0 the choices for all rows of [n, V] at once; None when sampling."""
        if self.sampling.temperature > 0:
            return None
        choices: list[int] = logits.argmax(-1).tolist()
        return choices

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """What `choose` maximises, [V]; the gap between its two largest is the margin of a choice."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return logits
        # Relative to the best, so that no temperature, however small, makes an infinity of it.
        scaled = filtered((logits - logits.max()) / sampling.temperature, sampling.top_p, sampling.top_k)
        return scaled - self._noise(logits, position).log()

    def _noise(self, logits: Tensor, position: int) -> Tensor:
        """Exponential(1) noise [V]; argmax(logit − log noise) draws from softmax(logits)."""
        device = logits.device
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        key = f"{self.sampling.seed}\0{self.request}\0{position}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)
        noise = torch.empty(logits.shape, device=device, dtype=torch.float32)
        return noise.exponential_(generator=generator)


def filtered(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [V] with what top-k and then top-p (nucleus) sampling exclude at −inf.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches ``top_p``; the token that
    crosses the bound is kept.
    """
    if top_k and top_k < logits.shape[-1]:
        bound = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < bound, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        outside[0] = False  # the likeliest stays, even for a bound that is 0 in this precision
        logits = logits.clone()
        logits[order[outside]] = float("-inf")
    return logits
