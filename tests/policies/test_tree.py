"""The draft tree: its derived fields against naive recursion, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec.policies import DraftTree, SelectionRequest

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
TREE = DraftTree(
    tokens=np.array([10, 11, 12, 13, 14, 15]),
    parents=np.array([-1, 0, 0, 1, 1, 2]),
    probs=np.array([1.0, 0.5, 0.25, 0.5, 0.5, 0.5]),
)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    parent = int(tree.parents[node])
    return [node] if parent < 0 else [*path_to(tree, parent), node]


def test_a_small_tree_by_hand() -> None:
    assert TREE.size == 6
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert TREE.path_probs.tolist() == [1.0, 0.5, 0.25, 0.25, 0.25, 0.125]
    assert TREE.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert np.flatnonzero(TREE.ancestors[4]).tolist() == [0, 1, 4]


def test_derived_fields_equal_naive_recursion(requests: list[SelectionRequest]) -> None:
    for tree in (request.tree for request in requests[:300]):
        for node in range(tree.size):
            path = path_to(tree, node)
            product = 1.0
            for step in path:
                product *= float(tree.probs[step])
            assert tree.depths[node] == len(path) - 1
            assert tree.path_probs[node] == product
            assert np.flatnonzero(tree.ancestors[node]).tolist() == path
            assert tree.children[node] == tuple(np.flatnonzero(tree.parents == node).tolist())


def test_path_probability_never_rises_along_a_path_in_floating_point(
    requests: list[SelectionRequest],
) -> None:
    for tree in (request.tree for request in requests):
        assert (tree.path_probs[1:] <= tree.path_probs[tree.parents[1:]]).all()


def test_a_chain_is_the_single_path() -> None:
    chain = DraftTree.chain([7, 8, 9], [1.0, 0.5, 0.5])
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.path_probs.tolist() == [1.0, 0.5, 0.25]


def test_arrays_are_read_only_and_independent_of_the_callers() -> None:
    tokens = np.array([1, 2])
    tree = DraftTree(tokens, np.array([-1, 0]), np.array([1.0, 0.5]))
    tokens[0] = 99
    assert tree.tokens.tolist() == [1, 2]
    for array in (tree.tokens, tree.parents, tree.probs, tree.depths, tree.path_probs, tree.ancestors):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("tokens", "parents", "probs", "message"),
    [
        ([], [], [], "has dtype float64|at least its root"),
        ([1, 2], [-1], [1.0, 0.5], "one entry per node, got 2, 1 and 2"),
        ([1, 2], [0, 0], [1.0, 0.5], "its parent must be -1, got 0"),
        ([1, 2], [-1, -1], [1.0, 0.5], "node 1 has parent -1"),
        ([1, 2, 3], [-1, 2, 0], [1.0, 0.5, 0.5], "node 1 has parent 2, expected 0 to 0"),
        ([1, 2], [-1, 1], [1.0, 0.5], "node 1 has parent 1"),
        ([1, 2], [-1, 0], [0.5, 0.5], "the root is certain"),
        ([1, 2], [-1, 0], [1.0, 1.5], "node 1 has probability 1.5"),
        ([1, 2], [-1, 0], [1.0, -0.1], "node 1 has probability -0.1"),
        ([1, 2], [-1, 0], [1.0, float("nan")], "node 1 has probability nan"),
        ([1.5, 2.0], [-1, 0], [1.0, 0.5], "tokens has dtype float64, expected int64"),
        ([[1, 2]], [-1, 0], [1.0, 0.5], r"tokens has shape \(1, 2\)"),
    ],
)
def test_what_is_not_a_tree_is_refused(tokens: list[int], parents: list[int], probs: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(tokens, parents, probs)  # type: ignore[arg-type]
