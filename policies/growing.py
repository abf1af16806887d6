"""Growing a selection by scores that do not depend on it."""

from __future__ import annotations

import heapq

from ecospec.policies.arrays import FloatArray
from ecospec.policies.tree import DraftTree


def grow_by_score(tree: DraftTree, budget: int, scores: FloatArray) -> list[int]:
    """Repeatedly take the best-scoring node whose parent is taken, until `budget` nodes are.

    For scores that do not depend on the selection: float64[N]. The root comes first whatever its score.
    Ties go to the shallower node, then to the lower index.
    """
    ranks = list(zip((-scores).tolist(), tree.depths.tolist(), range(tree.size), strict=True))
    selected: list[int] = []
    candidates = [ranks[0]]
    while candidates and len(selected) < budget:
        _, _, pick = heapq.heappop(candidates)
        selected.append(pick)
        for child in tree.children[pick]:
            heapq.heappush(candidates, ranks[child])
    return selected
