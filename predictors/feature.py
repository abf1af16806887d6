"""The feature predictor: the drafter's hidden state of each tree node, through small low-rank heads, one a MoE layer.

The drafter has run over the tree already, and its state is made from the target's own: it knows the context. So this
predictor needs neither a backbone nor a KV memory. What it makes of a token depends on nothing else, so that is looked
up: a step is two matrix products, one over the states and one over the nodes. It is not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.checkpoint import check_tensors, read_predictor, weights_hash
from ecospec.predictors.contract import (
    BoundPredictor,
    DrafterView,
    NodeStates,
    PredictionRequest,
    PredictorBatch,
    PredictorSession,
    Routing,
    TargetView,
)
from ecospec.predictors.learned import top_experts
from ecospec.predictors.placing import place

KIND = "feature"
TOKENS_AT_ONCE = 8192
"""Tokens whose part is worked out in one go when a predictor is loaded; bounds what that needs beside the result."""


class FeaturePredictor(nn.Module):
    """Maps drafter states and target embeddings to expert logits [n, L, E].

    Layer l has a head of rank r: up_l · silu(state_l · s + token_l · e) + bias_l. s is a node's own state or, where it
    was not expanded, its parent's, by other weights, and e the embedding of its token, both divided by their root mean
    square. In ``state`` a state's r · L values as its own node's come before those as its children's.
    """

    def __init__(self, hidden_size: int, drafter_size: int, moe_layers: int, experts: int, rank: int) -> None:
        super().__init__()
        self.rank, self.moe_layers = rank, moe_layers
        self.state = nn.Linear(drafter_size, 2 * moe_layers * rank, bias=False)  # as its own, then as its children's
        self.token = nn.Linear(hidden_size, moe_layers * rank, bias=False)
        self.up = nn.Parameter(torch.empty(moe_layers, rank, experts))
        self.bias = nn.Parameter(torch.zeros(moe_layers, 1, experts))
        nn.init.normal_(self.up, std=rank**-0.5)

    def forward(self, states: Tensor, uses: Tensor, embeddings: Tensor) -> Tensor:
        """Expert logits [n, L, E].

        Args:
            states: [M, H]. uses: int64 [n], for each node 2 · m where state m is its own, 2 · m + 1 where it is its
                parent's. embeddings: [n, Ht], of the nodes' tokens.
        """
        return self.combine(states, uses, self.of_tokens(embeddings))

    def of_tokens(self, embeddings: Tensor) -> Tensor:
        """The part [n, L · r] of the inner values that the tokens' embeddings [n, Ht] give."""
        part: Tensor = self.token(F.rms_norm(embeddings, embeddings.shape[-1:]))
        return part

    def combine(self, states: Tensor, uses: Tensor, of_tokens: Tensor) -> Tensor:
        """Expert logits [n, L, E] from what `of_tokens` gave and the states, as `forward` takes them."""
        # A state serves several nodes, so it is multiplied before it is handed out.
        served = self.state(F.rms_norm(states, states.shape[-1:])).view(-1, self.moe_layers * self.rank)[uses]
        inner = F.silu(served + of_tokens)
        by_layer = inner.view(-1, self.moe_layers, self.rank).transpose(0, 1)
        return torch.baddbmm(self.bias, by_layer, self.up).transpose(0, 1)


def uses_of(states: NodeStates, before: int = 0) -> list[int]:
    """How each node uses a state, as `FeaturePredictor.forward` takes it, ``before`` other states standing before."""
    # Plain lists, here and for the tokens: for a dozen nodes several array functions cost more than going through them.
    rows, own = states.rows.tolist(), states.own.tolist()
    return [2 * (before + row) + (not its) for row, its in zip(rows, own, strict=True)]


def load_feature(folder: Path, target: TargetView) -> BoundFeature:
    """Read a trained predictor.

    Raises:
        UserError: see `read_predictor`; also when there is no drafter, the predictor was trained on another one's
            states, or a tensor is missing, left over or of another shape.
    """
    config, tensors = read_predictor(folder, KIND, target)
    drafter = target.drafter
    if target.stateless is not None:
        raise UserError(
            f"predictor {folder}: it was trained on the states of an EAGLE-3 head, which drafter {target.stateless!r} "
            "has not; expected --drafter with that head, or a predictor that reads no drafter, such as learned"
        )
    if drafter is None:
        raise UserError(f"predictor {folder}: it reads a drafter's states; expected --drafter")
    check_drafter(folder, config, drafter)
    try:
        model = FeaturePredictor(
            target.hidden_size, drafter.hidden_size, target.moe_layers, target.experts, int(config["rank"])
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"predictor {folder}: its config has no usable rank ({reason})") from error
    check_tensors(folder, tensors, model.state_dict())
    model.load_state_dict(tensors)
    weight: Tensor = target.embedding
    return BoundFeature(place(model, weight.device, weight.dtype), target)


