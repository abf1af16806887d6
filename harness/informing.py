"""What a policy is told before it selects: expert sets and estimates of acceptance, predicted or true.

What is true is found out by an extra pass over the whole tree, of which nothing is kept and which no timing includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ecospec.errors import UserError
from ecospec.harness.choosing import TokenChooser
from ecospec.harness.drafters.asking import AskedDrafts
from ecospec.harness.steps import accept
from ecospec.harness.target import TargetSession
from ecospec.harness.target_batch import TargetBatch
from ecospec.harness.timing import Stopwatch
from ecospec.policies import AcceptanceNeed, DraftTree, ExpertNeed, ExpertSets
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.asking import AskedBatch
from ecospec.predictors.contract import PredictionRequest, Routing

if TYPE_CHECKING:
    from ecospec.harness.decoding import Speculation, Stream


def true_routing(session: TargetSession, tree: DraftTree) -> Routing:
    """The target's routing of a whole tree [L, N, K], by an extra pass of which nothing is kept."""
    routing = session.verify(tree, np.arange(tree.size)).routing
    result: Routing = routing.cpu().numpy()
    return result


def true_acceptance(session: TargetSession, tree: DraftTree, chooser: TokenChooser, position: int) -> FloatArray:
    """float64 [N], 1 for the nodes that the target will accept and 0 for the others, by an extra pass.

    Args:
        position: output position that follows the root.
    """
    nodes = np.arange(tree.size)
    rows, _ = accept(tree, nodes, session.verify(tree, nodes).logits, chooser, position)
    accepted = np.zeros(tree.size)
    accepted[rows] = 1.0
    return accepted


def acceptance_of(
    method: Speculation,
    trees: Sequence[DraftTree],
    session: TargetBatch,
    drafter: AskedDrafts,
    streams: Sequence[Stream],
    watch: Stopwatch,
) -> list[FloatArray] | None:
    """The estimates the policy asks for; what will truly be accepted is found out outside every timing."""
    if method.policy.acceptance is AcceptanceNeed.TRUE:
        with watch.excluded():
            return [
                true_acceptance(each, tree, stream.chooser, len(stream.rule.tokens))
                for each, tree, stream in zip(session.sessions, trees, streams, strict=True)
            ]
    if method.policy.acceptance is AcceptanceNeed.DRAFT or method.estimator is None:
        return None
    found = [method.estimator.estimate(tree, drafter.node_states(row)) for row, tree in enumerate(trees)]
    watch.mark("estimate")
    return found


def start_predictor(
    method: Speculation,
    streams: Sequence[Stream],
    capacities: Sequence[int],
    session: TargetBatch,
    drafter: AskedDrafts,
) -> AskedBatch | None:
    if method.policy.needs is not ExpertNeed.PREDICTED:
        return None
    if method.predictor is None:
        raise UserError(f"policy {method.policy.name!r} needs predicted expert sets, but no predictor is loaded")
    geometry = session.target.geometry
    return AskedBatch(
        method.predictor_name,
        method.predictor,
        (geometry.moe_layers, geometry.experts, geometry.top_k),
        [
            PredictionRequest(stream.prompt, capacity, partial(true_routing, each), drafter.node_states(index))
            for index, (stream, capacity, each) in enumerate(zip(streams, capacities, session.sessions, strict=True))
        ],
        oracle=method.predictor_is_oracle,
    )


def expert_sets_of(
    method: Speculation,
    trees: Sequence[DraftTree],
    session: TargetBatch,
    predictor: AskedBatch | None,
    watch: Stopwatch,
) -> list[ExpertSets] | None:
    """The expert sets the policy asks for; true routing is obtained outside every timing."""
    experts = session.target.geometry.experts
    if method.policy.needs is ExpertNeed.NONE:
        return None
    if method.policy.needs is ExpertNeed.ORACLE:
        with watch.excluded():
            routings = [true_routing(each, tree) for each, tree in zip(session.sessions, trees, strict=True)]
            return [ExpertSets.from_topk(routing, experts) for routing in routings]
    assert predictor is not None
    if method.predictor_is_oracle:
        with watch.excluded():
            return predictor.predict(trees)
    return predictor.predict(trees)
