"""What a training fits: which state each token is met with, and the figures it is judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import Checkpoints
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.loading import load_target, target_view
from ecospec.harness.target import Target
from ecospec.harness.training.learners import (
    Batch,
    FeatureLearner,
    FeatureShape,
    LearnedLearner,
    PredictorShape,
    View,
    held_out_figures,
    new_learner,
    overlap,
    table_figure,
    training_loss,
)
from ecospec.harness.training.traced import Sample, TracedRecipe, batch_of, train_on_traces
from ecospec.predictors.contract import DrafterView, TargetView
from ecospec.predictors.feature import FeaturePredictor, load_feature
from ecospec.predictors.traces import TracedText, TraceWriter, pack_routing

STEPS = 3


@pytest.fixture(scope="module")
def target(checkpoints: Checkpoints) -> Target:
    return load_target(str(checkpoints.target), dtype=torch.float32, device="cpu").target


@pytest.fixture(scope="module")
def learner(checkpoints: Checkpoints, target: Target) -> FeatureLearner:
    torch.manual_seed(0)
    made = new_learner(
        "feature",
        target,
        target_view(target),
        drafter=checkpoints.drafter,
        shape=FeatureShape(rank=4, draft_steps=STEPS),
    )
    assert isinstance(made, FeatureLearner)
    return made


def context_of(learner: FeatureLearner, target: Target, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    return learner.context(ids, lambda: target.teach(ids)[1])[:, 0]


@torch.inference_mode()
def drafted_state(learner: FeatureLearner, target: Target, tokens: list[int], steps: int) -> Tensor:
    """The drafter's state of the last token, the last ``steps`` tokens drafted, all others the target's."""
    features = target.teach(torch.tensor([tokens]))[1][0]
    head, known = learner._head, len(tokens) - steps
    session = DrafterSession(head, target.embedding, 60)
    state = session.extend(tokens[1:known], features[: known - 1])[-1:]
    for at in range(known, len(tokens)):
        embedding = target.embedding[tokens[at]][None, None]
        rotary = session.rotary_at(torch.tensor([at - 1]))
        state = head(embedding, state[None], rotary, session.cache, None)[0]
        session.cache.advance(1)
    return state[0]


def test_the_states_are_those_that_the_drafter_has_while_drafting(learner: FeatureLearner, target: Target) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 12).tolist()
    context = context_of(learner, target, tokens)
    assert context.shape == (STEPS, 12, 32)
    for k in range(STEPS):
        assert not context[k, : k + 1].any()
        for last in range(k + 1, 12):
            expected = drafted_state(learner, target, tokens[: last + 1], k)
            assert torch.allclose(context[k, last].float(), expected, rtol=0.02, atol=0.02), (k, last)


class Noted(FeaturePredictor):
    """Notes what it is asked."""

    def forward(self, states: Tensor, uses: Tensor, embeddings: Tensor) -> Tensor:
        self.asked: list[Any] = [*getattr(self, "asked", []), (states[uses // 2], uses % 2 == 0, embeddings)]
        return super().forward(states, uses, embeddings)


def test_each_way_meets_each_token_with_its_state_routing_and_embedding(
    learner: FeatureLearner, target: Target
) -> None:
    rng, view = np.random.default_rng(1), target_view(target)
    texts = [rng.integers(0, 300, n).tolist() for n in (9, 6, 2)]
    pieces = []
    for number, tokens in enumerate(texts):
        routing = rng.integers(0, 8, (view.moe_layers, len(tokens), view.top_k))
        pieces.append(Sample(np.array(tokens), routing, number, context_of(learner, target, tokens)))
    noted = Noted(32, 32, view.moe_layers, view.experts, 4)
    module, learner.module = learner.module, noted
    try:
        views = learner.views(batch_of(pieces, "cpu"))
    finally:
        learner.module = module
    assert [each.name for each in views] == ["own_0", "parent_1", "own_1", "parent_2", "own_2", "parent_3"]
    for number, (each, (states, own, embeddings)) in enumerate(zip(views, noted.asked, strict=True)):
        k, shift = divmod(number, 2)
        met = [(p, j) for p, piece in enumerate(pieces) for j in range(1 + k + shift, len(piece.tokens))]
        assert own.tolist() == [not shift] * len(met)
        assert each.routing.shape == (view.moe_layers, len(met), view.top_k)
        for at, (p, j) in enumerate(met):
            assert torch.equal(states[at], pieces[p].context[k, j - shift].float())  # type: ignore[index]
            assert torch.equal(embeddings[at], target.embedding[texts[p][j]])
            assert each.routing[:, at].tolist() == pieces[p].routing[:, j].tolist()
            assert bool(each.judged[at]) == (j >= pieces[p].judged_from)


def test_the_loss_is_the_mean_over_views_and_the_overlap_a_share() -> None:
    """Two experts, one layer: −log softmax of a logit 0 against log 3 is log 4, of log 3 it is log 4/3."""
    logits = torch.tensor([[[0.0, float(np.log(3))]]])
    views = [View("a", logits, torch.tensor([[[0]]]), torch.tensor([True]))]
    views.append(View("b", logits, torch.tensor([[[1]]]), torch.tensor([True])))
    assert training_loss(views).item() == pytest.approx((np.log(4) + np.log(4 / 3)) / 2)
    assert [overlap(each) for each in views] == [0.0, 1.0]


def test_held_out_figures_by_hand() -> None:
    """Two tokens, two layers of three experts, K = 1; the first view is right in 3 of 4, the second in 1 of 2."""

    class Fixed(LearnedLearner):
        def __init__(self) -> None: ...

        def views(self, batch: Batch) -> list[View]:
            def saying(*experts: list[int]) -> Tensor:
                return torch.nn.functional.one_hot(torch.tensor(experts), 3).float()  # [T, L, E]

            first = View("x", saying([0, 1], [2, 0]), batch.routing, batch.judged)
            return [first, View("y", saying([0, 0]), batch.routing[:, :1], torch.tensor([True]))]

    routing = torch.tensor([[[0], [2]], [[1], [2]]])  # [L, T, K]
    batch = Batch(torch.tensor([[4, 5]]), torch.ones(1, 2, dtype=torch.bool), routing, torch.tensor([True, True]))
    table = torch.zeros(6, 2, 1, dtype=torch.long)  # always expert 0: right once in four
    figures = {**held_out_figures(Fixed(), [batch]), **table_figure([batch], table)}
    assert figures["held_out_overlap_x"] == 0.75
    assert figures["held_out_overlap_y"] == 0.5
    assert figures["held_out_overlap"] == 0.625
    assert figures["held_out_overlap_by_layer"] == [1.0, 0.25]
    assert figures["held_out_overlap_token_frequency"] == 0.25
    nothing = Batch(batch.ids, batch.real, routing, torch.tensor([False, False]))
    with pytest.raises(UserError, match="no token to judge by"):
        held_out_figures(Fixed(), [nothing])


def made_up(view: TargetView, words: int, count: int) -> list[TracedText]:
    """Texts whose routing is a function of the token."""
    rng = np.random.default_rng(3)
    tables = rng.random((view.moe_layers, words, view.experts)).argsort(-1)[..., : view.top_k]
    found = []
    for i in range(count):
        tokens = rng.integers(0, words, 20)
        routing = pack_routing(np.stack([table[tokens] for table in tables]), view.experts)
        found.append(TracedText(f"made-up-{i}", tokens.astype(np.int32), 2, routing))
    return found


def test_a_feature_predictor_learns_routing_by_the_token_from_a_trace(
    checkpoints: Checkpoints, target: Target, tmp_path: Path
) -> None:
    """In every way in which a token is met; it fails where a token is met with another's routing."""
    view = target_view(target)
    with TraceWriter(tmp_path / "trace", {}, view) as writer:
        for text in made_up(view, 16, 80):
            writer.append(text)
    figures = train_on_traces(
        checkpoints.target,
        [tmp_path / "trace"],
        tmp_path / "out",
        kind="feature",
        drafter=checkpoints.drafter,
        shape=FeatureShape(rank=16),
        recipe=TracedRecipe(epochs=40, learning_rate=1e-2, patience=40),
    )
    ways = [figures[f"held_out_overlap_{name}_{k}"] for k in range(3) for name in ("own",)]
    ways += [figures[f"held_out_overlap_parent_{k}"] for k in (1, 2, 3)]
    assert min(ways) >= 0.99
    assert figures["held_out_overlap"] == pytest.approx(np.mean(ways))
    load_feature(
        tmp_path / "out" / "feature", TargetView(**{**vars(view), "drafter": DrafterView(32, checkpoints.drafter)})
    )


