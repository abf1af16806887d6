"""Replaying a recording: what a policy would select, what would be accepted and read, without the target.

A live run with the same options goes through the same trees, so that its accepted lengths and experts are these. The
seconds are not: they come from a cost model, and say what such steps would take where it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ecospec.errors import UserError
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.harness.records import AR
from ecospec.policies import (
    AcceptanceNeed,
    CostModel,
    DraftTree,
    ExpertNeed,
    ExpertSets,
    Policy,
    SelectionRequest,
    count_pairs,
    run_policy,
)
from ecospec.policies.arrays import WordArray

DRAFT, TRUE = "draft", "oracle"
"""What every recording has in an estimator's and a predictor's place: the draft's probabilities, the true routing."""


@dataclass(frozen=True)
class ReplayMethod:
    """What is replayed.

    Attributes:
        budget: γ. predictor, estimator: labels in the recording; looked at where the policy asks for them.
        cost: what the policy is given, where it asks for one, and what its steps are reckoned by.
    """

    label: str
    policy: Policy
    budget: int
    predictor: str
    estimator: str
    cost: CostModel | None

    @property
    def sees_ahead(self) -> bool:
        """Whether its selections use what only an extra pass can know."""
        return (
            self.policy.needs is ExpertNeed.ORACLE
            or self.policy.acceptance is AcceptanceNeed.TRUE
            or (self.policy.needs is ExpertNeed.PREDICTED and self.predictor == TRUE)
        )


@dataclass(frozen=True)
class ReplayedRequest:
    """Sums over the steps of one request by one method; as in a run's records.

    Attributes:
        seconds: of all steps by the cost model; None without one.
    """

    request: str
    method: str
    steps: int
    emitted: int
    selected: int
    expert_pairs: int
    overlap: float | None
    seconds: float | None


class _Positions:
    """A request's trees and sets, each made when it is first met; several methods share them."""

    def __init__(self, request: RecordedRequest, experts: int) -> None:
        self.request, self._experts = request, experts
        self._trees: dict[int, DraftTree] = {}
        self._bits: dict[str, WordArray] = {}
        self._shape = (request.routing.shape[0], experts)

    def tree(self, position: int) -> DraftTree:
        if position not in self._trees:
            self._trees[position] = self.request.tree(position)
        return self._trees[position]

    def sets(self, label: str, position: int) -> ExpertSets:
        if label not in self._bits:
            routing = self.request.routing if label == TRUE else self.request.predicted[label]
            self._bits[label] = ExpertSets.from_topk(routing, self._experts).bits
        return ExpertSets(self._bits[label][self.request.rows(position)], *self._shape)


def replay(
    requests: Iterable[tuple[str, RecordedRequest]], methods: Sequence[ReplayMethod], experts: int
) -> Iterator[list[ReplayedRequest]]:
    """Every request by every method.

    Args:
        requests: with their ids. experts: in a MoE layer of the target.

    Raises:
        SelectionError: a policy raised or broke its contract.
        UserError: a recording lacks what a method looks at.
    """
    for name, request in requests:
        positions = _Positions(request, experts)
        yield [_walk(name, positions, method) for method in methods]


def _walk(name: str, positions: _Positions, method: ReplayMethod) -> ReplayedRequest:
    """The steps of one request by one method, each where the one before it ended."""
    request = positions.request
    at = steps = selected = pairs = 0
    overlaps: list[float] = []
    seconds = 0.0
    while at < request.positions:
        tree = positions.tree(at)
        predicted = _predicted(positions, method, at)
        nodes = run_policy(
            method.policy,
            SelectionRequest(
                tree=tree,
                budget=method.budget,
                experts=predicted,
                cost_model=method.cost if method.policy.needs_cost_model else None,
                acceptance=_acceptance(request, method, at, tree),
            ),
        )
        true = positions.sets(TRUE, at)
        read = int(count_pairs(true.union(nodes)))
        if predicted is not None:
            hits = np.bitwise_count(predicted.bits[nodes] & true.bits[nodes]).sum()
            overlaps.append(float(hits / np.bitwise_count(true.bits[nodes]).sum()))
        accepted = request.accepted(at, tree)
        chosen = set(nodes.tolist())
        length = _accepted_length(tree, accepted, chosen)
        if method.cost is not None:
            seconds += method.cost.step_seconds(len(nodes), read)
        steps, selected, pairs = steps + 1, selected + len(nodes), pairs + read
        at += min(length, request.positions - at)
    return ReplayedRequest(
        request=name,
        method=method.label,
        steps=steps,
        emitted=request.positions,
        selected=selected,
        expert_pairs=pairs,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        seconds=None if method.cost is None else seconds,
    )


def _accepted_length(tree: DraftTree, accepted: np.ndarray, chosen: set[int]) -> int:
    """Tokens that a step emits: the selected nodes of the accepted path, of which the root's choice is one."""
    node, length = 0, 1
    while True:
        following = [child for child in tree.children[node] if accepted[child] and child in chosen]
        if not following:
            return length
        node, length = following[0], length + 1


def _predicted(positions: _Positions, method: ReplayMethod, at: int) -> ExpertSets | None:
    if method.policy.needs is ExpertNeed.NONE:
        return None
    label = TRUE if method.policy.needs is ExpertNeed.ORACLE else method.predictor
    if label != TRUE and label not in positions.request.predicted:
        raise UserError(
            f"predictor {label!r} is not in the recording; it has {_known([*positions.request.predicted, TRUE])}"
        )
    return positions.sets(label, at)


def _acceptance(request: RecordedRequest, method: ReplayMethod, at: int, tree: DraftTree) -> np.ndarray | None:
    if method.policy.acceptance is AcceptanceNeed.TRUE:
        return request.accepted(at, tree)
    if method.policy.acceptance is AcceptanceNeed.DRAFT or method.estimator == DRAFT:
        return None
    if method.estimator not in request.estimated:
        raise UserError(
            f"acceptance estimator {method.estimator!r} is not in the recording; it has "
            f"{_known([*request.estimated, DRAFT])}"
        )
    return request.estimated[method.estimator][request.rows(at)]


def _known(labels: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def plain_decoding(requests: Mapping[str, RecordedRequest], cost: CostModel | None) -> list[ReplayedRequest]:
    """Plain decoding's own sums: a pass a token, reading each token's own experts."""
    found = []
    for name, request in requests.items():
        per_token = request.routing.shape[0] * request.routing.shape[2]
        steps = request.positions
        seconds = None if cost is None else steps * cost.verify_seconds(1, per_token)
        found.append(ReplayedRequest(name, AR, steps, steps, steps, steps * per_token, None, seconds))
    return found
