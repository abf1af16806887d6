"""Policies that weigh acceptance against the seconds that a step takes, and so choose how many nodes to verify.

The expected tokens of a step that verifies the nodes S are F(S) = Σ P(i) over S, the root's own 1 included: a node's
token is emitted when it and all of its path are accepted. The step takes T(S) seconds. Over many steps the tokens per
second are ΣF / ΣT, and the S to verify is the one with the largest F(S) / T(S). docs/throughput.md derives both
policies from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from ecospec.policies.contract import AcceptanceNeed, ExpertNeed, Policy, SelectionRequest
from ecospec.policies.cost import rate_order
from ecospec.policies.experts import count_pairs
from ecospec.policies.growing import grow_by_score


class Adaptive(Policy):
    """Verify the likeliest nodes, as many as give the most expected tokens per second.

    The prefix of the confidence order with the largest ΣP / T, where T is what a pass over that many tokens costs on
    average; no experts are predicted. The idea of EVICT (arXiv 2605.00342).
    """

    name: ClassVar[str] = "adaptive"
    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.ESTIMATED
    needs_cost_model: ClassVar[bool] = True

    def select(self, request: SelectionRequest) -> list[int]:
        cost, scores = request.cost(), request.node_scores
        order = grow_by_score(request.tree, request.budget, scores)
        expected = accumulate(scores[order].tolist())
        rates = [
            rate_order(tokens, cost.step_seconds(count, cost.expected_pairs(count)))
            for count, tokens in enumerate(expected, 1)
        ]
        return order[: 1 + rates.index(max(rates))]


class Throughput(Policy):
    """Verify the nodes with the most expected tokens per second, given the experts that each would touch.

    Grows S by the node with the most expected tokens per additional second for as long as that raises ΣP / T(S), and
    then drops leaves that no longer earn their time. γ is an upper limit only.
    """

    name: ClassVar[str] = "throughput"
    needs: ClassVar[ExpertNeed] = ExpertNeed.PREDICTED
    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.ESTIMATED
    needs_cost_model: ClassVar[bool] = True

    def select(self, request: SelectionRequest) -> list[int]:
        own = request.expert_sets().bits
        root = int(count_pairs(request.initial_buffer() | own[0]))
        state = _Selected([0], [0.0], float(request.node_scores[0]), request.cost().step_seconds(1, root))
        if state.seconds == 0:
            _take_what_is_free(state, request)
        met: set[frozenset[int]] = set()
        while True:
            _grow(state, request)
            full = len(state.nodes) == request.budget
            # What was not worth adding is not so at a higher rate either: only the budget can have kept a node out.
            if not _drop(state, request) or not full:
                return state.nodes
            # A node that is worth its time to the last digit could come and go for ever, by rounding.
            left = frozenset(state.nodes)
            if left in met:
                return state.nodes
            met.add(left)


def _take_what_is_free(state: _Selected, request: SelectionRequest) -> None:
    """Fill a selection that takes no time with the likeliest nodes that add none; see `rate_order`.

    Such a node reads nothing that the root does not, so that none of them makes another one free.
    """
    cost, own = request.cost(), request.expert_sets().bits
    read = request.initial_buffer() | own[0]
    free = cost.token_seconds + cost.pair_seconds * count_pairs(own & ~read) == 0.0
    scores = np.where(free, request.node_scores, -1.0)
    for node in grow_by_score(request.tree, request.budget, scores)[1:]:
        if not free[node]:  # as are all after it
            break
        state.nodes.append(node)
        state.paid.append(0.0)
        state.expected += float(scores[node])


@dataclass
class _Selected:
    """A selection while it is made.

    Attributes:
        nodes: in the order in which they were added, root first.
        paid: seconds that each added when it was; the most that is saved without it.
        expected: F. seconds: T.
    """

    nodes: list[int]
    paid: list[float]
    expected: float
    seconds: float

    def add(self, node: int, expected: float, seconds: float) -> None:
        self.nodes.append(node)
        self.paid.append(seconds)
        self.expected += expected
        self.seconds += seconds


def _grow(state: _Selected, request: SelectionRequest) -> None:
    """Add the nodes that raise the rate, the best first, up to the budget."""
    cost, own, children = request.cost(), request.expert_sets().bits, request.tree.children
    per_token, per_pair = cost.token_seconds, cost.pair_seconds
    scores = request.node_scores.tolist()
    uncovered = ~(request.initial_buffer() | np.bitwise_or.reduce(own[state.nodes], axis=0))
    candidates = [child for node in state.nodes for child in children[node] if child not in state.nodes]

    def pays(node: int, seconds: float) -> bool:
        # F/T after an addition lies between F/T and ΔF/ΔT: it rises if the latter is above it.
        return bool(scores[node] * state.seconds > state.expected * seconds)

    def take(node: int, seconds: float) -> None:
        np.bitwise_and(uncovered, ~own[node], out=uncovered)
        state.add(node, scores[node], seconds)
        candidates.remove(node)
        candidates.extend(children[node])

    while candidates and len(state.nodes) < request.budget:
        # A candidate's ancestors are all in S, so that it adds its own set alone.
        new = own.take(candidates, 0)
        new &= uncovered
        found = np.add.reduce(np.bitwise_count(new), axis=1, dtype=np.int32).tolist()
        gain, added, pick = -1.0, 1.0, -1
        for node, pairs in zip(candidates, found, strict=True):
            score, seconds = scores[node], per_token + per_pair * pairs
            if score * added > gain * seconds:  # as products, since an addition may cost nothing
                gain, added, pick = score, seconds, node
        if pick < 0 or not pays(pick, added):
            break
        others = []
        if request.tree.size <= request.budget:
            # Every node fits, so that none keeps another out, and all that pay can come in one round.
            others = [
                node
                for node, pairs in zip(candidates, found, strict=True)
                if node != pick and pays(node, per_token + per_pair * pairs)
            ]
        take(pick, added)
        for node in others:
            added = per_token + per_pair * int(count_pairs(own[node] & uncovered))
            if pays(node, added):
                take(node, added)


def _drop(state: _Selected, request: SelectionRequest) -> bool:
    """Drop the leaves that the rate is better without, the last ones first; whether there were any.

    A node that was worth its time when it was added may not be at the higher rate that later ones brought.
    """
    cost, own, parents = request.cost(), request.expert_sets().bits, request.tree.parents.tolist()
    scores = request.node_scores.tolist()

    def unpaid(place: int, seconds: float) -> bool:
        return bool(scores[state.nodes[place]] * state.seconds < state.expected * seconds)

    dropped = False
    place = len(state.nodes)
    while place > 1:
        place -= 1
        node = state.nodes[place]
        if not unpaid(place, state.paid[place]) or any(parents[other] == node for other in state.nodes):
            continue
        rest = state.nodes[:place] + state.nodes[place + 1 :]
        others = request.initial_buffer() | np.bitwise_or.reduce(own.take(rest, 0), axis=0)
        saved = cost.token_seconds + cost.pair_seconds * int(count_pairs(own[node] & ~others))
        if unpaid(place, saved):
            state.expected -= scores[node]
            state.seconds -= saved
            del state.nodes[place], state.paid[place]
            dropped, place = True, len(state.nodes)
    return dropped