def test_a_feature_training_needs_the_drafter_of_its_target(checkpoints: Checkpoints, target: Target) -> None:
    with pytest.raises(UserError, match="drafter"):
        new_learner("feature", target, target_view(target), drafter=None, shape=None)  # the embedded one
    shape = PredictorShape(width=16, layers=1, heads=2)
    assert new_learner("learned", target, target_view(target), drafter=None, shape=shape).kind == "learned"


@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 1), (1, 1, 1), (9, 2)])
def test_texts_of_a_few_tokens_are_trained_on_as_far_as_they_go(
    learner: FeatureLearner, target: Target, lengths: tuple[int, ...]
) -> None:
    """Such a text has no token that is met deep in a draft; of one token it has none that is met at all."""
    rng = np.random.default_rng(0)
    layers, experts, top_k = target.geometry.moe_layers, target.geometry.experts, target.geometry.top_k
    samples = []
    for length in lengths:
        tokens = rng.integers(0, 300, length)
        routing = rng.permuted(np.tile(np.arange(experts), (layers, length, 1)), axis=-1)[..., :top_k]
        samples.append(Sample(tokens, routing, 0, context_of(learner, target, tokens.tolist())))
    loss = training_loss(learner.views(batch_of(samples, "cpu")))
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in learner.module.parameters()]
    assert all(grad is not None and torch.isfinite(grad).all() for grad in gradients)
    assert (float(loss.detach()) > 0) == (max(lengths) > 1)
    learner.module.zero_grad()
