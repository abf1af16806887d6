"""The experts forward against the library's eager one, and what it reports of the routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, FAMILIES, HIDDEN, LAYERS, TOP_K, plain_forward, tiny_model, tiny_target
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.experts import expert_bytes, find_experts, install, union_experts_forward, widen_experts
from ecospec.harness.training.experts import training_experts_forward

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def experts_of(family: str) -> Any:
    """One experts module of the library, on its eager implementation."""
    return find_experts(tiny_model(family))[1]


def routed(tokens: int, seed: int, top_k: int = TOP_K) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, distinct experts a token, and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return states, index, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", range(1, 10))
def test_reading_each_expert_once_equals_the_eager_loop(family: str, tokens: int) -> None:
    experts = experts_of(family)
    for top_k in (1, 2, EXPERTS):
        states, index, weights = routed(tokens, seed=tokens, top_k=top_k)
        expected = experts(states, index, weights)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(
            union_experts_forward(experts, states, index, weights), expected, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 64])
def test_any_number_of_blocks_equals_the_eager_loop(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is one block a thread, of as many as divide the inner size and as there are cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    experts = experts_of("qwen3_moe")
    states, index, weights = routed(5, seed=threads)
    expected = experts(states, index, weights)
    torch.testing.assert_close(union_experts_forward(experts, states, index, weights), expected, atol=1e-5, rtol=1e-4)
    inner = experts.down_proj.shape[2]
    assert experts._ecospec_blocks.count == max(p for p in range(1, min(threads, 4) + 1) if inner % p == 0)


def test_weights_that_are_replaced_are_seen() -> None:
    experts = experts_of("qwen3_moe")
    states, index, weights = routed(3, seed=0)
    before = union_experts_forward(experts, states, index, weights)
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().clone() * 2)
    torch.testing.assert_close(union_experts_forward(experts, states, index, weights), before * 2)


def test_tokens_that_share_all_their_experts_equal_the_eager_loop() -> None:
    experts = experts_of("qwen3_moe")
    states, _, weights = routed(6, seed=0)
    index = torch.tensor([[5, 2]] * 6)
    torch.testing.assert_close(
        union_experts_forward(experts, states, index, weights),
        experts(states, index, weights),
        atol=1e-5,
        rtol=1e-4,
    )


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    experts = experts_of("qwen3_moe")
    states, index, weights = routed(5, seed=1)
    torch.testing.assert_close(
        union_experts_forward(experts, states, index, weights),
        union_experts_forward(experts, states, index.flip(-1), weights.flip(-1)),
        atol=1e-5,
        rtol=1e-4,
    )


def test_every_activated_expert_is_used_and_no_other() -> None:
    states, index, weights = routed(4, seed=2)
    experts = experts_of("qwen3_moe")
    before = union_experts_forward(experts, states, index, weights)
    for expert in range(EXPERTS):
        changed = experts_of("qwen3_moe")
        changed.down_proj[expert] *= 2
        after = union_experts_forward(changed, states, index, weights)
        touched = (before - after).abs().sum(-1) > 1e-6
        assert torch.equal(touched, (index == expert).any(-1))


def test_experts_are_found_in_layer_order() -> None:
    model = tiny_model("mixtral")
    assert find_experts(model) == [layer.mlp.experts for layer in model.get_decoder().layers]
    assert len(find_experts(model)) == LAYERS


def test_a_layer_that_did_not_report_is_an_error() -> None:
    tap = install(tiny_model())
    with pytest.raises(UserError, match=r"MoE layer model\.layers\.0\.mlp\.experts and 2 more of 3"):
        tap.read()
    tap.indices[0] = tap.indices[2] = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UserError, match=r"MoE layer model\.layers\.1\.mlp\.experts of 3"):
        tap.read()


def test_each_model_keeps_its_own_routing() -> None:
    first, second = tiny_target(seed=0), tiny_target(seed=7)
    alone = first.new_session(9).prefill(PROMPT).routing
    session = first.new_session(9)
    session.prefill(PROMPT[:4])
    second.new_session(9).prefill(PROMPT)
    assert torch.equal(session.prefill(PROMPT[4:]).routing.sort(-1).values, alone[:, 4:].sort(-1).values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("factor", [2, 3])
def test_widened_experts_cost_more_and_say_the_same(family: str, factor: int) -> None:
    narrow, wide = tiny_target(family), tiny_model(family)
    before = expert_bytes(find_experts(wide)[0])
    widen_experts(wide, factor)
    assert expert_bytes(find_experts(wide)[0]) == factor * before
    torch.testing.assert_close(  # the library's own loop runs the wide model too
        plain_forward(wide, PROMPT).logits,
        plain_forward(tiny_model(family), PROMPT).logits,
        atol=1e-4,
        rtol=0,
    )
    wide_target = type(narrow)(wide)
    ours, theirs = wide_target.new_session(9).prefill(PROMPT), narrow.new_session(9).prefill(PROMPT)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=0)
    assert torch.equal(ours.routing, theirs.routing)
    assert wide_target.geometry.always_read_bytes == narrow.geometry.always_read_bytes


def test_widening_by_one_changes_nothing_and_by_less_is_refused() -> None:
    model = tiny_model()
    weight = find_experts(model)[0].down_proj
    widen_experts(model, 1)
    assert find_experts(model)[0].down_proj is weight
    with pytest.raises(UserError, match="widening factor 0: expected an integer of at least 1"):
        widen_experts(model, 0)


def test_widening_beyond_the_memory_is_refused_before_it_is_tried() -> None:
    with pytest.raises(UserError, match=r"widening factor 1000000000: the experts would take [\d,]+ GB"):
        widen_experts(tiny_model(), 1_000_000_000)


def test_experts_of_another_make_are_not_widened() -> None:
    model = tiny_model()
    find_experts(model)[0].has_bias = True  # type: ignore[assignment]
    with pytest.raises(UserError, match="Qwen3MoeExperts cannot be widened: expected plain gated experts"):
        widen_experts(model, 2)


@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_the_training_kernel_gives_eagers_result_and_every_gradient(tokens: int) -> None:
    experts = experts_of("qwen3_moe").requires_grad_(True)
    states, index, weights = routed(tokens, seed=3)
    states, weights = states.requires_grad_(), weights.requires_grad_()
    probe = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(4))
    leaves = (states, weights, experts.gate_up_proj, experts.down_proj)
    results = []
    for forward in (training_experts_forward, lambda module, *args: module(*args)):
        out = forward(experts, states, index, weights)
        results.append((out, *torch.autograd.grad((out * probe).sum(), leaves)))
    names = ("output", "hidden states", "routing weights", "gate_up_proj", "down_proj")
    for name, ours, eager in zip(names, *results, strict=True):
        assert eager.abs().max() > 1e-3, name
        torch.testing.assert_close(ours, eager, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_a_gradient_flows_through_the_adapter_when_asked() -> None:
    """With gradients on, the experts forward is the library's differentiable one, not the in-place loop."""
    target = tiny_target()
    experts: Any = find_experts(target.model)[0]
    experts.down_proj.requires_grad_(True)
    target.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits.sum().backward()
    assert experts.down_proj.grad.abs().sum() > 0
