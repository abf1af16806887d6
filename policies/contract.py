"""The policy contract: what a policy is given, what it must return, and how that is checked."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ecospec.errors import UserError, blame, one_line
from ecospec.policies.arrays import FloatArray, IntArray, WordArray, frozen
from ecospec.policies.cost import CostModel
from ecospec.policies.experts import ExpertSets
from ecospec.policies.spec import summary
from ecospec.policies.tree import DraftTree

Selection: TypeAlias = Sequence[int] | NDArray[np.integer]


class SelectionError(UserError):
    """A policy raised, or returned a selection that breaks the contract; the text names the policy."""


class ExpertNeed(Enum):
    """Which expert sets a policy wants in its requests."""

    NONE = "none"
    """No expert sets: `request.experts` is None, and no predictor runs."""
    PREDICTED = "predicted"
    """The predictor's guess, available before verification."""
    ORACLE = "oracle"
    """The target's true routing, from an extra forward pass that no timing includes."""


class AcceptanceNeed(Enum):
    """Which acceptance estimates a policy wants in its requests."""

    DRAFT = "draft"
    """The draft's own path probabilities: `request.acceptance` is None, and no estimator runs."""
    ESTIMATED = "estimated"
    """The estimator's, known before verification; None where the run was asked to do without one."""
    TRUE = "true"
    """1 for the nodes that the target will accept and 0 for the others, from an extra pass that no timing includes."""


@dataclass(frozen=True, eq=False)
class SelectionRequest:
    """All that a policy may look at in one decode step.

    Attributes:
        tree: the draft tree, N nodes.
        budget: γ, how many tokens the step may verify, root included; at least 1.
        experts: the expert set of each node, of the kind the policy's `needs` asks for, or None.
        covered: B₀, uint64[words], pairs that the step reads whatever is selected; None for no pairs.
        cost_model: what a step costs on this device, or None where the policy does not ask for it.
        acceptance: float64[N], the estimated probability that node i and all of its path are
            accepted; None to use the draft's own `tree.path_probs`. It may rise along a path.

    Raises:
        ValueError: the parts do not fit together.
    """

    tree: DraftTree
    budget: int
    experts: ExpertSets | None = None
    covered: WordArray | None = None
    cost_model: CostModel | None = None
    acceptance: FloatArray | None = None

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or operator.index(self.budget) < 1:
            raise ValueError(f"the budget includes the root, so it is at least 1, got {self.budget}")
        if self.experts is not None and self.experts.size != self.tree.size:
            raise ValueError(f"expert sets for {self.experts.size} nodes, but the tree has {self.tree.size}")
        if self.covered is not None:
            covered = frozen("covered", self.covered, np.uint64, ndim=1)
            if self.experts is not None and len(covered) != self.experts.words:
                raise ValueError(f"covered has {len(covered)} words, expected {self.experts.words}")
            object.__setattr__(self, "covered", covered)
        if self.acceptance is not None:
            acceptance = frozen("acceptance", self.acceptance, np.float64, ndim=1)
            if len(acceptance) != self.tree.size:
                raise ValueError(f"acceptance for {len(acceptance)} nodes, but the tree has {self.tree.size}")
            if not ((acceptance >= 0.0) & (acceptance <= 1.0)).all():
                raise ValueError(f"acceptance holds probabilities from 0 to 1, got {acceptance.tolist()}")
            object.__setattr__(self, "acceptance", acceptance)

    @property
    def node_scores(self) -> FloatArray:
        """float64[N], P(i): how likely node i is to be accepted, together with its whole path."""
        return self.tree.path_probs if self.acceptance is None else self.acceptance

    def path_footprints(self) -> ExpertSets:
        """The path footprint of each node; computed anew on each call, so call it once.

        Raises:
            ValueError: the policy's `needs` did not ask for expert sets.
        """
        return self.expert_sets().path_footprints(self.tree)

    def cost(self) -> CostModel:
        """The device's cost model, never None.

        Raises:
            ValueError: the policy's `needs_cost_model` did not ask for one.
        """
        if self.cost_model is None:
            raise ValueError("no cost model in this request; declare needs_cost_model = True")
        return self.cost_model

    def initial_buffer(self) -> WordArray:
        """uint64[words], a fresh copy of B₀ to update in place.

        Raises:
            ValueError: the policy's `needs` did not ask for expert sets.
        """
        return self.expert_sets().empty_buffer() if self.covered is None else self.covered.copy()

    def expert_sets(self) -> ExpertSets:
        """The own expert set of each node, never None.

        Raises:
            ValueError: the policy's `needs` did not ask for expert sets.
        """
        if self.experts is None:
            raise ValueError("no expert sets in this request; declare needs = ExpertNeed.PREDICTED or ORACLE")
        return self.experts


