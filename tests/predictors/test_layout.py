"""Weights stored for products with a few rows: the same values, another order in memory."""

from __future__ import annotations

import torch
from torch import nn

from ecospec.predictors.layout import lay_out_linears, stored_by_input


class Tied(nn.Module):
    """An embedding whose weight is the head's too, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight


def test_a_matrix_keeps_its_values_and_lies_by_input() -> None:
    for shape in ((4, 6), (3, 4, 6)):
        weight = torch.randn(shape)
        stored = stored_by_input(weight)
        assert torch.equal(stored, weight)
        assert stored.transpose(-1, -2).is_contiguous()
        assert not stored.is_contiguous()


def test_linear_layers_compute_the_same_and_a_shared_weight_stays() -> None:
    module = Tied()
    states = torch.randn(3, 6)
    before = module.inner(states), module.head(states), module.embedding.weight
    lay_out_linears(module)
    assert module.inner.weight.t().is_contiguous()
    torch.testing.assert_close(module.inner(states), before[0])
    assert torch.equal(module.head(states), before[1])
    assert module.head.weight is module.embedding.weight is before[2]


def test_other_types_are_left_as_they_are() -> None:
    module = Tied().to(torch.bfloat16)
    weight = module.inner.weight
    lay_out_linears(module)
    assert module.inner.weight is weight
