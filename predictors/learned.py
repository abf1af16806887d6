"""The learned expert predictor (section 4.1 of the paper): target embedding → projection → backbone → L×E logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ecospec.errors import UserError, one_line
from ecospec.policies import DraftTree
from ecospec.predictors.backbone import (
    UnusableBackboneError,
    build,
    check_tree_passes,
    describe,
    embedding_name,
    reach,
    read_config,
    states,
)
from ecospec.predictors.checkpoint import check_tensors, read_predictor, save_predictor, target_facts
from ecospec.predictors.contract import (
    BoundPredictor,
    PredictionRequest,
    PredictorBatch,
    PredictorSession,
    Routing,
    TargetView,
)
from ecospec.predictors.kv_cache import SlotCache, tree_mask
from ecospec.predictors.packing import PackedPass, SlotPool
from ecospec.predictors.placing import place
from ecospec.predictors.pretrained import UNLOADABLE

KIND = "learned"


class ExpertPredictor(nn.Module):
    """Maps target embeddings [B, n, Ht] to expert logits [B, n, L, E]."""

    def __init__(
        self, hidden_size: int, moe_layers: int, experts: int, backbone: Mapping[str, Any] | nn.Module
    ) -> None:
        """Put projection and head around a backbone.

        Args:
            backbone: the model itself, or the description of one to make with random weights; see `read_config`.
        """
        super().__init__()
        config: Any = backbone.config if isinstance(backbone, nn.Module) else read_config(backbone)
        self.moe_layers, self.experts = moe_layers, experts
        self.layers, self.reach = int(config.num_hidden_layers), reach(config)
        self.projection = nn.Linear(hidden_size, config.hidden_size, bias=False)
        self.backbone: Any = backbone if isinstance(backbone, nn.Module) else build(config)
        self.head = nn.Linear(config.hidden_size, moe_layers * experts, bias=False)

    def train(self, mode: bool = True) -> Self:
        """As of any module, but a backbone's dropout stays off: a resumed training could not repeat its noise."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(
        self,
        embeddings: Tensor,
        *,
        cache: SlotCache | PackedPass | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, n, L, E] for tokens whose target embeddings are given."""
        found = states(self.backbone, self.projection(embeddings), cache=cache, positions=positions, mask=mask)
        logits: Tensor = self.head(found)
        return logits.view(*logits.shape[:-1], self.moe_layers, self.experts)


def routing_loss(logits: Tensor, routing: Tensor) -> Tensor:
    """Layer-wise cross-entropy against the uniform distribution over the routed experts (section 4.1 of the paper).

    Args:
        logits: [B, n, L, E]. routing: int64 [L, B·n, K], the true experts.

    Returns:
        The mean over tokens and layers of −(1/K) Σ_{e routed} log softmax(logits)_e.
    """
    log_probs = logits.flatten(0, 1).log_softmax(-1)
    return -log_probs.gather(-1, routing.transpose(0, 1)).mean()


def topk_overlap(logits: Tensor, routing: Tensor) -> Tensor:
    """Per layer, the mean share of the K true experts among the top K predicted (the paper's accuracy).

    Shapes as in `routing_loss`; returns [L].
    """
    top_k = routing.shape[-1]
    predicted = logits.flatten(0, 1).topk(top_k, dim=-1).indices
    hits = (predicted[..., :, None] == routing.transpose(0, 1)[..., None, :]).any(-1)
    return hits.float().mean(dim=(0, 2))


def load_learned(folder: Path, target: TargetView) -> BoundLearned:
    """Read a trained predictor.

    Raises:
        UserError: see `read_predictor`; also when the backbone's description is unusable, or a tensor is
            missing, left over or of another shape.
    """
    config, tensors = read_predictor(folder, KIND, target)
    try:
        model = ExpertPredictor(target.hidden_size, target.moe_layers, target.experts, config["backbone"])
    except UnusableBackboneError as error:
        raise UserError(f"predictor {folder}: its backbone cannot be used: {error}") from error
    except UNLOADABLE as error:
        raise UserError(f"predictor {folder}: its config describes no backbone ({one_line(error)})") from error
    check_tensors(folder, tensors, used_tensors(model))
    model.load_state_dict(tensors, strict=False)  # the one tensor left out is not used
    try:
        check_tree_passes(model.backbone)
    except UnusableBackboneError as error:
        raise UserError(f"predictor {folder}: its backbone cannot be used: {error}") from error
    weight: Tensor = target.embedding
    return BoundLearned(place(model, weight.device, weight.dtype), target)


def used_tensors(model: ExpertPredictor) -> dict[str, Tensor]:
    """All tensors of a predictor but its backbone's own embedding table."""
    unused = f"backbone.{embedding_name(model.backbone)}"
    return {name: t for name, t in model.state_dict().items() if name != unused}


def saved_tensors(model: ExpertPredictor, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a predictor's file."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in used_tensors(model).items()}


def save_learned(folder: Path, model: ExpertPredictor, target: TargetView) -> None:
    """Write a trained predictor, so that `load_learned` needs nothing but its folder."""
    config = {
        "kind": KIND,
        "target": target_facts(target),
        "embedding_source": "target",
        "backbone": describe(model.backbone),
    }
    save_predictor(folder, config, saved_tensors(model))


class BoundLearned(BoundPredictor):
    """A predictor with its weights, beside the target whose embedding it reads."""

    def __init__(self, model: ExpertPredictor, target: TargetView) -> None:
        self.model, self.target = model, target

    def start(self, request: PredictionRequest) -> PredictorSession:
        """Process the prompt into the predictor's own KV memory."""
        return LearnedSession(self, request.prompt, request.capacity)

    def start_batch(self, requests: Sequence[PredictionRequest]) -> PredictorBatch:
        """One pass a step for all of them."""
        if len(requests) == 1:
            return super().start_batch(requests)
        return LearnedBatch(self, [r.prompt for r in requests], max(r.capacity for r in requests))


class LearnedSession(PredictorSession):
    """One pass a step, over the tree's nodes; the accepted ones keep the rows they got there."""

    @torch.inference_mode()
    def __init__(
        self, bound: BoundLearned, prompt: Sequence[int], capacity: int, cache: SlotCache | None = None
    ) -> None:
        self._model, self._target = bound.model, bound.target
        self._cache = SlotCache(bound.model.layers, capacity) if cache is None else cache
        if prompt:
            _check_reach(self._model, len(prompt))
            ids = torch.as_tensor(prompt, device=self._target.embedding.device)
            self._model(self._target.embedding[ids][None], cache=self._cache)
            self._cache.advance(len(prompt))

    @torch.inference_mode()
    def predict(self, tree: DraftTree) -> Routing:
        """Top-K experts [L, N, K]."""
        _check_reach(self._model, self._cache.length + int(tree.depths.max()) + 1)
        device = self._target.embedding.device
        logits = self._model(  # torch.tensor copies: it warns of sharing a tree's read-only arrays
            self._target.embedding[torch.tensor(tree.tokens, device=device)][None],
            cache=self._cache,
            positions=torch.tensor(tree.depths + self._cache.length, device=device)[None],
            mask=tree_mask(torch.tensor(tree.ancestors, device=device), self._cache.length),
        )[0]
        return top_experts(logits, self._target.top_k)

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the rows of the accepted nodes."""
        self._cache.keep(nodes)


class LearnedBatch(PredictorBatch):
    """One pass a step over the trees of all requests; with a single one left, its `LearnedSession`."""

    def __init__(self, bound: BoundLearned, prompts: Sequence[Sequence[int]], capacity: int) -> None:
        self._model, self._target = bound.model, bound.target
        self._pool = SlotPool(bound.model.layers, capacity, len(prompts))
        self._sessions = [
            LearnedSession(bound, prompt, capacity, cache)
            for prompt, cache in zip(prompts, self._pool.caches, strict=True)
        ]

    @torch.inference_mode()
    def predict(self, trees: Sequence[DraftTree]) -> list[Routing]:
        """Top-K experts [L, N, K] of every tree."""
        if len(trees) == 1:
            return [self._sessions[0].predict(trees[0])]
        device, counts = self._target.embedding.device, [tree.size for tree in trees]
        seen = np.zeros((len(trees), max(counts), max(counts)), dtype=bool)
        for row, tree in enumerate(trees):
            seen[row, : tree.size, : tree.size] = tree.ancestors
        packed = PackedPass(self._pool, counts, torch.from_numpy(seen).to(device))
        lengths = [cache.length for cache in self._pool.caches]
        depths = np.concatenate([tree.depths + length for tree, length in zip(trees, lengths, strict=True)])
        _check_reach(self._model, int(depths.max()) + 1)
        tokens = np.concatenate([tree.tokens for tree in trees])
        logits = self._model(
            self._target.embedding[torch.from_numpy(tokens).to(device)][None],
            cache=packed,
            positions=torch.from_numpy(depths).to(device)[None],
            mask=packed.mask,
        )[0]
        routing = top_experts(logits, self._target.top_k)
        return np.split(routing, np.cumsum(counts)[:-1], axis=1)

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep the rows of the accepted nodes."""
        self._pool.keep(nodes)

    def leave(self, index: int) -> None:
        """Drop the request at ``index``."""
        del self._sessions[index]
        self._pool.leave(index)


def _check_reach(model: ExpertPredictor, tokens: int) -> None:
    """Refuse what a backbone has no positions for.

    Raises:
        UserError: a sequence of so many tokens is too long.
    """
    if tokens > model.reach:
        raise UserError(
            f"predictor {KIND!r}: its backbone reads at most {model.reach} tokens, and a prompt with its output has "
            f"come to {tokens}; expected shorter ones, or a predictor trained on another --backbone"
        )


def top_experts(logits: Tensor, top_k: int) -> Routing:
    """The K likeliest experts [L, n, K] of logits [n, L, E]."""
    top = logits.topk(top_k, dim=-1, sorted=False).indices
    return np.ascontiguousarray(top.transpose(0, 1).cpu().numpy())