class Policy(ABC):
    """Chooses which draft nodes to verify. Subclass it, name it, and write `select`.

    A policy with parameters is a frozen dataclass: its fields are what a user may set, as in
    `--policy marginal:epsilon=0.5`, with the help text in `field(metadata={"help": ...})`.
    """

    name: ClassVar[str]
    """What the user types; unique among the installed policies."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names for it. A subclass does not inherit them."""
    needs: ClassVar[ExpertNeed] = ExpertNeed.NONE
    """Which expert sets `select` looks at."""
    acceptance: ClassVar[AcceptanceNeed] = AcceptanceNeed.DRAFT
    """Which estimates of acceptance it looks at."""
    needs_cost_model: ClassVar[bool] = False
    """Whether it looks at `request.cost_model`, which is there then."""
    description: ClassVar[str] = ""
    """The first paragraph of the class's docstring, on one line."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.description = summary(cls)
        if "aliases" not in vars(cls):
            cls.aliases = ()

    @abstractmethod
    def select(self, request: SelectionRequest) -> Selection:
        """The nodes to verify: at most `request.budget` of them, in any order.

        The selection holds the root (node 0) and, with every node, that node's parent.
        """


def run_policy(policy: Policy, request: SelectionRequest) -> IntArray:
    """Let the policy select, and check the result; the only way the harness calls a policy.

    Returns:
        int64[n], the selected nodes in ascending order, 1 <= n <= request.budget.

    Raises:
        SelectionError: the policy raised (chained), or its selection breaks the contract.
    """
    asked = (request.tree, request.budget)
    try:
        selection = policy.select(request)
    except KeyboardInterrupt:  # the user's
        raise
    except BaseException as error:
        # The policy's own line, where it was one of ours that refused what it asked for.
        raise SelectionError(f"policy {policy.name!r} {blame(error, __file__)}") from error
    if (request.tree, request.budget) != asked:
        raise SelectionError(f"policy {policy.name!r} changed its request; expected it to select and no more")
    return validate_selection(policy.name, request, selection)


def validate_selection(policy_name: str, request: SelectionRequest, selection: object) -> IntArray:
    """Check a selection against the contract, and sort it.

    Returns:
        int64[n], the selected nodes in ascending order, 1 <= n <= request.budget.

    Raises:
        SelectionError: the selection is not a flat sequence of integers, is empty, over budget, has
            duplicates or unknown nodes, lacks the root, or is not prefix-closed.
    """
    tree, budget = request.tree, request.budget
    try:
        nodes = sorted(_as_integers(selection))
        chosen = set(nodes)
        if not nodes:
            raise _Rejected("an empty selection; select at least the root, node 0")
        if len(chosen) != len(nodes):
            raise _Rejected(f"node {_first_duplicate(nodes)} more than once: {nodes}")
        if nodes[0] < 0 or nodes[-1] >= tree.size:
            unknown = nodes[0] if nodes[0] < 0 else nodes[-1]
            raise _Rejected(f"unknown node {unknown}; the tree's nodes are 0 to {tree.size - 1}")
        if len(nodes) > budget:
            raise _Rejected(f"{len(nodes)} nodes, over the budget of {budget} (root included): {nodes}")
        if nodes[0] != 0:
            raise _Rejected(f"{nodes} without the root, node 0")
        parents = tree.parents[nodes].tolist()
        for node, parent in zip(nodes[1:], parents[1:], strict=True):
            if parent not in chosen:
                raise _Rejected(f"node {node} without its parent, node {parent}: {nodes}")
    except _Rejected as reason:
        raise SelectionError(f"policy {policy_name!r} selected {one_line(reason)}") from None
    except Exception as error:  # a sequence of somebody else's making may raise anything when it is read
        raise SelectionError(
            f"policy {policy_name!r} selected something of type {type(selection).__name__} that cannot be read "
            f"as node numbers ({type(error).__name__}: {one_line(error)})"
        ) from error
    return np.array(nodes, dtype=np.int64)


class _Rejected(Exception):
    """Why a selection is refused; reads on from "policy 'name' selected"."""


def _as_integers(selection: object) -> list[int]:
    expected = "expected a flat sequence or 1-D array of node numbers (integers)"
    if isinstance(selection, np.ndarray):
        if selection.ndim != 1:
            raise _Rejected(f"an array of shape {selection.shape}; {expected}")
        if selection.dtype.kind not in "iu" and selection.size:
            raise _Rejected(f"an array of {selection.dtype}; {expected}")
        nodes: list[int] = selection.tolist()
        return nodes
    if not isinstance(selection, Sequence) or isinstance(selection, str | bytes):
        kind = "nothing (None)" if selection is None else f"something of type {type(selection).__name__}"
        raise _Rejected(f"{kind}; {expected}")
    for node in selection:
        if not isinstance(node, int | np.integer) or isinstance(node, bool):
            shown = " ".join(repr(node).split())
            raise _Rejected(f"{shown}, a {type(node).__name__}; {expected}")
    return list(map(int, selection))


def _first_duplicate(nodes: list[int]) -> int:
    return next(node for node, following in pairwise(nodes) if node == following)
