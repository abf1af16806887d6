"""What is recorded of one request: at every position of its output the draft tree, its routing, the target's choices.

At position p the first p + 1 tokens of the output are emitted, the last of them is the root of the tree. A speculative
run meets a subset of these positions, whichever its selections lead it to, so that one recording serves every policy.
All nodes of all trees stand one behind the other; the arrays are written as they are into one safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from ecospec.errors import UserError, one_line
from ecospec.policies import DraftTree, ExpertSets
from ecospec.policies.arrays import FloatArray

PREDICTED, ESTIMATED = "predicted/", "estimated/"
"""Prefixes of the arrays of a predictor and of an acceptance estimator; its label follows."""
Routing = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, eq=False)
class RecordedRequest:
    """One request, P positions and ΣN nodes in all.

    Attributes:
        tokens: int32 [P + 1], the output of plain decoding.
        sizes: int32 [P], nodes of each tree.
        node_tokens: int32 [ΣN]. parents: int32 [ΣN], within its tree, -1 for a root. probs: float64 [ΣN].
        choices: int32 [ΣN], the target's choice after each node, by the recorded sampling.
        routing: uint8 or uint16 [L, ΣN, K], the target's own.
        predicted: the same by predictor, by its label.
        estimated: float64 [ΣN], by acceptance estimator.
        entropies: float32 [ΣN], of the distribution that each node was drafted from, in nats; 0 for roots; None where
            the drafter keeps no distributions.
        states: float16 [M, H], the drafter's, or None where they were not asked for.
        state_rows: int32 [ΣN], which of them each node was drafted from, a root's own for a root.
    """

    tokens: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    node_tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    probs: FloatArray
    choices: npt.NDArray[np.int32]
    routing: Routing
    predicted: Mapping[str, Routing] = field(default_factory=dict)
    estimated: Mapping[str, FloatArray] = field(default_factory=dict)
    entropies: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float16] | None = None
    state_rows: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        dimensions = (self.tokens.ndim, self.sizes.ndim, self.routing.ndim)
        if dimensions != (1, 1, 3):
            raise ValueError(f"tokens, sizes and routing have {dimensions} dimensions, expected (1, 1, 3)")
        nodes = int(self.sizes.sum())
        if len(self.tokens) != len(self.sizes) + 1 or (self.sizes < 1).any():
            raise ValueError(
                f"{len(self.tokens)} tokens and {len(self.sizes)} trees; expected one tree fewer than tokens"
            )
        flat: list[tuple[str, Any]] = [
            *(("node_tokens", self.node_tokens), ("parents", self.parents), ("probs", self.probs)),
            *(("choices", self.choices), ("entropies", self.entropies), ("state_rows", self.state_rows)),
            *self.estimated.items(),
        ]
        for name, array in flat:
            if array is not None and array.shape != (nodes,):
                raise ValueError(f"{name} has shape {array.shape}, expected ({nodes},)")
        for name, array in (("routing", self.routing), *self.predicted.items()):
            if array.shape != (self.routing.shape[0], nodes, self.routing.shape[2]):
                raise ValueError(f"{name} has shape {array.shape}, expected [L, {nodes}, K]")

    @property
    def positions(self) -> int:
        """P, the positions at which a step can begin."""
        return len(self.sizes)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum(self.sizes).tolist()]

    def rows(self, position: int) -> slice:
        """Where the nodes of a position's tree stand."""
        return slice(self._starts[position], self._starts[position + 1])

    def tree(self, position: int) -> DraftTree:
        """The draft tree of a position."""
        rows = self.rows(position)
        return DraftTree(self.node_tokens[rows].astype(np.int64), self.parents[rows].astype(np.int64), self.probs[rows])

    def accepted(self, position: int, tree: DraftTree) -> FloatArray:
        """float64 [N], 1 for the nodes of a position's tree that the target accepts, root included, and else 0."""
        choices = self.choices[self.rows(position)].tolist()
        tokens, found, node = tree.tokens.tolist(), np.zeros(tree.size), 0
        found[0] = 1.0
        while True:
            following = [child for child in tree.children[node] if tokens[child] == choices[node]]
            if not following:
                return found
            node = following[0]
            found[node] = 1.0


def expert_sets(routing: Routing, experts: int) -> ExpertSets:
    """The sets of all nodes of a request, packed at once."""
    return ExpertSets.from_topk(routing, experts)


def to_bytes(request: RecordedRequest) -> bytes:
    """One safetensors file."""
    named: dict[str, Any] = {
        **{name: getattr(request, name) for name in ("tokens", "sizes", "node_tokens", "parents", "probs", "choices")},
        **{name: getattr(request, name) for name in ("routing", "entropies", "states", "state_rows")},
        **{PREDICTED + label: array for label, array in request.predicted.items()},
        **{ESTIMATED + label: array for label, array in request.estimated.items()},
    }
    data: bytes = save_tensors({name: np.ascontiguousarray(each) for name, each in named.items() if each is not None})
    return data


def from_bytes(data: bytes, path: Path) -> RecordedRequest:
    """What `to_bytes` wrote.

    Raises:
        UserError: it is damaged; the text names ``path``.
    """
    try:
        arrays: dict[str, Any] = load_tensors(data)
        grouped: dict[str, dict[str, Any]] = {PREDICTED: {}, ESTIMATED: {}}
        for prefix, group in grouped.items():
            for name in [name for name in arrays if name.startswith(prefix)]:
                group[name.removeprefix(prefix)] = arrays.pop(name)
        return RecordedRequest(**arrays, predicted=grouped[PREDICTED], estimated=grouped[ESTIMATED])
    except (SafetensorError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: not a recorded request ({one_line(error)}); record it anew") from error
