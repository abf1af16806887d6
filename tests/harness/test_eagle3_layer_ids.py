"""Which layers of the target a head reads, in every convention of the published heads."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_checkpoints import (
    facts,
    load,
    published,
    refusal,
    write,
)
from tiny_models import (
    head_facts,
    run_speculative,
    tiny_target,
)

from ecospec.harness.decoding import Speculation
from ecospec.harness.eagle3_loading import output_layers
from ecospec.harness.preparing import load_head
from ecospec.policies import Confidence

CLOCK = 32


def clock_target(layers: int) -> Any:
    """A target whose next token is t + L, and whose layer j says t + j + 1 of token t: each layer adds one.

    The embedding is the identity; attention adds nothing, and every expert adds the token behind the one that it
    finds, ten times larger than all before.
    """
    target = tiny_target(vocab_size=CLOCK, num_hidden_layers=layers, moe_intermediate_size=CLOCK, hidden_size=CLOCK)
    model, following = target.model, torch.eye(CLOCK).roll(1, dims=0)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(CLOCK))
        model.lm_head.weight.copy_(torch.eye(CLOCK))
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.gate_up_proj.copy_(torch.cat((torch.eye(CLOCK), torch.eye(CLOCK))))
            layer.mlp.experts.down_proj.copy_(following * 10.0**index)
    return target


def clock_head(folder: Path, ids: Sequence[int], slot: int, layer: int, layers: int) -> Path:
    """A head that copies one of its three states, and is right where that is layer ``layer``'s output."""
    tensors = published(draft_vocab=CLOCK)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    tensors["fc.weight"] = torch.zeros(CLOCK, 3 * CLOCK)
    tensors["fc.weight"][:, slot * CLOCK : (slot + 1) * CLOCK] = torch.eye(CLOCK)
    tensors["norm.weight"] = torch.ones(CLOCK)
    # The state of token t stands for t + layer + 1; the token to guess is the one behind the next, t + 2·L.
    tensors["lm_head.weight"] = torch.eye(CLOCK).roll(2 * layers - layer - 1, dims=0)
    raw = head_facts(CLOCK, eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)})
    return write(folder, raw, tensors)


def clock_acceptance(folder: Path, layers: int) -> float:
    """Tokens a step of a chain of one draft token, over 20 emitted tokens."""
    target = clock_target(layers)
    head = load_head(folder, target).eval().requires_grad_(False)
    method = Speculation(Confidence(), head, budget=2, draft_steps=1, draft_topk=1)
    done = run_speculative(target, method, [5, 9, 2], n=21)
    assert done.tokens == [(2 + layers * (i + 1)) % CLOCK for i in range(21)]  # lossless whatever the head guesses
    return sum(step.emitted for step in done.steps) / len(done.steps)


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize(
    ("ids", "outputs"),
    [((0, 2, 5), (0, 2, 5)), ((2, 4, 6), (1, 3, 5)), ((1, 3, 4), (1, 3, 4))],
    ids=["outputs", "boundaries", "outputs below the last"],
)
def test_a_copying_head_is_right_only_at_the_layer_that_it_copies(
    tmp_path: Path, ids: tuple[int, ...], outputs: tuple[int, ...], slot: int
) -> None:
    right = clock_acceptance(clock_head(tmp_path / "right", ids, slot, outputs[slot], 6), 6)
    assert right == 2.0
    for name, off in (("before", -1), ("behind", 1)):
        wrong = clock_acceptance(clock_head(tmp_path / name, ids, slot, outputs[slot] + off, 6), 6)
        assert wrong == 1.0


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_without_ids_a_copying_head_is_right_at_the_default_layers(tmp_path: Path, slot: int) -> None:
    layer = (1, 3, 4)[slot]  # outputs 1, L/2 - 1, L - 4 of 8: the inputs of layers 2, L/2, L - 3
    folder = clock_head(tmp_path / "head", (), slot, layer, 8)
    raw = json.loads((folder / "config.json").read_text())
    del raw["eagle_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert clock_acceptance(folder, 8) == 2.0


def test_published_ids_are_read_as_their_heads_mean_them() -> None:
    assert output_layers((1, 17, 33), 36) == (1, 17, 33)
    assert output_layers((1, 46, 90), 94) == (1, 46, 90)
    assert output_layers((24, 30, 36), 36) == (23, 29, 35)


def test_ids_at_the_top_level_count_too(tmp_path: Path) -> None:
    raw = facts(eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    del raw["eagle_config"]
    assert load(write(tmp_path / "head", raw, published())).config.feature_layers == (2, 3, 5)


@pytest.mark.parametrize("ids", [[1, 3, 9], [-1, 3, 5], [0, 4, 8]])
def test_layers_that_do_not_exist_are_refused(tmp_path: Path, ids: list[int]) -> None:
    raw = facts(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert refusal(write(tmp_path / "head", raw, published())) == (
        f"its eagle_aux_hidden_state_layer_ids are {ids}; expected outputs of layers 0 to 7, or boundaries 1 to 8, "
        "as the target has 8 layers"
    )


def test_ids_that_are_the_usual_inputs_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = facts(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    with caplog.at_level(logging.WARNING, "ecospec"):
        assert load(write(tmp_path / "head", raw, published())).config.feature_layers == (2, 4, 5)
    (record,) = caplog.records
    assert "[2, 4, 5] are read as outputs of these layers" in record.getMessage()
