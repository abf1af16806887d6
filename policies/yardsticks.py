"""Yardsticks: selections that no policy can make, to measure by how far one falls short.

Both look at what only an extra pass over the whole tree can tell, so they have verification metrics and no speed-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ecospec.errors import UserError
from ecospec.policies.contract import AcceptanceNeed, ExpertNeed, Policy, SelectionRequest
from ecospec.policies.cost import rate_order
from ecospec.policies.tree import DraftTree

MOST_SELECTIONS = 200_000
"""Selections that `Optimal` goes through in one step at most."""


class Optimal(Policy):
    """The selection with the most expected tokens per second of all there are, given the target's true routing.

    Goes through every prefix-closed selection of at most γ nodes, so it is for small trees.
    """

    name: ClassVar[str] = "optimal"
    needs: ClassVar[ExpertNeed] = ExpertNeed.ORACLE
    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.ESTIMATED
    needs_cost_model: ClassVar[bool] = True

    def select(self, request: SelectionRequest) -> list[int]:
        count = count_selections(request.tree, request.budget)
        if count > MOST_SELECTIONS:
            raise UserError(
                f"a tree of {request.tree.size} nodes has {count:,} selections of at most {request.budget}, expected "
                f"at most {MOST_SELECTIONS:,}; try a smaller --draft-topk, --draft-steps or --budget"
            )
        cost, scores = request.cost(), request.node_scores.tolist()
        own = [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in request.expert_sets().bits]
        before = int.from_bytes(request.initial_buffer().astype("<u8").tobytes(), "little")
        best, best_rate = [0], (-1.0, 0.0)
        for selected in selections(request.tree, request.budget):
            covered, expected = before, 0.0
            for node in selected:
                covered |= own[node]
                expected += scores[node]
            rate = rate_order(expected, cost.step_seconds(len(selected), covered.bit_count()))
            if rate > best_rate:
                best, best_rate = list(selected), rate
        return best


class Clairvoyant(Policy):
    """Exactly the nodes that the target will accept: what perfect knowledge of acceptance would bring."""

    name: ClassVar[str] = "clairvoyant"
    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.TRUE

    def select(self, request: SelectionRequest) -> list[int]:
        accepted = np.flatnonzero(request.node_scores == 1.0).tolist()
        return accepted[: request.budget]  # a path in order of depth, so that its first nodes are its first part


def selections(tree: DraftTree, budget: int) -> Iterator[tuple[int, ...]]:
    """Every prefix-closed selection of 1 to `budget` nodes, each once."""

    def grow(selected: tuple[int, ...], candidates: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield selected
        if len(selected) == budget:
            return
        # Each next node leaves those before it out for good: so no selection comes twice.
        for place, node in enumerate(candidates):
            yield from grow((*selected, node), candidates[place + 1 :] + tree.children[node])

    return grow((0,), tree.children[0])


def count_selections(tree: DraftTree, budget: int) -> int:
    """How many `selections` gives."""
    size = min(budget, tree.size) + 1
    ways = [[0] * size for _ in range(tree.size)]  # of the subtree under a node, with it, by number of nodes
    for node in reversed(range(tree.size)):
        found = [0, 1] + [0] * (size - 2)
        for child in tree.children[node]:
            found = [
                sum(found[n - m] * (ways[child][m] if m else 1) for m in range(n + 1)) if n else 0 for n in range(size)
            ]
        ways[node] = found
    return sum(ways[0])
