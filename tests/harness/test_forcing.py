"""Forced routing: exactly the wanted experts, whatever way a family's experts run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_experts import with_fp8_experts, with_mxfp4_experts
from tiny_families import VOCAB, WORKING, add_tokenizer, write_family
from tiny_models import random_tokens, random_tree, tiny_target
from tiny_quantized import write_fp8, write_mxfp4

from ecospec.errors import UserError
from ecospec.harness.costs.forcing import Cell, forced_routing, sweep_cells, token_counts
from ecospec.harness.loading import load_target
from ecospec.harness.target import Target

PROMPT = random_tokens(np.random.default_rng(0), 9, VOCAB)
TOKENS = (1, 2, 3, 5, 9)
MOE = [family for family in WORKING if family != "llama"]


def loaded(folder: Path) -> Any:
    return load_target(str(add_tokenizer(folder)), dtype=torch.float32, device="cpu").target


@pytest.fixture
def target_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Target]:
    def make(kind: str) -> Target:
        if kind == "fp8 unpacked":
            write_fp8(tmp_path, "qwen3_moe")
            return loaded(tmp_path)
        if kind == "fp8":
            write_fp8(tmp_path, "qwen3_moe")
            return Target(with_fp8_experts(loaded(tmp_path).model, monkeypatch))
        if kind.startswith("mxfp4"):
            write_mxfp4(tmp_path)
            plain = loaded(tmp_path)
            return plain if kind == "mxfp4 unpacked" else Target(with_mxfp4_experts(plain.model, old="old" in kind))
        return loaded(write_family(tmp_path, kind))

    return make


@pytest.mark.parametrize("kind", [*MOE, "fp8", "fp8 unpacked", "mxfp4", "mxfp4 unpacked"])
def test_a_pass_goes_to_exactly_the_experts_it_is_forced_to(target_of: Callable[[str], Target], kind: str) -> None:
    target = target_of(kind)
    geometry, rng = target.geometry, np.random.default_rng(1)
    session = target.new_session(30)
    free = session.prefill(PROMPT).routing
    for cell in sweep_cells(TOKENS, geometry.experts, geometry.top_k):
        pattern = forced_routing(cell, geometry.moe_layers, geometry.experts, geometry.top_k, rng)
        tree = random_tree(rng, cell.tokens, VOCAB)
        with target.forcing(torch.from_numpy(pattern)):
            routing = session.verify(tree, np.arange(cell.tokens)).routing.numpy()
        assert np.array_equal(routing, pattern)
        assert [len(np.unique(layer)) for layer in routing] == [cell.active_experts] * geometry.moe_layers
    assert torch.equal(target.new_session(30).prefill(PROMPT).routing, free)  # the router's again


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text", "fp8", "mxfp4"])
def test_no_other_expert_is_touched(target_of: Callable[[str], Target], kind: str) -> None:
    """Experts that are spoilt spoil a pass if and only if it is forced to one of them."""
    target = target_of(kind)
    geometry, rng = target.geometry, np.random.default_rng(2)
    cell = Cell(3, min(geometry.top_k + 1, geometry.experts - 1))
    pattern = forced_routing(cell, geometry.moe_layers, geometry.experts, geometry.top_k, rng)
    session = target.new_session(30)
    session.prefill(PROMPT)
    tree = random_tree(rng, 3, VOCAB)

    def logits() -> torch.Tensor:
        with target.forcing(torch.from_numpy(pattern)):
            return session.verify(tree, np.arange(3)).logits

    before = logits()
    assert bool(before.isfinite().all())
    used = set(pattern[0].reshape(-1).tolist())
    spoil(target, sorted(set(range(geometry.experts)) - used))
    assert torch.equal(logits(), before)
    spoil(target, [min(used)])
    assert bool(logits().isnan().any())


def spoil(target: Target, experts: list[int]) -> None:
    """Make the first MoE layer's weights of these experts no numbers."""
    module: Any = target._tap.modules[0]
    weights = getattr(module, "numbers", None) or {"gate_up_proj": module.gate_up_proj}
    for weight in weights.values():
        weight.data[experts] = float("nan")


