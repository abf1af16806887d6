"""What a training from routing fits: the learned predictor, or the feature predictor on a drafter's states.

Both give logits for the tokens of a batch; how they are trained, on traces or on a corpus, is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from ecospec.errors import UserError
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.harness.loading import embedded_folder
from ecospec.harness.preparing import load_head
from ecospec.harness.target import Target
from ecospec.harness.training.drafter import unrolled_states
from ecospec.predictors import feature, learned
from ecospec.predictors.backbone import backbone_config, load_pretrained
from ecospec.predictors.checkpoint import save_predictor, target_facts
from ecospec.predictors.contract import DrafterView, TargetView
from ecospec.predictors.training import LoopConfig, train

Loss: TypeAlias = Callable[[int, float], tuple[Tensor, Mapping[str, float]]]
"""The scalar to differentiate at a step, and figures to log; see `train`."""
FRESH_RATE, PRETRAINED_RATE = 2e-3, 1e-5
"""Peak learning rates; that of a pretrained backbone is the paper's."""


@dataclass(frozen=True)
class PredictorShape:
    """Geometry of the learned predictor's fresh backbone."""

    width: int = 192
    layers: int = 2
    heads: int = 4


@dataclass(frozen=True)
class FeatureShape:
    """Rank of a MoE layer's head, and the draft steps after each of which the drafter's states are trained on."""

    rank: int = 64
    draft_steps: int = 3


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right.

    Attributes:
        ids: [B, n].
        real: bool [B, n], those of them that are tokens, T in all.
        routing: [L, T, K], their experts.
        judged: bool [T], those that the held-out overlap is taken over; see `TracedText.judged_from`.
        context: what `Learner.context` gave for the texts, [S, B, n, H], or None.
    """

    ids: Tensor
    real: Tensor
    routing: Tensor
    judged: Tensor
    context: Tensor | None = None


@dataclass(frozen=True)
class View:
    """Logits for some tokens of a batch, and what they should say.

    Attributes:
        name: which way the predictor met them; empty where there is only one.
        logits: [T', L, E]. routing: [L, T', K]. judged: bool [T'].
    """

    name: str
    logits: Tensor
    routing: Tensor
    judged: Tensor


class Learner(ABC):
    """A predictor in training.

    Attributes:
        kind: its name; ``OUTPUT/kind`` is the folder it is saved in.
        module: what has the parameters.
        shape: its sizes.
        reach: the most tokens of a text that it can read.
    """

    kind: ClassVar[str]
    reach: int
    module: nn.Module
    shape: PredictorShape | FeatureShape

    @abstractmethod
    def views(self, batch: Batch) -> list[View]:
        """Predictions for a batch, one for each way in which a token is met."""

    def context(self, ids: Tensor, features: Callable[[], Tensor]) -> Tensor | None:
        """What `views` needs of texts [B, n] beside their ids: [S, B, n, H], or None.

        Args:
            features: gives the target's features of them, [B, n, F · Ht].
        """
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the predictor's folder."""


class LearnedLearner(Learner):
    """The paper's predictor, with a fresh backbone or a pretrained one."""

    kind = learned.KIND
    module: learned.ExpertPredictor

    def __init__(self, target: Target, view: TargetView, shape: PredictorShape, backbone: str | None) -> None:
        sizes = (view.hidden_size, view.moe_layers, view.experts)
        if backbone is None:
            made: Any = backbone_config(shape.width, shape.layers, shape.heads, target.context)
        else:
            made = load_pretrained(backbone, target.context)
        self.module = learned.ExpertPredictor(*sizes, made).to(target.device)
        config = self.module.backbone.config
        self.shape = PredictorShape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
        self.reach = self.module.reach
        self._view, self._embedding = view, target.embedding.float()

    def views(self, batch: Batch) -> list[View]:
        """All real tokens."""
        with _mixed_precision(batch.ids):
            out: Tensor = self.module(self._embedding[batch.ids])
        return [View("", out.float()[batch.real], batch.routing, batch.judged)]

    def save(self, folder: Path) -> None:
        """Write the predictor's folder."""
        learned.save_learned(folder, self.module, self._view)


class FeatureLearner(Learner):
    """The feature predictor.

    A token is met in 2 · S ways: as an expanded node of depth 0 to S − 1 it has a state of its own, as a drafted one of
    depth 1 to S that of its parent. States come from the drafter unrolled as in its own training.
    """

    kind = feature.KIND

    def __init__(
        self, target: Target, view: TargetView, head: Eagle3Head, drafter: DrafterView, shape: FeatureShape
    ) -> None:
        self.shape: FeatureShape = shape
        self.reach = target.context
        self._view, self._drafter, self._head = view, drafter, head
        self._embedding = target.embedding.float()
        self.module = feature.FeaturePredictor(
            view.hidden_size, drafter.hidden_size, view.moe_layers, view.experts, shape.rank
        ).to(target.device)

    @torch.no_grad()
    def context(self, ids: Tensor, features: Callable[[], Tensor]) -> Tensor:
        """The drafter's states [S, B, n, H] of every token after 0 to S − 1 draft steps, in bfloat16.

        The first k + 1 tokens have none after k steps; there they are zero.
        """
        states = torch.zeros(self.shape.draft_steps, *ids.shape, self._drafter.hidden_size, dtype=torch.bfloat16)
        if ids.shape[1] == 1:
            return states
        own = self._embedding if self._head.own_embedding is None else self._head.own_embedding
        unrolled = unrolled_states(self._head, own[ids[:, 1:]], features()[:, :-1], self.shape.draft_steps)
        for k, found in enumerate(unrolled):  # entry t holds the token t + 1
            states[k, :, 1 + k :] = found[:, k:].to(states)
        return states

    def views(self, batch: Batch) -> list[View]:
        """Own states after 0 to S − 1 steps, and those of the parent."""
        assert batch.context is not None
        found = []
        embeddings = self._embedding[batch.ids]
        place = torch.full(batch.real.shape, -1, device=batch.ids.device)
        place[batch.real] = torch.arange(int(batch.real.sum()), device=batch.ids.device)
        for k, states in enumerate(batch.context.to(batch.ids.device)):
            for own in (True, False):
                shift = 0 if own else 1
                chosen = place[:, 1 + k + shift :]
                real = chosen >= 0
                at = chosen[real]
                met = states[:, 1 + k : states.shape[1] - shift][real]
                with _mixed_precision(batch.ids):
                    logits: Tensor = self.module(
                        met.float(),
                        2 * torch.arange(len(at), device=at.device) + (not own),
                        embeddings[:, 1 + k + shift :][real],
                    )
                name = f"own_{k}" if own else f"parent_{k + 1}"
                found.append(View(name, logits.float(), batch.routing[:, at], batch.judged[at]))
        return found

    def save(self, folder: Path) -> None:
        """Write the predictor's folder."""
        config = {
            "kind": self.kind,
            "target": target_facts(self._view),
            "embedding_source": "target",
            "drafter": feature.drafter_facts(self._drafter),
            "rank": self.shape.rank,
        }
        save_predictor(folder, config, {k: t.to(torch.bfloat16) for k, t in self.module.state_dict().items()})


def peak_rate(learning_rate: float | None, backbone: str | None) -> float:
    """The learning rate that is given, else the recipe's for such a backbone."""
    if learning_rate is not None:
        return learning_rate
    return FRESH_RATE if backbone is None else PRETRAINED_RATE


def told(learner: Learner, recipe: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and recipe for a training's record: what was in effect, and no folder of the machine it was made on."""
    rate, name = peak_rate(recipe.learning_rate, recipe.backbone), recipe.backbone
    if name is not None and Path(name).exists():
        name = Path(name).resolve().name
    shape = {"kind": learner.kind, **asdict(learner.shape)}
    return shape, {**asdict(recipe), "learning_rate": rate, "backbone": name}


def training_loss(views: Sequence[View]) -> Tensor:
    """The mean over the views of the cross-entropy (section 4.1 of the paper).

    Texts of a few tokens have none that is met deep in a draft: a view without tokens counts for nothing.
    """
    losses = [learned.routing_loss(view.logits[None], view.routing) for view in views if len(view.logits)]
    return torch.stack(losses).mean() if losses else torch.stack([view.logits.sum() for view in views]).sum()


def hits_by_layer(guess: Tensor, routing: Tensor) -> Tensor:
    """How many of the true experts were guessed in each layer [L]; both [L, T, K]."""
    return (guess[..., :, None] == routing[..., None, :]).any(-1).sum((1, 2))


def overlap(view: View) -> float:
    """Share of the true experts among the predicted, over all tokens of a view."""
    top_k = view.routing.shape[-1]
    guess = view.logits.detach().topk(top_k, dim=-1).indices.transpose(0, 1)
    return float(hits_by_layer(guess, view.routing).sum()) / max(1, view.routing.numel())


def held_out_figures(learner: Learner, batches: Iterable[Batch]) -> dict[str, Any]:
    """How often a predictor is right about the judged tokens of held-out texts.

    With several views the overlap is their mean, and each has a figure of its own.

    Raises:
        UserError: there is no token to judge by.
    """
    hits: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    top_k = 1
    for batch in batches:
        top_k = batch.routing.shape[-1]
        for view in learner.views(batch):
            true = view.routing[:, view.judged]
            guess = view.logits[view.judged].topk(top_k, dim=-1).indices.transpose(0, 1)
            hits[view.name] = hits.get(view.name, 0) + hits_by_layer(guess, true).cpu()
            tokens[view.name] = tokens.get(view.name, 0) + true.shape[1]
    if not tokens or not all(tokens.values()):
        raise UserError("the held-out texts have no token to judge by; expected longer ones, or answers")
    shares = {name: found / (tokens[name] * top_k) for name, found in hits.items()}
    per_layer = torch.stack(list(shares.values())).mean(0)
    each = {f"held_out_overlap_{name}": float(share.mean()) for name, share in shares.items() if name}
    return {
        "held_out_overlap": float(per_layer.mean()),
        **each,
        "held_out_overlap_by_layer": [round(float(v), 4) for v in per_layer],
    }


def table_figure(batches: Iterable[Batch], table: Tensor) -> dict[str, float]:
    """How often a token-frequency table int64 [V, L, K] is right about the same tokens."""
    hits = total = 0
    for batch in batches:
        true = batch.routing[:, batch.judged]
        known = table[batch.ids[batch.real][batch.judged]].transpose(0, 1)
        hits += int(hits_by_layer(known, true).sum())
        total += true.numel()
    return {"held_out_overlap_token_frequency": hits / max(1, total)}


def fit(
    learner: Learner,
    loss: Loss,
    loop: LoopConfig,
    output: Path,
    *,
    evaluate: Callable[[], Mapping[str, Any]],
    resume: bool,
) -> dict[str, Any]:
    """Train a predictor, and end with the weights of the best held-out overlap; see `train`."""
    return train(
        learner.module,
        loss,
        loop,
        output,
        evaluate=evaluate,
        resume=resume,
        title="predictor",
        keep_best="held_out_overlap",
    )


def _mixed_precision(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, dtype=torch.bfloat16)


def new_learner(
    kind: str,
    target: Target,
    view: TargetView,
    *,
    drafter: Path | None,
    shape: PredictorShape | FeatureShape | None,
    backbone: str | None = None,
) -> Learner:
    """A predictor with fresh weights.

    Args:
        kind: learned or feature.
        drafter: folder of the head whose states a feature predictor reads; None for the embedded one.
        shape: of that kind, or None for the default; a pretrained backbone has its own.
        backbone: of a learned one, the pretrained causal LM to start from; None for a fresh one.

    Raises:
        UserError: the drafter does not fit the target, or what is named cannot be a backbone.
    """
    if kind == learned.KIND:
        assert not isinstance(shape, FeatureShape)
        return LearnedLearner(target, view, shape or PredictorShape(), backbone)
    assert not isinstance(shape, PredictorShape)
    folder = drafter or embedded_folder() / "drafter"
    head = load_head(folder, target).to(target.device)
    return FeatureLearner(
        target, view, head, DrafterView(head.config.llama.hidden_size, folder), shape or FeatureShape()
    )
