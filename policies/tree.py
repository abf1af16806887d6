"""The draft tree: candidate continuations, of which a policy picks the ones to verify."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from ecospec.policies.arrays import BoolArray, FloatArray, IntArray, frozen


@dataclass(frozen=True, eq=False)
class DraftTree:
    """N candidate tokens; node 0 is the bonus token (the root), which is already certain.

    Attributes:
        tokens: int64[N], the token id of each node.
        parents: int64[N], the parent's index; -1 for the root. A parent precedes its children.
        probs: float64[N], the draft probability of each node given its parent; the root's is 1.0.

    The three arrays are copied and read-only; derived fields are computed on first use and kept.

    Raises:
        ValueError: the arrays do not describe such a tree; the text names the first wrong node.
    """

    tokens: IntArray
    parents: IntArray
    probs: FloatArray

    def __post_init__(self) -> None:
        tokens = frozen("tokens", self.tokens, np.int64, ndim=1)
        parents = frozen("parents", self.parents, np.int64, ndim=1)
        probs = frozen("probs", self.probs, np.float64, ndim=1)
        if not len(tokens) == len(parents) == len(probs):
            raise ValueError(
                "tokens, parents and probs must have one entry per node, "
                f"got {len(tokens)}, {len(parents)} and {len(probs)}"
            )
        if len(tokens) == 0:
            raise ValueError("a draft tree has at least its root, got 0 nodes")
        _check_parents(parents)
        _check_probs(probs)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "probs", probs)

    @classmethod
    def chain(cls, tokens: ArrayLike, probs: ArrayLike) -> DraftTree:
        """The tree with a single path: `tokens` and `probs`, both [N], root first."""
        return cls(np.asarray(tokens), np.arange(np.size(tokens)) - 1, np.asarray(probs))

    @property
    def size(self) -> int:
        """N, the number of nodes, root included."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> IntArray:
        """int64[N], edges between the root and each node; the root's is 0."""
        depths = [0]
        for parent in self.parents.tolist()[1:]:
            depths.append(depths[parent] + 1)
        return frozen("depths", depths, np.int64, ndim=1)

    @cached_property
    def path_probs(self) -> FloatArray:
        """float64[N], P(i): the product of `probs` from the root to each node.

        Multiplying by a probability never rounds upwards past the parent's value, so P never
        increases along a path, bit for bit, not only in exact arithmetic.
        """
        path_probs = [1.0]
        for parent, prob in zip(self.parents.tolist()[1:], self.probs.tolist()[1:], strict=True):
            path_probs.append(path_probs[parent] * prob)
        return frozen("path_probs", path_probs, np.float64, ndim=1)

    @cached_property
    def ancestors(self) -> BoolArray:
        """bool[N, N], `ancestors[i, j]`: j is i itself or an ancestor of i (the tree attention mask)."""
        ancestors = np.eye(self.size, dtype=bool)
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            ancestors[node] |= ancestors[parent]
        ancestors.flags.writeable = False
        return ancestors

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node its children, in ascending order; N tuples."""
        children: list[list[int]] = [[] for _ in range(self.size)]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))


def _check_parents(parents: IntArray) -> None:
    if parents[0] != -1:
        raise ValueError(f"node 0 is the root, so its parent must be -1, got {parents[0]}")
    nodes = np.arange(1, len(parents))
    misplaced = (parents[1:] < 0) | (parents[1:] >= nodes)
    if misplaced.any():
        node = int(nodes[misplaced][0])
        raise ValueError(
            f"node {node} has parent {parents[node]}, expected 0 to {node - 1}: "
            "a parent precedes its children, and only node 0 is a root"
        )


def _check_probs(probs: FloatArray) -> None:
    if probs[0] != 1.0:
        raise ValueError(f"the root is certain, so its probability must be 1.0, got {probs[0]}")
    possible = (probs >= 0.0) & (probs <= 1.0)  # also false for nan
    if not possible.all():
        node = int(np.flatnonzero(~possible)[0])
        raise ValueError(f"node {node} has probability {probs[node]}, expected a value from 0 to 1")
