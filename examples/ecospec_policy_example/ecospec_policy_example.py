"""The `density` policy: how much should the cost of new experts count?"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ecospec.policies import ExpertNeed, Policy, SelectionRequest, count_pairs, hookimpl


@dataclass(frozen=True)
class Density(Policy):
    """Between confidence and marginal-cost: score P(i) / (1 + new experts) ** strength."""

    name: ClassVar[str] = "density"
    needs: ClassVar[ExpertNeed] = ExpertNeed.PREDICTED

    strength: float = field(default=0.5, metadata={"help": "0 ignores the experts, 1 divides by them"})

    def select(self, request: SelectionRequest) -> list[int]:
        footprints = request.path_footprints().bits
        buffer = request.initial_buffer() | footprints[0]
        selected, candidates = [0], list(request.tree.children[0])
        while candidates and len(selected) < request.budget:
            new_experts = count_pairs(footprints[candidates] & ~buffer)
            scores = request.node_scores[candidates] / (1 + new_experts) ** self.strength
            pick = candidates.pop(int(np.argmax(scores)))
            buffer |= footprints[pick]
            selected.append(pick)
            candidates += request.tree.children[pick]
        return selected


@hookimpl
def ecospec_policies() -> list[type[Policy]]:
    return [Density]