def test_experts_that_are_told_no_indices_are_refused_by_name(target_of: Callable[[str], Target]) -> None:
    target = target_of("mxfp4 old")
    session = target.new_session(30)
    session.prefill(PROMPT)
    cell, geometry = Cell(1, target.geometry.top_k), target.geometry
    pattern = forced_routing(cell, geometry.moe_layers, geometry.experts, geometry.top_k, np.random.default_rng(0))
    with target.forcing(torch.from_numpy(pattern)), pytest.raises(UserError, match="Packed: this version of transf"):
        session.decode(3)


def test_forcing_ends_with_an_error_and_wants_the_right_shape() -> None:
    target = tiny_target()
    session = target.new_session(20)
    forced = torch.tensor([[[0, 1], [2, 3]]] * 3)
    with (
        target.forcing(forced),
        pytest.raises(ValueError, match=r"forced experts of shape \(2, 2\), expected \(3, 2\)"),
    ):
        session.prefill([1, 2, 3])
    session.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="experts for 2 MoE layers, and there are 3"), target.forcing(forced[:2]):
        pass


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (5, 4), (7, 1)])
def test_patterns_have_exactly_the_wanted_union_in_every_layer(experts: int, top_k: int) -> None:
    rng = np.random.default_rng(3)
    for n in range(1, 12):
        for union in range(top_k, min(experts, n * top_k) + 1):
            pattern = forced_routing(Cell(n, union), 4, experts, top_k, rng)
            assert pattern.shape == (4, n, top_k)
            assert pattern.min() >= 0
            assert pattern.max() < experts
            for layer in pattern:
                counts = np.bincount(layer.reshape(-1), minlength=experts)
                assert (counts > 0).sum() == union
                assert counts.max() - counts[counts > 0].min() <= 1  # spread evenly
                assert all(len(set(row)) == top_k for row in layer.tolist())


def test_other_experts_from_layer_to_layer_and_from_pass_to_pass() -> None:
    rng = np.random.default_rng(4)
    patterns = [forced_routing(Cell(2, 12), 3, 64, 8, rng) for _ in range(3)]
    sets = {frozenset(layer.reshape(-1).tolist()) for pattern in patterns for layer in pattern}
    assert len(sets) == 9


@pytest.mark.parametrize(("n", "union"), [(1, 3), (3, 1), (5, 9)])
def test_unions_that_cannot_be_are_refused(n: int, union: int) -> None:
    with pytest.raises(ValueError, match=rf"{union} experts for {n} tokens"):
        forced_routing(Cell(n, union), 1, 8, 2, np.random.default_rng(0))


def test_a_sweep_goes_from_k_to_its_maximum_at_every_n() -> None:
    cells = sweep_cells((1, 2, 4, 16), 64, 8)
    by_tokens = {n: [cell.active_experts for cell in cells if cell.tokens == n] for n in (1, 2, 4, 16)}
    assert by_tokens == {
        1: [8],
        2: [8, 10, 11, 13, 14, 16],
        4: [8, 13, 18, 22, 27, 32],
        16: [8, 19, 30, 42, 53, 64],
    }
    held = [(cell.tokens, cell.active_experts) for cell in cells if cell.held_out]
    assert held == [(2, 10), (4, 18), (16, 42)]  # neither first nor last, another place from n to n


def test_sweeps_that_tell_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="every token uses all 4 experts"):
        sweep_cells((1, 2), 4, 4)
    with pytest.raises(UserError, match="passes over one token"):
        sweep_cells((1,), 8, 2)


def test_token_counts_end_with_what_was_asked_for() -> None:
    assert token_counts(4) == (1, 2, 3, 4)
    assert token_counts(16) == (1, 2, 3, 4, 5, 6, 8, 11, 16)
    assert token_counts(40) == (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 36, 40)
