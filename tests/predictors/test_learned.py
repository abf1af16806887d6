"""The learned predictor: its running form equals its model, and its loss and accuracy their formulas."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import (
    CONTEXT,
    EXPERTS,
    LAYERS,
    TOP_K,
    asked,
    path_to,
    random_tokens,
    random_tree,
    tiny_predictor,
    tiny_target,
    trees,
)

from ecospec.errors import UserError
from ecospec.harness.loading import target_view
from ecospec.predictors.backbone import backbone_config
from ecospec.predictors.builtin import Learned
from ecospec.predictors.checkpoint import save_predictor, target_geometry
from ecospec.predictors.contract import TargetView
from ecospec.predictors.learned import (
    KIND,
    BoundLearned,
    LearnedSession,
    load_learned,
    routing_loss,
    saved_tensors,
    topk_overlap,
)

PROMPT = random_tokens(np.random.default_rng(0), 6)


@pytest.fixture(scope="module")
def bound() -> BoundLearned:
    return tiny_predictor(tiny_target())


def session_of(bound: BoundLearned, prompt: list[int]) -> LearnedSession:
    return LearnedSession(bound, prompt, CONTEXT)


@torch.no_grad()
def last_experts(bound: BoundLearned, tokens: list[int]) -> list[set[int]]:
    """Per layer the top experts of the last token, from one plain causal pass over the whole sequence."""
    logits = bound.model(bound.target.embedding[tokens][None])[0, -1]
    assert logits.shape == (LAYERS, EXPERTS)
    return [set(layer.topk(TOP_K).indices.tolist()) for layer in logits]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], []], ids=len)
def test_a_tree_pass_equals_a_plain_pass_over_every_path(bound: BoundLearned, prompt: list[int]) -> None:
    session = session_of(bound, prompt)
    seen = set()
    for tree, _ in trees(seed=1, count=8):
        routing = session.predict(tree)
        assert routing.shape == (LAYERS, tree.size, TOP_K)
        for node in range(tree.size):
            tokens = [*prompt, *(int(t) for t in tree.tokens[path_to(tree, node)])]
            expected = last_experts(bound, tokens)
            assert [set(routing[layer, node].tolist()) for layer in range(LAYERS)] == expected
            seen |= expected[0]
    assert len(seen) > TOP_K  # it does depend on the tokens


def test_after_any_history_the_memory_is_that_of_a_fresh_prompt(bound: BoundLearned) -> None:
    rng = np.random.default_rng(2)
    session, kept = session_of(bound, PROMPT), list(PROMPT)
    for _ in range(25):
        tree = random_tree(rng, int(rng.integers(1, 8)))
        session.predict(tree)
        path = path_to(tree, int(rng.integers(0, tree.size)))
        session.commit(path)
        kept += [int(token) for token in tree.tokens[path]]
    fresh = session_of(bound, kept)
    assert session._cache.length == len(kept)
    for layer in range(2):
        for ours, theirs in zip(session._cache.kept(layer), fresh._cache.kept(layer), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    tree = random_tree(rng, 6)
    assert np.array_equal(np.sort(session.predict(tree), -1), np.sort(fresh.predict(tree), -1))


def test_predicting_warns_of_nothing(bound: BoundLearned) -> None:
    """A tree's arrays are read-only, which torch remarks on when it shares them; once a process, so by text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = random_tree(np.random.default_rng(3), 4)
        torch.set_warn_always(True)
        try:
            session_of(bound, PROMPT).predict(tree)
        finally:
            torch.set_warn_always(False)


# --- the loss and the accuracy


def test_the_loss_is_the_cross_entropy_against_the_uniform_distribution_over_the_routed() -> None:
    """One token, two layers of four experts. Layer 0 is uniform: ln 4. In layer 1 expert 0 has weight 3/6 and
    expert 1 weight 1/6, so the routed pair (0, 1) costs (ln 2 + ln 6) / 2."""
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, 0.0, 0.0]]])[None]
    routing = torch.tensor([[[2, 3]], [[0, 1]]])
    expected = (math.log(4) + (math.log(2) + math.log(6)) / 2) / 2
    assert float(routing_loss(logits, routing)) == pytest.approx(expected, rel=1e-6)


