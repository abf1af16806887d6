"""A small model in bfloat16 keeps its rotary frequencies."""

from __future__ import annotations

import torch
from tiny_models import tiny_head, tiny_predictor, tiny_target

from ecospec.predictors.placing import place


def test_weights_change_dtype_and_rotary_frequencies_do_not() -> None:
    for module in (tiny_head(), tiny_predictor(tiny_target()).model):
        before = {n: b.clone() for n, b in module.named_buffers() if n.endswith("inv_freq")}
        assert before
        placed = place(module, "cpu", torch.bfloat16)
        after = dict(placed.named_buffers())
        assert all(p.dtype == torch.bfloat16 for p in placed.parameters())
        for name, frequencies in before.items():
            assert after[name].dtype == torch.float32
            assert torch.equal(after[name], frequencies)
            assert not torch.equal(frequencies.bfloat16().float(), frequencies)  # the test can fail
