"""The feature predictor: its arithmetic node by node, its running forms against each other, its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    VOCAB,
    asked,
    random_tokens,
    random_tree,
    tiny_head,
    tiny_target,
)
from torch.nn import functional as F

from ecospec.errors import UserError
from ecospec.harness.drafting import DrafterBatch, DrafterSession
from ecospec.harness.loading import target_view
from ecospec.policies import DraftTree
from ecospec.predictors import feature
from ecospec.predictors.builtin import Feature
from ecospec.predictors.checkpoint import save_predictor, target_geometry
from ecospec.predictors.contract import DrafterView, NodeStates, TargetView
from ecospec.predictors.feature import KIND, BoundFeature, FeaturePredictor, drafter_facts, load_feature

RANK = 5


def model_of(hidden_size: int = HIDDEN, drafter_size: int = HIDDEN) -> FeaturePredictor:
    torch.manual_seed(0)
    model = FeaturePredictor(hidden_size, drafter_size, LAYERS, EXPERTS, RANK)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bound() -> BoundFeature:
    return BoundFeature(model_of(), target_view(tiny_target()))


def some_states(tree: DraftTree, seed: int = 0) -> NodeStates:
    generator = torch.Generator().manual_seed(seed)
    own = (torch.rand(tree.size, generator=generator) < 0.5).numpy()
    rows = torch.randint(3, (tree.size,), generator=generator).numpy()
    return NodeStates(torch.randn(3, HIDDEN, generator=generator), rows, own)


def by_hand(bound: BoundFeature, token: int, state: torch.Tensor, own: bool) -> list[list[int]]:
    """The experts of one node in each layer, one layer after another."""
    model, embedding = bound.model, tiny_target().embedding[token]
    state, embedding = (x / x.square().mean().sqrt() for x in (state, embedding))
    found = []
    for layer in range(LAYERS):
        part = slice(layer * RANK, (layer + 1) * RANK)
        weights = model.state.weight[: LAYERS * RANK] if own else model.state.weight[LAYERS * RANK :]
        context = weights[part] @ state
        logits = F.silu(context + model.token.weight[part] @ embedding) @ model.up[layer] + model.bias[layer, 0]
        found.append(sorted(logits.topk(TOP_K).indices.tolist()))
    return found


def test_each_node_and_layer_is_what_its_formula_gives(bound: BoundFeature) -> None:
    seen = set()
    for seed in range(5):
        tree = random_tree(np.random.default_rng(seed), 9)
        states = some_states(tree, seed)
        routing = bound.start(asked([1], 30, states=lambda tree, states=states: states)).predict(tree)
        assert routing.shape == (LAYERS, tree.size, TOP_K)
        for node in range(tree.size):
            expected = by_hand(bound, int(tree.tokens[node]), states.states[states.rows[node]], bool(states.own[node]))
            assert np.sort(routing[:, node]).tolist() == expected
            seen.add(str(expected))
    assert len(seen) > 30


def test_the_tokens_part_is_the_same_in_however_many_pieces_it_was_worked_out(
    bound: BoundFeature, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    assert len(target.embedding) % 7
    monkeypatch.setattr(feature, "TOKENS_AT_ONCE", 7)
    pieces = BoundFeature(bound.model, target_view(target))
    tree = random_tree(np.random.default_rng(3), 9)
    one, other = (np.sort(each.predict([tree], [some_states(tree)])[0]) for each in (bound, pieces))
    assert (one == other).all()


def test_own_and_inherited_states_are_read_differently(bound: BoundFeature) -> None:
    tree = random_tree(np.random.default_rng(1), 9)
    states = some_states(tree)
    turned = NodeStates(states.states, states.rows, ~states.own)
    one, other = (bound.predict([tree], [each])[0] for each in (states, turned))
    assert (np.sort(one) != np.sort(other)).any()


def test_requests_of_a_batch_are_predicted_for_as_each_alone(bound: BoundFeature) -> None:
    trees = [random_tree(np.random.default_rng(seed), 3 + seed) for seed in range(4)]
    states = {tree.size: some_states(tree, tree.size) for tree in trees}
    requests = [asked([1], 30, states=lambda tree: states[tree.size])] * 4
    batch = bound.start_batch(requests)
    alone = [bound.start(requests[0]).predict(tree) for tree in trees]
    assert all((np.sort(a) == np.sort(b)).all() for a, b in zip(batch.predict(trees), alone, strict=True))
    batch.commit([[0]] * 4)
    batch.leave(1)
    rest = batch.predict([trees[i] for i in (0, 2, 3)])
    assert all((np.sort(a) == np.sort(alone[i])).all() for a, i in zip(rest, (0, 2, 3), strict=True))


def test_it_reads_the_states_of_the_tree_that_was_drafted() -> None:
    """In a batch whose requests leave, each request keeps its own drafter's states."""
    target, head = tiny_target(), tiny_head()
    bound = BoundFeature(model_of(), target_view(target))
    prompts = [random_tokens(np.random.default_rng(seed), 4) for seed in range(3)]
    features = [torch.randn(4, 3 * HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    drafters = DrafterBatch(head, target.embedding, [40] * 3)
    requests = []
    for row, (prompt, states) in enumerate(zip(prompts, features, strict=True)):
        drafters.start(row, prompt, states)
        requests.append(asked(prompt, 40, states=drafters.sessions[row].node_states))
    batch = bound.start_batch(requests)
    remaining = [0, 1, 2]
    for gone in (None, 1, 0):
        if gone is not None:
            for memory in (drafters, batch, remaining):
                memory.leave(gone) if not isinstance(memory, list) else memory.pop(gone)
        depths = [3, 2, 1][: len(remaining)]
        trees = drafters.draft([prompts[i][-1] for i in remaining], depths, 2)
        found = batch.predict(trees)
        for i, depth, tree, routing in zip(remaining, depths, trees, found, strict=True):
            alone = DrafterSession(head, target.embedding, 40)
            alone.extend(prompts[i], features[i])
            states = alone.node_states(alone.draft(prompts[i][-1], depth, 2))
            for node in range(tree.size):
                expected = by_hand(
                    bound, int(tree.tokens[node]), states.states[states.rows[node]], bool(states.own[node])
                )
                assert np.sort(routing[:, node]).tolist() == expected


# --- on disk


@pytest.fixture
def drafter(tmp_path: Path) -> DrafterView:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return DrafterView(HIDDEN, folder)


@pytest.fixture
def view(bound: BoundFeature, drafter: DrafterView) -> TargetView:
    return replace(target_view(tiny_target()), drafter=drafter)


def save(folder: Path, bound: BoundFeature, trained_on: DrafterView, **changes: object) -> Path:
    config = {
        "kind": KIND,
        "target": target_geometry(target_view(tiny_target())),
        "drafter": drafter_facts(trained_on),
        "rank": RANK,
        **changes,
    }
    save_predictor(folder, config, bound.model.state_dict())
    return folder


def test_a_loaded_one_predicts_what_the_saved_one_did(
    bound: BoundFeature, view: TargetView, drafter: DrafterView, tmp_path: Path
) -> None:
    folder = save(tmp_path / "p", bound, drafter)
    loaded = Feature(path=folder).bind(view)
    assert isinstance(loaded, BoundFeature)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    tree = random_tree(np.random.default_rng(3), 9)
    states = some_states(tree)
    assert (np.sort(loaded.predict([tree], [states])[0]) == np.sort(bound.predict([tree], [states])[0])).all()
    save(tmp_path / "bundle" / "feature", bound, drafter)
    assert isinstance(Feature().bind(replace(view, bundle=tmp_path / "bundle")), BoundFeature)


def refusal(folder: Path, view: TargetView) -> str:
    with pytest.raises(UserError) as caught:
        load_feature(folder, view)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"predictor {folder}: ")


def test_another_drafter_or_none_is_refused(
    bound: BoundFeature, view: TargetView, drafter: DrafterView, tmp_path: Path
) -> None:
    folder = save(tmp_path / "p", bound, drafter)
    assert refusal(folder, replace(view, drafter=None)) == "it reads a drafter's states; expected --drafter"
    assert "a drafter with hidden_size = 32" in refusal(folder, replace(view, drafter=replace(drafter, hidden_size=8)))
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"other weights")
    assert "weights_sha256" in refusal(folder, replace(view, drafter=DrafterView(HIDDEN, other)))
    (other / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_feature(folder, replace(view, drafter=DrafterView(HIDDEN, other)))


def test_what_does_not_fit_is_named(
    bound: BoundFeature, view: TargetView, drafter: DrafterView, tmp_path: Path
) -> None:
    assert "trained for vocab_size = 9" in refusal(
        save(tmp_path / "0", bound, drafter, target={**target_geometry(view), "vocab_size": 9}), view
    )
    for number, rank in enumerate((None, "wide", -3, [1])):
        folder = save(tmp_path / f"rank{number}", bound, drafter, rank=rank)
        assert "rank" in refusal(folder, view)
    folder = save(tmp_path / "1", bound, drafter, rank=RANK + 1)
    assert refusal(folder, view).startswith("tensor state.weight has shape (30, 32), expected (36, 32)")
    for drafters in (None, [], "x", {}):
        assert "trained on the states of a drafter with" in refusal(
            save(tmp_path / "2", bound, drafter, drafter=drafters), view
        )
    (tmp_path / "1" / "model.safetensors").write_bytes(b"cut")
    assert "not readable" in refusal(tmp_path / "1", view)


def test_it_runs_in_the_targets_dtype(
    bound: BoundFeature, view: TargetView, drafter: DrafterView, tmp_path: Path
) -> None:
    half = replace(view, embedding=view.embedding.bfloat16())
    loaded = load_feature(save(tmp_path / "p", bound, drafter), half)
    tree = DraftTree.chain(np.arange(3) % VOCAB, np.ones(3))
    states = some_states(tree)
    routing = loaded.predict([tree], [NodeStates(states.states.bfloat16(), states.rows, states.own)])[0]
    assert routing.shape == (LAYERS, 3, TOP_K)
