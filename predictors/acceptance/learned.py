"""Acceptance by a small model over what the drafter knows at each node.

For every node it gives the probability that the target chooses its token, given that its parent is accepted; a node's
estimate is the product along its path. What goes in: the node's conditional and path probability, its margin over the
best of its siblings, the entropy of the distribution that it was drafted from, depth, rank, and the drafter's hidden
state that drafted it. It corrects the draft's own log odds, so that it begins where they are right already. NumPy
alone: for a dozen nodes it is several times quicker than a tensor library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ecospec.policies import DraftTree
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance.contract import AcceptanceRequest, BoundEstimator, along_paths

KIND = "learned"
DEPTHS, RANKS = 8, 4
"""Depths and ranks that are told apart; deeper and lower ones count as the last."""
SCALARS = 5
LOG_ODDS = 4
"""Which of them are the draft's log odds."""
INPUTS = SCALARS + DEPTHS + RANKS
LEAST_LOG = -12.0
LEAST = math.exp(LEAST_LOG)
"""Logarithms of probabilities are cut off here."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """h = silu(features · inputs + rms(state) · state + hidden_bias); logit = features · direct + h · out + out_bias.

    Attributes:
        inputs: float32 [INPUTS, R]. state: [H, R]. hidden_bias: [R]. direct: [INPUTS]. out: [R]. out_bias: [1].
    """

    inputs: Floats
    state: Floats
    hidden_bias: Floats
    direct: Floats
    out: Floats
    out_bias: Floats

    def __post_init__(self) -> None:
        rank = self.hidden_bias.shape[0] if self.hidden_bias.ndim == 1 else -1
        shapes = ((INPUTS, rank), (self.state.shape[0], rank), (rank,), (INPUTS,), (rank,), (1,))
        for array, shape in zip(
            (self.inputs, self.state, self.hidden_bias, self.direct, self.out, self.out_bias), shapes, strict=True
        ):
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"weights of shape {array.shape}, expected finite ones of shape {shape}")


def features_of(tree: DraftTree, entropies: FloatArray) -> Floats:
    """float32 [N, INPUTS] of a tree's nodes; the root's row means nothing.

    Args:
        entropies: [N], of the distribution that each node was drafted from, in nats.
    """
    # Plain lists: a dozen nodes are sooner gone through than handed to array functions.
    probs, paths, given = tree.probs.tolist(), tree.path_probs.tolist(), entropies.tolist()
    log_probs = [_log(each) for each in probs]
    best_other, ranks = [LEAST_LOG] * tree.size, [0] * tree.size
    for children in tree.children:
        if len(children) > 1:
            ordered = sorted(children, key=lambda node: -probs[node])
            for rank, child in enumerate(ordered):
                ranks[child] = rank
                best_other[child] = log_probs[ordered[0 if rank else 1]]
    found = np.zeros((tree.size, INPUTS), dtype=np.float32)
    found[:, :SCALARS] = [
        (own, _log(path), own - other, entropy, own - _log(1 - prob))
        for prob, own, path, other, entropy in zip(probs, log_probs, paths, best_other, given, strict=True)
    ]
    ones = [
        row * INPUTS + SCALARS + place
        for row, (depth, rank) in enumerate(zip(tree.depths.tolist(), ranks, strict=True))
        for place in (min(max(depth - 1, 0), DEPTHS - 1), DEPTHS + min(rank, RANKS - 1))
    ]
    found.reshape(-1)[ones] = 1.0
    return found


def _log(probability: float) -> float:
    return math.log(probability) if probability > LEAST else LEAST_LOG


def normed(states: Floats) -> Floats:
    """[M, H] divided by their root mean square."""
    scale: Floats = np.sqrt((states * states).mean(-1, keepdims=True) + 1e-6)
    return np.asarray(states / scale, dtype=np.float32)


def conditional(weights: Weights, features: Floats, states: Floats, rows: npt.NDArray[np.int64]) -> FloatArray:
    """float64 [N]: the probability of each node given that its parent is accepted.

    Args:
        features: [N, INPUTS]. states: [M, H]. rows: [N], which of them each node was drafted from.
    """
    inner = features @ weights.inputs + (normed(states) @ weights.state)[rows] + weights.hidden_bias
    inner = inner / (1 + np.exp(-np.clip(inner, -60, 60)))
    logits = (features @ weights.direct + inner @ weights.out + weights.out_bias).astype(np.float64)
    chances: FloatArray = 1 / (1 + np.exp(-np.clip(logits, -60, 60)))
    return chances


class BoundLearned(BoundEstimator):
    """The weights of one temperature."""

    def __init__(self, weights: Weights, fitted_on: frozenset[str] = frozenset()) -> None:
        self.fitted_on = fitted_on
        self._weights = weights

    def estimate(self, request: AcceptanceRequest) -> FloatArray:
        """float64 [N], the products along the paths."""
        tree = request.tree
        known = request.drafter_states(tree)
        if known.entropies is None:
            raise ValueError("the drafter keeps no distributions; expected one whose entropies are known")
        parents = np.maximum(tree.parents, 0)
        rows = known.rows[parents]  # of the state that a node was drafted from, its parent's own
        entropies = known.entropies().float().cpu().numpy()
        states = known.states.float().cpu().numpy()
        features = features_of(tree, entropies[rows])
        return along_paths(tree.parents, conditional(self._weights, features, states, rows))
