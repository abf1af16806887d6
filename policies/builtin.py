"""The four policies of the paper (EcoSpec, arXiv 2607.12696), registered with the others like anyone else's.

Each grows the selection S from the root, one node at a time, and so keeps it prefix-closed: a node is
a candidate once its parent is in S. The paper ranks *all* unselected nodes instead and shows that the
result is prefix-closed anyway (Section 4.2): a parent is at least as likely as its child, and its
footprint is a subset of the child's, so it scores at least as high, and the tie goes to the shallower
node. Both give the same selection whenever P does not rise along a path, as is the case for draft path
probabilities; for acceptance estimates that do rise, only the candidates below are still valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from ecospec.errors import UserError
from ecospec.policies.contract import ExpertNeed, Policy, SelectionRequest
from ecospec.policies.experts import count_pairs
from ecospec.policies.growing import grow_by_score
from ecospec.policies.hookspecs import hookimpl
from ecospec.policies.throughput import Adaptive, Throughput
from ecospec.policies.yardsticks import Clairvoyant, Optimal


@dataclass(frozen=True)
class Confidence(Policy):
    """Verify the nodes most likely to be accepted, whatever they cost: score P(i).

    What ordinary drafters do, and the baseline that every other policy is compared with.
    """

    name: ClassVar[str] = "confidence"

    def select(self, request: SelectionRequest) -> list[int]:
        return grow_by_score(request.tree, request.budget, request.node_scores)


@dataclass(frozen=True)
class _CostAware(Policy):
    """A policy that divides by a number of experts, which may be zero."""

    epsilon: float = field(
        default=1e-6,
        metadata={"help": "experts added to every cost, so that a node that costs none still has a score"},
    )

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise UserError(f"policy {self.name!r}: epsilon must be a finite number above 0, got {self.epsilon}")


@dataclass(frozen=True)
class GlobalCost(_CostAware):
    """Acceptance per expert of the whole path: score P(i) / (|path footprint| + ε).

    Blind to what the selected nodes already cover, it pays for shared experts again and again.
    """

    name: ClassVar[str] = "global-cost"
    needs: ClassVar[ExpertNeed] = ExpertNeed.PREDICTED

    def select(self, request: SelectionRequest) -> list[int]:
        scores = request.node_scores / (request.path_footprints().counts() + self.epsilon)
        return grow_by_score(request.tree, request.budget, scores)


@dataclass(frozen=True)
class MarginalCost(_CostAware):
    """Acceptance per newly activated expert: score P(i) / (|path footprint \\ B| + ε).

    EcoSpec's Algorithm 1. The buffer B starts from B₀ and takes in the path footprint of each pick,
    so experts are paid for once, and a node that needs no new ones is next to free.
    """

    name: ClassVar[str] = "marginal-cost"
    aliases: ClassVar[tuple[str, ...]] = ("marginal",)
    needs: ClassVar[ExpertNeed] = ExpertNeed.PREDICTED

    def select(self, request: SelectionRequest) -> list[int]:
        tree, experts = request.tree, request.expert_sets()
        acceptance, depths, children = request.node_scores.tolist(), tree.depths.tolist(), tree.children
        # A candidate's ancestors are all in S, and their experts in B. So its path footprint minus B
        # is its own set minus B, and B grows by the own set of a pick: no footprints are needed.
        own = experts.bits
        uncovered = ~(request.initial_buffer() | own[0])
        selected = [0]
        candidates = list(children[0])
        while candidates and len(selected) < request.budget:
            marginal_costs = count_pairs(own[candidates] & uncovered).tolist()
            # The best score; ties: the shallower node, then the lower index.
            _, _, pick = min(
                (-acceptance[node] / (cost + self.epsilon), depths[node], node)
                for node, cost in zip(candidates, marginal_costs, strict=True)
            )
            uncovered &= ~own[pick]
            selected.append(pick)
            candidates.remove(pick)
            candidates.extend(children[pick])
        return selected


@dataclass(frozen=True)
class Oracle(MarginalCost):
    """The marginal-cost policy given the target's true routing: the bound that a predictor aims at."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[ExpertNeed] = ExpertNeed.ORACLE


@hookimpl
def ecospec_policies() -> list[type[Policy]]:
    return [Confidence, GlobalCost, MarginalCost, Oracle, Adaptive, Throughput, Optimal, Clairvoyant]