def test_loss_and_accuracy_equal_loops_over_batch_position_and_layer() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, LAYERS, EXPERTS)
    routing = torch.stack([torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(6)]) for _ in range(LAYERS)])
    losses, hits = [], [[] for _ in range(LAYERS)]
    for batch in range(2):
        for position in range(3):
            for layer in range(LAYERS):
                true = routing[layer, batch * 3 + position].tolist()
                row = logits[batch, position, layer]
                losses += [-float(row[e] - row.logsumexp(0)) for e in true]
                best = sorted(range(EXPERTS), key=lambda e, row=row: -float(row[e]))[:TOP_K]
                hits[layer] += [len(set(best) & set(true)) / TOP_K]
    assert float(routing_loss(logits, routing)) == pytest.approx(np.mean(losses), rel=1e-5)
    assert topk_overlap(logits, routing).tolist() == pytest.approx([np.mean(layer) for layer in hits])


def test_the_accuracy_by_hand() -> None:
    logits = torch.tensor([[[[4.0, 3.0, 1.0, 0.0]], [[0.0, 1.0, 2.0, 3.0]]]])  # top two: {0, 1} and {2, 3}
    assert topk_overlap(logits, torch.tensor([[[1, 2], [3, 2]]])).tolist() == [0.75]


# --- files


def save(bound: BoundLearned, folder: Path, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    backbone = backbone_config(width=16, layers=2, heads=2, context=CONTEXT)
    given = {"kind": KIND, "target": target_geometry(bound.target), "backbone": backbone, **config}
    save_predictor(folder, given, saved_tensors(bound.model, dtype))
    return folder


def test_a_saved_predictor_loads_and_predicts_the_same(bound: BoundLearned, tmp_path: Path) -> None:
    loaded = load_learned(save(bound, tmp_path / "p"), bound.target)
    for name, weight in bound.model.state_dict().items():
        if name != "backbone.embed_tokens.weight":
            assert torch.equal(loaded.model.state_dict()[name], weight), name
    tree = random_tree(np.random.default_rng(4), 9)
    ours, theirs = session_of(loaded, PROMPT).predict(tree), session_of(bound, PROMPT).predict(tree)
    assert np.array_equal(ours, theirs)
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_a_predictor_runs_in_the_targets_dtype(bound: BoundLearned, tmp_path: Path) -> None:
    half = TargetView(**{**vars(bound.target), "embedding": bound.target.embedding.bfloat16()})
    loaded = load_learned(save(bound, tmp_path / "p", torch.bfloat16), half)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    loaded.start(asked(PROMPT, CONTEXT)).predict(random_tree(np.random.default_rng(5), 3))


def refusal(folder: Path, target: TargetView) -> str:
    with pytest.raises(UserError) as caught:
        load_learned(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"predictor {folder}: ")


def test_tensors_that_do_not_fit_are_named(bound: BoundLearned, tmp_path: Path) -> None:
    def saved(number: int, **changes: torch.Tensor | None) -> Path:
        folder = save(bound, tmp_path / str(number))
        tensors = saved_tensors(bound.model, torch.float32)
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        config = {"kind": KIND, "target": target_geometry(bound.target), "backbone": backbone_config(16, 2, 2, CONTEXT)}
        save_predictor(folder, config, tensors)
        return folder

    size = LAYERS * EXPERTS
    assert refusal(saved(0, **{"head.weight": None}), bound.target) == (
        f"tensor head.weight has shape nothing, expected {(size, 16)}"
    )
    assert refusal(saved(1, **{"head.weight": torch.zeros(3, 16)}), bound.target) == (
        f"tensor head.weight has shape (3, 16), expected {(size, 16)}"
    )
    assert refusal(saved(2, extra=torch.zeros(3)), bound.target) == (
        "tensor extra has shape (3,), expected no such tensor"
    )


@pytest.mark.parametrize("backbone", [None, [], {"hidden_size": "wide"}, {"num_attention_heads": 3}])
def test_a_backbone_that_is_none_is_refused(bound: BoundLearned, tmp_path: Path, backbone: object) -> None:
    if isinstance(backbone, dict):
        backbone = backbone_config(16, 2, 2, CONTEXT) | backbone
    folder = save(bound, tmp_path / "p", backbone=backbone)
    assert refusal(folder, bound.target).startswith("its config describes no backbone (")


def test_without_a_path_the_targets_own_predictor_is_loaded(bound: BoundLearned, tmp_path: Path) -> None:
    save(bound, tmp_path / "learned")
    target = tiny_target()
    assert isinstance(Learned().bind(target_view(target, tmp_path)), BoundLearned)
    assert isinstance(Learned(path=tmp_path / "learned").bind(target_view(target)), BoundLearned)
    with pytest.raises(UserError, match="predictor 'learned': no trained predictor belongs to this target"):
        Learned().bind(target_view(target))
