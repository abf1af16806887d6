"""How many experts real text needs: consecutive tokens, nodes of draft trees, and what uniform routing would give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ecospec.harness.informing import true_routing
from ecospec.harness.target import TargetSession
from ecospec.policies import DraftTree, ExpertSets
from ecospec.policies.experts import count_pairs
from ecospec.policies.growing import grow_by_score


def uniform_experts(tokens: int, experts: int, top_k: int) -> float:
    """E(n) = E · (1 − (1 − K/E)^n): expected unique experts of n tokens that route uniformly and independently."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


@dataclass
class PairCounts:
    """Unique (layer, expert) pairs of the first 1, 2, … of some tokens, over many places.

    Sums of what each further token adds, so that places with few tokens do not bend the mean.

    Attributes:
        added: by n − 1, the sum of what the n-th token added.
        counts: how many places had an n-th token.
    """

    most: int
    added: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, pairs: Sequence[int]) -> None:
        """Count one place: unique pairs of its first 1, 2, … tokens."""
        before = 0
        for n, value in enumerate(pairs[: self.most]):
            if n == len(self.added):
                self.added.append(0.0)
                self.counts.append(0)
            self.added[n] += value - before
            self.counts[n] += 1
            before = value

    @property
    def places(self) -> int:
        """How many places were counted."""
        return self.counts[0] if self.counts else 0

    def means(self) -> tuple[float, ...]:
        """Mean unique pairs of 1, 2, … tokens; never falling."""
        steps = [added / count for added, count in zip(self.added, self.counts, strict=True)]
        return tuple(float(value) for value in np.cumsum(steps))


def add_text(counts: PairCounts, routing: npt.NDArray[np.int64], experts: int) -> None:
    """Count every place of a text at which as many tokens follow as are counted.

    Args:
        routing: [MoE layers, tokens, K].
    """
    bits = ExpertSets.from_topk(routing, experts).bits
    places = len(bits) - counts.most + 1
    if places < 1:
        return
    union = bits[:places].copy()
    pairs = [count_pairs(union)]
    for n in range(1, counts.most):
        union |= bits[n : n + places]
        pairs.append(count_pairs(union))
    for place in np.stack(pairs, axis=1).tolist():
        counts.add(place)


def tree_pairs(tree: DraftTree, sets: ExpertSets, most: int) -> list[int]:
    """Unique pairs of the 1, 2, … nodes that the confidence policy would select."""
    order = grow_by_score(tree, most, tree.path_probs)
    unions: Iterable[npt.NDArray[np.uint64]] = np.bitwise_or.accumulate(sets.bits[order], axis=0)
    return [int(count_pairs(union)) for union in unions]


class TreeObserver:
    """Counts the experts of the draft trees of a decode, by an extra pass over each."""

    def __init__(self, experts: int, most: int) -> None:
        self.counts = PairCounts(most)
        self._experts = experts

    def __call__(
        self, tree: DraftTree, predicted: ExpertSets | None, nodes: npt.NDArray[np.int64], session: TargetSession
    ) -> None:
        """Look at one step; see `decoding.Observer`."""
        sets = ExpertSets.from_topk(true_routing(session, tree), self._experts)
        self.counts.add(tree_pairs(tree, sets, self.counts.most))
