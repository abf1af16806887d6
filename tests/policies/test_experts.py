"""Expert sets against plain Python sets of (layer, expert) pairs."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec.policies import DraftTree, ExpertSets, count_pairs

Pairs = set[tuple[int, int]]


def random_topk(seed: int, layers: int, nodes: int, experts: int, k: int) -> np.ndarray:
    """int64[layers, nodes, k], k different experts for each node in each layer."""
    scores = np.random.default_rng(seed).random((layers, nodes, experts))
    return np.argsort(scores, axis=-1)[..., :k]


def as_pairs(indices: np.ndarray) -> list[Pairs]:
    """The twin of `from_topk`."""
    layers, nodes, _ = indices.shape
    return [
        {(layer, int(expert)) for layer in range(layers) for expert in indices[layer, node]} for node in range(nodes)
    ]


def unpack(sets: ExpertSets) -> list[Pairs]:
    return [{(int(layer), int(expert)) for layer, expert in np.argwhere(mask)} for mask in sets.to_mask()]


def pairs_of(words: np.ndarray, like: ExpertSets) -> Pairs:
    return unpack(ExpertSets(words[None], like.num_layers, like.num_experts))[0]


# A row that ends inside a word, exactly at its end, in the first word, and the paper's largest model.
SIZES = [(3, 40, 4), (4, 16, 2), (1, 3, 1), (94, 128, 8)]


@pytest.mark.parametrize(("layers", "experts", "k"), SIZES)
def test_packing_keeps_exactly_the_routed_pairs(layers: int, experts: int, k: int) -> None:
    indices = random_topk(0, layers, nodes=11, experts=experts, k=k)
    sets = ExpertSets.from_topk(indices, experts)
    assert unpack(sets) == as_pairs(indices)
    assert sets.size == 11
    assert sets.counts().tolist() == [layers * k] * 11
    assert sets.words == -(-layers * experts // 64)


def test_pair_p_is_bit_p_mod_64_of_word_p_div_64() -> None:
    sets = ExpertSets.from_topk(np.array([[[5]], [[30]]]), num_experts=40)  # pairs 5 and 40 + 30 = 70
    assert sets.bits.tolist() == [[1 << 5, 1 << 6]]


@pytest.mark.parametrize("kind", ["u1", "i1", "<i2", ">i2", ">u4", "<i4", ">i8"])
def test_indices_of_any_integer_kind_are_the_same_sets(kind: str) -> None:
    indices = random_topk(1, layers=94, nodes=5, experts=128, k=8)
    assert unpack(ExpertSets.from_topk(indices.astype(kind), 128)) == as_pairs(indices)
    with pytest.raises(ValueError, match="names experts 0 to 127, expected values from 0 to 126"):
        ExpertSets.from_topk(indices.astype(kind), 127)


def test_a_mask_survives_the_round_trip() -> None:
    mask = np.random.default_rng(2).random((6, 5, 13)) < 0.3
    assert (ExpertSets.from_mask(mask).to_mask() == mask).all()


@pytest.mark.parametrize(("layers", "experts", "k"), SIZES)
def test_set_arithmetic_equals_python_sets(layers: int, experts: int, k: int) -> None:
    indices = random_topk(3, layers, nodes=6, experts=experts, k=k)
    sets, twin = ExpertSets.from_topk(indices, experts), as_pairs(indices)
    assert pairs_of(sets.union(), sets) == set().union(*twin)
    assert pairs_of(sets.union([1, 4]), sets) == twin[1] | twin[4]
    assert pairs_of(sets.bits[2] & ~sets.bits[3], sets) == twin[2] - twin[3]
    assert count_pairs(sets.bits & ~sets.bits[0]).tolist() == [len(pairs - twin[0]) for pairs in twin]
    for words in (sets.union([]), sets.empty_buffer()):
        assert words.dtype == np.uint64
        assert pairs_of(words, sets) == set()


def test_active_experts_are_counted_per_layer() -> None:
    indices = np.array([[[0, 1], [1, 2]], [[3, 4], [3, 4]]])  # layer 0 uses {0, 1, 2}, layer 1 {3, 4}
    sets = ExpertSets.from_topk(indices, num_experts=40)
    assert sets.active_experts_per_layer(sets.union()).tolist() == [3, 2]


def test_a_path_footprint_is_the_union_from_the_root() -> None:
    tree = DraftTree(np.arange(5), np.array([-1, 0, 0, 1, 3]), np.ones(5))
    indices = random_topk(4, layers=3, nodes=5, experts=40, k=2)
    own = as_pairs(indices)
    footprints = unpack(ExpertSets.from_topk(indices, 40).path_footprints(tree))
    assert footprints == [
        own[0],
        own[0] | own[1],
        own[0] | own[2],
        own[0] | own[1] | own[3],
        own[0] | own[1] | own[3] | own[4],
    ]


def test_footprints_need_a_set_per_node() -> None:
    sets = ExpertSets.from_topk(random_topk(5, 2, nodes=3, experts=8, k=2), 8)
    with pytest.raises(ValueError, match="expert sets for 3 nodes, but the tree has 2"):
        sets.path_footprints(DraftTree.chain([1, 2], [1.0, 0.5]))


def test_rows_are_read_only_and_independent_of_the_callers() -> None:
    bits = np.zeros((2, 1), dtype=np.uint64)
    sets = ExpertSets(bits, num_layers=2, num_experts=8)
    bits[0] = 1
    assert sets.counts().tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        sets.bits[0] = 1


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.zeros((2, 3, 1)), r"expected integers \[layers, nodes, K\], got float64"),
        (np.zeros((2, 3), dtype=int), r"of shape \(2, 3\)"),
        (np.full((2, 3, 1), 8), "names experts 8 to 8, expected values from 0 to 7"),
        (np.full((2, 3, 1), -1), "names experts -1 to -1"),
        (np.array([[[3]], [[-128]]], dtype=np.int8), "names experts -128 to 3"),
        (np.zeros((0, 3, 1), dtype=int), "at least 1 layer"),
    ],
)
def test_impossible_routing_is_refused(indices: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertSets.from_topk(indices, num_experts=8)


def test_rows_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(ValueError, match="bits has 2 words a row, expected 1 for 2 layers x 8 experts"):
        ExpertSets(np.zeros((1, 2), dtype=np.uint64), 2, 8)
    with pytest.raises(ValueError, match="bits has dtype int64, expected uint64"):
        ExpertSets(np.zeros((1, 1), dtype=np.int64), 2, 8)
    with pytest.raises(ValueError, match="pairs beyond the last one"):
        ExpertSets(np.array([[1 << 16]], dtype=np.uint64), 2, 8)
    with pytest.raises(ValueError, match=r"expected bool\[N, L, E\]"):
        ExpertSets.from_mask(np.zeros((2, 2, 2)))  # type: ignore[arg-type]
