"""The adapter gives what the library's own model gives, whatever was verified and rolled back before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CONTEXT,
    EXPERTS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    TOP_K,
    VOCAB,
    path_to,
    plain_forward,
    plain_routing,
    random_selection,
    random_tokens,
    random_tree,
    tiny_model,
    tiny_target,
    trees,
)

from ecospec.errors import UserError
from ecospec.harness.target import Target
from ecospec.policies import DraftTree

PROMPT = random_tokens(np.random.default_rng(0), 11)


def as_sets(routing: torch.Tensor) -> torch.Tensor:
    return routing.sort(-1).values


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_prefill_and_decode_equal_one_full_pass_of_the_library(family: str) -> None:
    target, plain = tiny_target(family), tiny_model(family)
    tokens = [*PROMPT, *random_tokens(np.random.default_rng(1), 6)]
    expected = plain_forward(plain, tokens).logits[0]
    assert expected.std() > 0.3  # otherwise the tolerance below would show nothing
    session = target.new_session(len(tokens))
    torch.testing.assert_close(session.prefill(PROMPT).logits[-1], expected[len(PROMPT) - 1], atol=1e-4, rtol=0)
    for at in range(len(PROMPT), len(tokens)):
        torch.testing.assert_close(session.decode(tokens[at]).logits[0], expected[at], atol=1e-4, rtol=0)
    assert session.length == len(tokens)


def test_a_prompt_in_two_parts_equals_a_prompt_at_once(family: str) -> None:
    target = tiny_target(family)
    once, parts = target.new_session(20), target.new_session(20)
    whole = once.prefill(PROMPT)
    parts.prefill(PROMPT[:4])
    second = parts.prefill(PROMPT[4:])
    torch.testing.assert_close(second.logits, whole.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(second.features, whole.features[4:], atol=1e-4, rtol=0)


def test_verifying_a_tree_equals_a_plain_pass_over_every_path(family: str) -> None:
    target, plain = tiny_target(family), tiny_model(family)
    session = target.new_session(len(PROMPT) + 12)
    session.prefill(PROMPT)
    for tree, nodes in trees(seed=2, count=8):
        result = session.verify(tree, nodes)
        assert result.logits.shape == (len(nodes), VOCAB)
        assert session.length == len(PROMPT)
        for row, node in enumerate(nodes):
            tokens = [*PROMPT, *(int(t) for t in tree.tokens[path_to(tree, int(node))])]
            expected = plain_forward(plain, tokens).logits[0, -1]
            torch.testing.assert_close(result.logits[row], expected, atol=1e-4, rtol=0)
            routed = plain_routing(plain, tokens)[:, -1]
            assert torch.equal(as_sets(result.routing[:, row]), routed), (family, int(node))


def test_routing_is_that_of_the_librarys_router_logits(family: str) -> None:
    target, plain = tiny_target(family), tiny_model(family)
    session = target.new_session(20)
    result = session.prefill(PROMPT)
    assert result.routing.shape == (LAYERS, len(PROMPT), TOP_K)
    assert result.routing.dtype == torch.int64
    expected = plain_routing(plain, PROMPT)
    assert torch.equal(as_sets(result.routing), expected)
    assert len(expected.unique()) > TOP_K  # the router does choose
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    taught = target.teach(ids)[2].view(LAYERS, 2, len(PROMPT), TOP_K)
    assert torch.equal(as_sets(taught[:, 0]), expected)
    assert torch.equal(as_sets(taught[:, 1]), plain_routing(plain, PROMPT[::-1]))


def test_a_feature_is_the_output_of_its_layer_and_of_no_neighbour(family: str) -> None:
    plain = tiny_model(family, num_hidden_layers=4)
    target = Target(tiny_model(family, num_hidden_layers=4), feature_layers=(0, 2))
    features = target.new_session(20).prefill(PROMPT).features
    hidden = plain_forward(plain, PROMPT, output_hidden_states=True).hidden_states
    assert features.shape == (len(PROMPT), 2 * HIDDEN)
    for part, layer in zip(features.split(HIDDEN, dim=-1), (0, 2), strict=True):
        torch.testing.assert_close(part, hidden[layer + 1][0], atol=1e-4, rtol=0)
        for neighbour in (layer, layer + 2):
            assert (part - hidden[neighbour][0]).abs().max() > 0.1


def test_the_last_layers_feature_is_taken_before_the_final_norm(family: str) -> None:
    plain, target = tiny_model(family), tiny_target(family, feature_layers=(LAYERS - 1,))
    features = target.new_session(20).prefill(PROMPT).features
    normed = plain_forward(plain, PROMPT, output_hidden_states=True).hidden_states[-1][0]
    assert (features - normed).abs().max() > 0.1
    torch.testing.assert_close(plain.get_decoder().norm(features), normed, atol=1e-4, rtol=0)
    torch.testing.assert_close(target.teach(torch.tensor([PROMPT]))[1][0], features, atol=1e-4, rtol=0)


def test_features_come_in_the_order_asked_for() -> None:
    forwards = tiny_target(feature_layers=(0, 2)).new_session(20).prefill(PROMPT).features
    backwards = tiny_target(feature_layers=(2, 0)).new_session(20).prefill(PROMPT).features
    torch.testing.assert_close(backwards, forwards.roll(HIDDEN, dims=-1))
    assert tiny_target(feature_layers=()).new_session(20).prefill(PROMPT).features.shape == (len(PROMPT), 0)


def random_accepted_rows(rng: np.random.Generator, tree: DraftTree, nodes: Any) -> list[int]:
    """The rows of a random path from the root through selected nodes; often the root alone."""
    rows = {int(node): row for row, node in enumerate(nodes)}
    path = [0]
    while rng.random() < 0.7:
        further = [child for child in tree.children[path[-1]] if child in rows]
        if not further:
            break
        path.append(int(rng.choice(further)))
    return [rows[node] for node in path]


def test_after_any_history_of_accepting_and_rejecting_the_memory_is_that_of_a_fresh_prefill(
    family: str,
) -> None:
    rng = np.random.default_rng(3)
    target, plain = tiny_target(family), tiny_model(family)
    session = target.new_session(CONTEXT + 8)
    session.prefill(PROMPT)
    kept = list(PROMPT)
    for step in range(30):
        tree = random_tree(rng, int(rng.integers(1, 9)))
        nodes = random_selection(rng, tree, int(rng.integers(1, tree.size + 1)))
        if len(kept) + tree.size > CONTEXT:
            break
        session.verify(tree, np.arange(tree.size))  # an extra pass, as the oracle makes, leaves no trace
        session.verify(tree, nodes)
        rows = random_accepted_rows(rng, tree, nodes)
        session.commit(rows)
        kept += [int(tree.tokens[nodes[row]]) for row in rows]
        assert session.length == len(kept)
        if step % 5 == 4:
            fresh = target.new_session(CONTEXT)
            fresh.prefill(kept)
            for layer in range(LAYERS):
                for ours, theirs in zip(session.cache.kept(layer), fresh.cache.kept(layer), strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert len(kept) > len(PROMPT) + 30
    following = session.verify(DraftTree.chain([7], [1.0]), np.array([0]))
    torch.testing.assert_close(following.logits[0], plain_forward(plain, [*kept, 7]).logits[0, -1], atol=1e-4, rtol=0)


def test_after_rejecting_every_draft_the_next_logits_are_those_of_a_fresh_memory(family: str) -> None:
    target = tiny_target(family)
    session, fresh = target.new_session(40), target.new_session(40)
    session.prefill(PROMPT)
    fresh.prefill(PROMPT)
    tree = random_tree(np.random.default_rng(4), 9)
    session.verify(tree, np.arange(9))
    session.commit([0])
    fresh.decode(int(tree.tokens[0]))
    torch.testing.assert_close(session.decode(5).logits, fresh.decode(5).logits, atol=1e-5, rtol=0)


def test_more_tokens_than_the_capacity_are_refused() -> None:
    session = tiny_target().new_session(len(PROMPT) + 2)
    session.prefill(PROMPT)
    tree = random_tree(np.random.default_rng(5), 3)
    with pytest.raises(RuntimeError, match="KV memory of 13 tokens cannot take 14"):
        session.verify(tree, np.arange(3))
    session.verify(tree, np.arange(2))


def test_a_checkpoint_that_asks_for_router_logits_does_not_break_verification(family: str) -> None:
    target = Target(tiny_model(family, output_router_logits=True))
    assert target.config.output_router_logits is False
    session = target.new_session(20)
    session.prefill(PROMPT)
    tree = random_tree(np.random.default_rng(6), 5)
    expected = tiny_target(family).new_session(20)
    expected.prefill(PROMPT)
    torch.testing.assert_close(session.verify(tree, np.arange(5)).logits, expected.verify(tree, np.arange(5)).logits)


def test_the_geometry_counts_what_a_pass_reads() -> None:
    plain = tiny_model()
    geometry = tiny_target().geometry
    inner = 16
    assert geometry.expert_bytes == 3 * HIDDEN * inner * 4
    assert (geometry.vocab_size, geometry.hidden_size, geometry.context) == (VOCAB, HIDDEN, CONTEXT)
    assert (geometry.layers, geometry.moe_layers, geometry.experts, geometry.top_k) == (
        LAYERS,
        LAYERS,
        EXPERTS,
        TOP_K,
    )
    total = sum(p.numel() for p in plain.parameters()) * 4
    routed = LAYERS * EXPERTS * geometry.expert_bytes
    assert geometry.always_read_bytes == total - routed - VOCAB * HIDDEN * 4  # untied: the lookup reads rows
    tied = tiny_target(tie_word_embeddings=True).geometry
    assert tied.always_read_bytes == geometry.always_read_bytes  # tied: the one table is read as the head


def test_dense_layers_are_not_counted_as_moe_layers() -> None:
    target, plain = tiny_target(mlp_only_layers=[0]), tiny_model(mlp_only_layers=[0])
    assert (target.geometry.layers, target.geometry.moe_layers) == (LAYERS, LAYERS - 1)
    routing = target.new_session(20).prefill(PROMPT).routing
    assert torch.equal(as_sets(routing), plain_routing(plain, PROMPT))


def test_other_feature_layers_can_be_asked_for_later() -> None:
    target, expected = tiny_target(feature_layers=(2, 0)), tiny_target(feature_layers=(1, 2))
    target.read_features((1, 2))
    torch.testing.assert_close(
        target.new_session(20).prefill(PROMPT).features, expected.new_session(20).prefill(PROMPT).features
    )
    with pytest.raises(UserError, match=r"feature layers \[9\] do not exist"):
        target.read_features((1, 9))
    assert target.feature_layers == (1, 2)


@pytest.mark.parametrize("wrong", [-1, LAYERS])
def test_a_feature_layer_that_does_not_exist_is_refused(wrong: int) -> None:
    with pytest.raises(UserError, match=rf"feature layers \[{wrong}\] do not exist; the target has {LAYERS} layers"):
        tiny_target(feature_layers=(0, wrong))


def test_a_window_that_never_slides_is_none() -> None:
    assert tiny_target("mixtral", sliding_window=8).windowed
    assert not tiny_target("mixtral", sliding_window=CONTEXT).windowed
    assert not tiny_target("qwen3_moe", sliding_window=8, use_sliding_window=False).windowed


def test_half_precision_logits_come_back_in_float32() -> None:
    target = Target(tiny_model().to(torch.bfloat16), feature_layers=(1,))
    result = target.new_session(20).prefill(PROMPT)
    assert result.logits.dtype == torch.float32
    assert result.features.dtype == torch.bfloat16
    assert target.geometry.expert_bytes == 3 * HIDDEN * 16 * 2


def test_positions_that_depend_on_the_longest_row_of_a_pass_are_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 24,
    }
    with pytest.raises(UserError, match="longrope positions, whose scale depends on the longest row of a pass"):
        tiny_target(rope_parameters=rope)