def check_drafter(folder: Path, config: Mapping[str, Any], drafter: DrafterView) -> None:
    """Compare the drafter with the one whose states a predictor was trained on.

    Raises:
        UserError: it is another one.
    """
    trained = config.get("drafter")
    for name, expected in drafter_facts(drafter).items():
        found = trained.get(name) if isinstance(trained, dict) else None
        if found != expected:
            raise UserError(
                f"predictor {folder}: trained on the states of a drafter with {name} = {_short(found)}, but drafter "
                f"{drafter.folder} has {_short(expected)}; expected the drafter that it was trained with, or a "
                "predictor that reads no drafter, such as learned"
            )


def _short(value: object) -> str:
    return f"{str(value)[:12]}…" if isinstance(value, str) and len(value) > 12 else str(value)


def drafter_facts(drafter: DrafterView) -> dict[str, Any]:
    """What must agree between a predictor and the drafter whose states it reads."""
    return {"hidden_size": drafter.hidden_size, "weights_sha256": weights_hash(drafter.folder)}


class BoundFeature(BoundPredictor):
    """A predictor with its weights, and its part [V, L · r] for every token of the target's vocabulary."""

    def __init__(self, model: FeaturePredictor, target: TargetView) -> None:
        self.model, self.top_k = model, target.top_k
        embedding: Tensor = target.embedding
        self._of_tokens = embedding.new_empty(len(embedding), model.moe_layers * model.rank)
        with torch.inference_mode():
            for start in range(0, len(embedding), TOKENS_AT_ONCE):
                some = slice(start, start + TOKENS_AT_ONCE)
                self._of_tokens[some] = model.of_tokens(embedding[some])

    def start(self, request: PredictionRequest) -> PredictorSession:
        """The context is in the drafter's states."""
        return FeatureSession(self, request.drafter_states)

    def start_batch(self, requests: Sequence[PredictionRequest]) -> PredictorBatch:
        """One pass a step for all of them."""
        return FeatureBatch(self, [request.drafter_states for request in requests])

    @torch.inference_mode()
    def predict(self, trees: Sequence[DraftTree], states: Sequence[NodeStates]) -> list[Routing]:
        """Top-K experts [L, N, K] of every tree."""
        tokens: list[int] = []
        uses: list[int] = []
        begin = 0
        for tree, each in zip(trees, states, strict=True):
            tokens += tree.tokens.tolist()
            uses += uses_of(each, begin)
            begin += len(each.states)
        met = states[0].states if len(states) == 1 else torch.cat([each.states for each in states])
        ids, places = torch.tensor((tokens, uses), device=self._of_tokens.device)
        routing = top_experts(self.model.combine(met, places, self._of_tokens[ids]), self.top_k)
        return np.split(routing, np.cumsum([tree.size for tree in trees])[:-1], axis=1) if len(trees) > 1 else [routing]


class FeatureSession(PredictorSession):
    """One request; there is nothing to keep."""

    def __init__(self, bound: BoundFeature, states: Callable[[DraftTree], NodeStates]) -> None:
        self._bound, self._states = bound, states

    def predict(self, tree: DraftTree) -> Routing:
        """Top-K experts [L, N, K]."""
        return self._bound.predict([tree], [self._states(tree)])[0]

    def commit(self, nodes: Sequence[int]) -> None:
        """Nothing to keep."""


class FeatureBatch(PredictorBatch):
    """One pass a step over the trees of all requests."""

    def __init__(self, bound: BoundFeature, states: Sequence[Callable[[DraftTree], NodeStates]]) -> None:
        self._bound, self._states = bound, list(states)

    def predict(self, trees: Sequence[DraftTree]) -> list[Routing]:
        """Top-K experts [L, N, K] of every tree."""
        return self._bound.predict(trees, [states(tree) for states, tree in zip(self._states, trees, strict=True)])

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Nothing to keep."""

    def leave(self, index: int) -> None:
        """Drop the request at ``index``."""
        del self._states[index]
