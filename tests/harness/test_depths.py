"""Acceptance by depth, against a walk along the target's choices that knows nothing of the code."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.outcomes import by_depth
from ecospec.harness.steps import accept, depths_of
from ecospec.policies import DraftTree

VOCAB = 5


class Choices:
    """Row i of the logits is one-hot at a token: the target's choice there."""

    def __init__(self, tokens: list[int]) -> None:
        import torch

        self.logits = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def random_case(seed: int) -> tuple[DraftTree, np.ndarray, list[int]]:
    """A tree with different tokens under each node, a prefix-closed selection, and a choice for each selected node."""
    rng = np.random.default_rng(seed)
    parents, tokens = [-1], [0]
    for _ in range(int(rng.integers(1, 12))):
        parent = int(rng.integers(0, len(parents)))
        used = [tokens[i] for i, each in enumerate(parents) if each == parent]
        free = [token for token in range(VOCAB) if token not in used]
        if free:
            parents.append(parent)
            tokens.append(int(rng.choice(free)))
    tree = DraftTree(tokens, parents, [1.0] + [0.5] * (len(parents) - 1))
    chosen = {0}
    for node in range(1, tree.size):
        if parents[node] in chosen and rng.random() < 0.7:
            chosen.add(node)
    nodes = np.array(sorted(chosen), dtype=np.int64)
    return tree, nodes, [int(token) for token in rng.integers(0, VOCAB, len(nodes))]


def walked(tree: DraftTree, nodes: list[int], choices: list[int], taken: int) -> tuple[int, int]:
    """Token by token: where the last emitted token was a draft token, look whether anything was behind it."""
    node, reached, accepted = 0, 0, 0
    for emitted in range(taken):
        children = [n for n in nodes if n != 0 and int(tree.parents[n]) == node]
        if children:
            reached = emitted + 1
        right = [n for n in children if int(tree.tokens[n]) == choices[nodes.index(node)]]
        if not right:
            return reached, accepted  # this token was the bonus token
        node, accepted = right[0], emitted + 1
    return reached, accepted


@pytest.mark.parametrize("seed", range(60))
def test_depths_equal_a_walk_token_by_token(seed: int) -> None:
    tree, nodes, choices = random_case(seed)
    chooser = TokenChooser(Sampling(), "r")
    rows, _ = accept(tree, nodes, Choices(choices).logits, chooser, 0)
    for taken in range(1, len(rows) + 1):  # wherever a stop cuts
        assert depths_of(tree, nodes, rows, taken) == walked(tree, nodes.tolist(), choices, taken), (taken, rows)


def test_a_chain_by_hand() -> None:
    chain = DraftTree([0, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.9, 0.8, 0.7])
    everything, two = np.arange(4), np.arange(2)
    assert depths_of(chain, everything, [0], 1) == (1, 0)  # refused at once
    assert depths_of(chain, everything, [0, 1], 2) == (2, 1)  # one accepted, the next refused
    assert depths_of(chain, everything, [0, 1, 2, 3], 4) == (3, 3)  # nothing was left to verify
    assert depths_of(chain, two, [0, 1], 2) == (1, 1)  # depth 2 was not selected
    assert depths_of(chain, everything, [0, 1, 2, 3], 2) == (2, 2)  # a stop after the second
    assert depths_of(chain, np.arange(1), [0], 1) == (0, 0)  # the root alone


def test_counts_by_depth_by_hand() -> None:
    assert by_depth([3, 1, 0, 2, 1]) == [4, 2, 1]
    assert by_depth([0, 0]) == []
    assert by_depth([]) == []
