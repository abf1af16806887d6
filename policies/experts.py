"""Expert sets: which (layer, expert) pairs each draft token routes to, as rows of bits.

Pair (layer, expert) has the index `layer * num_experts + expert`, and is bit `index % 64` of word
`index // 64`. Only routed experts are counted: shared experts are always on, so they cost the same
whatever is selected. Union, difference and size are then `|`, `& ~` and `count_pairs` on whole rows:
a footprint over 94 layers of 128 experts is 188 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ecospec.policies.arrays import BoolArray, IntArray, WordArray, frozen
from ecospec.policies.tree import DraftTree

WORD_BITS = 64


def words_for(num_layers: int, num_experts: int) -> int:
    """Words in one row: enough 64-bit words for num_layers * num_experts pairs."""
    return -(-num_layers * num_experts // WORD_BITS)


def count_pairs(words: WordArray) -> IntArray:
    """The number of pairs in each row: uint64[..., words] -> int64[...]."""
    counts: IntArray = np.add.reduce(np.bitwise_count(words), axis=-1, dtype=np.int64)
    return counts


@dataclass(frozen=True, eq=False)
class ExpertSets:
    """One set of (layer, expert) pairs per node of a draft tree.

    Attributes:
        bits: uint64[N, words], a row per node, copied and read-only.
        num_layers: L, the number of MoE layers.
        num_experts: E, the number of routed experts in each.

    Raises:
        ValueError: `bits` has another shape or dtype, or holds pairs beyond L * E.
    """

    bits: WordArray
    num_layers: int
    num_experts: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_experts < 1:
            raise ValueError(f"expected at least 1 layer and 1 expert, got {self._shape()}")
        bits = frozen("bits", self.bits, np.uint64, ndim=2)
        words = words_for(self.num_layers, self.num_experts)
        if bits.shape[1] != words:
            raise ValueError(f"bits has {bits.shape[1]} words a row, expected {words} for {self._shape()}")
        used = self.num_layers * self.num_experts % WORD_BITS
        if used and (bits[:, -1] >> np.uint64(used)).any():
            raise ValueError(f"bits holds pairs beyond the last one of {self._shape()}")
        object.__setattr__(self, "bits", bits)

    @classmethod
    def from_topk(cls, indices: NDArray[np.integer], num_experts: int) -> ExpertSets:
        """Pack routing decisions: integers [L, N, K], the K experts of each node in each layer.

        Raises:
            ValueError: `indices` is not an integer array of three dimensions, or names an expert
                outside 0 to num_experts - 1.
        """
        indices = np.asarray(indices)
        if indices.ndim != 3 or indices.dtype.kind not in "iu":
            raise ValueError(f"expected integers [layers, nodes, K], got {indices.dtype} of shape {indices.shape}")
        # Seen as unsigned, a negative number is a huge one: a single look at the largest finds both.
        if indices.size and indices.view(indices.dtype.str.replace("i", "u")).max() >= num_experts:
            raise ValueError(
                f"routing names experts {indices.min()} to {indices.max()}, expected values from 0 to {num_experts - 1}"
            )
        num_layers, nodes, _ = indices.shape
        row_bits = words_for(num_layers, num_experts) * WORD_BITS
        # One flat store into a padded mask: several times faster than indexing by (node, pair).
        padded = np.zeros(nodes * row_bits, dtype=bool)
        padded[indices + _starts(num_layers, nodes, num_experts)] = True
        return cls(_pack(padded.reshape(nodes, row_bits)), num_layers, num_experts)

    @classmethod
    def from_mask(cls, mask: BoolArray) -> ExpertSets:
        """Pack membership: bool[N, L, E], true where the node's set holds the pair."""
        mask = np.asarray(mask)
        if mask.ndim != 3 or mask.dtype != np.bool_:
            raise ValueError(f"expected bool[N, L, E], got {mask.dtype} of shape {mask.shape}")
        nodes, num_layers, num_experts = mask.shape
        padded = np.zeros((nodes, words_for(num_layers, num_experts) * WORD_BITS), dtype=bool)
        padded[:, : num_layers * num_experts] = mask.reshape(nodes, -1)
        return cls(_pack(padded), num_layers, num_experts)

    @property
    def size(self) -> int:
        """N, the number of sets."""
        return len(self.bits)

    @property
    def words(self) -> int:
        """The number of 64-bit words in one row, hence in a buffer."""
        return int(self.bits.shape[1])

    def counts(self) -> IntArray:
        """int64[N], the number of pairs in each set."""
        return count_pairs(self.bits)

    def union(self, rows: Sequence[int] | IntArray | None = None) -> WordArray:
        """uint64[words], the pairs that any of `rows` (default: all) holds; none for no rows."""
        bits = self.bits if rows is None else self.bits[np.asarray(rows, dtype=np.int64)]
        union: WordArray = np.bitwise_or.reduce(bits, axis=0)
        return union

    def empty_buffer(self) -> WordArray:
        """uint64[words], a buffer B that covers nothing yet."""
        return np.zeros(self.words, dtype=np.uint64)

    def path_footprints(self, tree: DraftTree) -> ExpertSets:
        """For each node the union of the sets from the root to it (its path footprint).

        A node can be verified only with its ancestors, so this is what selecting it makes the target
        read. A footprint contains that of every ancestor.

        Raises:
            ValueError: the tree has another number of nodes.
        """
        if tree.size != self.size:
            raise ValueError(f"expert sets for {self.size} nodes, but the tree has {tree.size}")
        bits = self.bits.copy()
        for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
            bits[node] |= bits[parent]
        return ExpertSets(bits, self.num_layers, self.num_experts)

    def to_mask(self) -> BoolArray:
        """bool[N, L, E], the inverse of `from_mask`."""
        return self._unpack(self.bits).reshape(self.size, self.num_layers, self.num_experts)

    def active_experts_per_layer(self, words: WordArray) -> IntArray:
        """int64[L], the experts of each layer in one row: uint64[words], such as `union()`.

        Its mean over layers and steps is E, the active experts of a verification step.
        """
        counts: IntArray = self._unpack(words).reshape(self.num_layers, self.num_experts).sum(axis=1)
        return counts

    def _unpack(self, words: WordArray) -> BoolArray:
        """bool[..., L * E] from uint64[..., words]."""
        octets = np.ascontiguousarray(words, dtype="<u8").view(np.uint8)
        members = np.unpackbits(octets, axis=-1, count=self.num_layers * self.num_experts, bitorder="little")
        return members.view(np.bool_)

    def _shape(self) -> str:
        return f"{self.num_layers} layers x {self.num_experts} experts"


@lru_cache(maxsize=64)
def _starts(num_layers: int, nodes: int, num_experts: int) -> IntArray:
    """int64[L, N, 1], where each node's pairs of each layer begin in the padded mask of all nodes."""
    rows = np.arange(nodes)[None, :, None] * words_for(num_layers, num_experts) * WORD_BITS
    return np.asarray(np.arange(num_layers)[:, None, None] * num_experts + rows, dtype=np.int64)


def _pack(padded: BoolArray) -> WordArray:
    """uint64[N, words] from bool[N, words * 64]."""
    octets = np.packbits(padded, axis=-1, bitorder="little")
    return octets.view("<u8").astype(np.uint64, copy=False)
