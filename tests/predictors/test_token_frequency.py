"""The token-frequency table, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import asked

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.builtin import TokenFrequency
from ecospec.predictors.checkpoint import save_predictor, target_geometry
from ecospec.predictors.contract import TargetView
from ecospec.predictors.token_frequency import KIND, build_table, load_table, save_table

TARGET = TargetView(moe_layers=2, experts=4, top_k=2, vocab_size=5, hidden_size=8, embedding=torch.zeros(5, 8))

# Token ids 0 to 4, one layer of four experts; over all tokens the experts are used 6, 10, 4 and 4 times.
COUNTS = np.array([[5, 9, 0, 1], [0, 0, 3, 0], [1, 1, 1, 3], [0, 0, 0, 0], [0, 0, 0, 0]])[:, None]


def table_of(counts: np.ndarray, top_k: int = 2) -> list[list[int]]:
    return build_table(counts, top_k)[:, 0].tolist()


def test_a_token_gets_the_experts_it_was_sent_to_most_often() -> None:
    assert COUNTS.sum(axis=0).tolist() == [[6, 10, 4, 4]]
    assert table_of(COUNTS)[0] == [1, 0]


def test_places_that_a_token_leaves_open_go_to_the_most_used_expert() -> None:
    assert table_of(COUNTS)[1] == [2, 1]  # seen with expert 2 alone
    assert table_of(COUNTS, top_k=4)[1] == [2, 1, 0, 3]


def test_ties_go_to_the_more_used_expert_then_to_the_lower_index() -> None:
    assert table_of(COUNTS)[2] == [3, 1]  # experts 0, 1 and 2 tie; 1 is used most over all
    assert table_of(COUNTS, top_k=4)[2] == [3, 1, 0, 2]
    even = np.array([[2, 2, 2, 2], [1, 1, 1, 1]])[:, None]
    assert table_of(even) == [[0, 1], [0, 1]]


def test_a_token_never_seen_gets_the_most_used_experts() -> None:
    assert table_of(COUNTS)[3] == table_of(COUNTS)[4] == [1, 0]


def test_without_any_count_the_lowest_experts_are_taken() -> None:
    assert table_of(np.zeros((2, 1, 4), dtype=np.int64)) == [[0, 1], [0, 1]]


def test_popularity_never_overturns_a_count() -> None:
    counts = np.array([[10**6, 0, 0], [0, 0, 1]])[:, None]
    assert table_of(counts, top_k=1)[1] == [2]


def test_layers_are_counted_apart() -> None:
    counts = np.array([[[3, 0, 0, 1], [0, 2, 5, 0]]])
    assert build_table(counts, 2).tolist() == [[[0, 3], [2, 1]]]


def test_a_table_gives_each_node_its_tokens_experts(tmp_path: Path) -> None:
    table = np.arange(20).reshape(5, 2, 2) % 4
    save_table(tmp_path, table, TARGET)
    bound = TokenFrequency(path=tmp_path).bind(TARGET)
    session = bound.start(asked([1, 2], 30))
    tree = DraftTree([3, 0, 3], [-1, 0, 1], [1.0, 0.5, 0.5])
    routing = session.predict(tree)
    assert routing.shape == (2, 3, 2)
    for layer in range(2):
        for node, token in enumerate((3, 0, 3)):
            assert routing[layer, node].tolist() == table[token, layer].tolist()
    session.commit([0, 1])
    assert np.array_equal(session.predict(tree), routing)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"other": torch.zeros(1)}, "nothing"),
        ({"top_experts": torch.zeros(5, 2, 3, dtype=torch.int16)}, "(5, 2, 3)"),
    ],
)
def test_a_table_of_another_shape_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], found: str) -> None:
    save_predictor(tmp_path, {"kind": KIND, "target": target_geometry(TARGET)}, tensors)
    with pytest.raises(UserError) as caught:
        load_table(tmp_path, TARGET)
    assert str(caught.value) == (f"predictor {tmp_path}: tensor top_experts has shape {found}, expected (5, 2, 2)")


@pytest.mark.parametrize("expert", [-1, 4])
def test_a_table_that_names_no_expert_of_the_target_is_refused(tmp_path: Path, expert: int) -> None:
    table = np.zeros((5, 2, 2), dtype=np.int64)
    table[3, 1, 0] = expert
    save_table(tmp_path, table, TARGET)
    with pytest.raises(UserError, match=f"top_experts names expert {expert}, expected 0 to 3"):
        load_table(tmp_path, TARGET)
