"""The estimator contract: how likely is each draft node to be accepted, with all of its path?

An estimator is a frozen dataclass, like a predictor; its fields are what a user may set. `bind` loads what it needs and
checks that it fits the target. This module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ecospec.policies import DraftTree
from ecospec.policies.arrays import FloatArray, IntArray
from ecospec.policies.spec import summary
from ecospec.predictors.contract import NodeStates, TargetView


@dataclass(frozen=True)
class AcceptanceRequest:
    """What an estimator gets of one draft tree.

    Attributes:
        tree: of more than its root.
        drafter_states: what the drafter knows at the tree's nodes; it is there already and costs nothing. A drafter
            without states raises a `UserError` when asked.
    """

    tree: DraftTree
    drafter_states: Callable[[DraftTree], NodeStates]


class BoundEstimator(ABC):
    """An estimator with what it was fitted to loaded for one target, drafter and temperature.

    Attributes:
        fitted_on: keys of the prompts that it was fitted to, see `prompt_key`; a run that has one of them is refused.
    """

    fitted_on: frozenset[str] = frozenset()

    @abstractmethod
    def estimate(self, request: AcceptanceRequest) -> FloatArray:
        """float64 [N], the probability that node i and all of its path are accepted; the root's is 1."""


@dataclass(frozen=True)
class SavedFolder:
    """A folder that was found for a run, and not named by its user.

    Attributes:
        sha256: over its files.
    """

    folder: Path
    sha256: str


class AcceptanceEstimator(ABC):
    """A way to estimate acceptance. Subclass it as a frozen dataclass, name it, and write `bind`."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.description = summary(cls)

    @abstractmethod
    def bind(self, target: TargetView, temperature: float) -> BoundEstimator:
        """Load for one target and its drafter, decoding at this temperature.

        Raises:
            UserError: nothing to load, or it does not fit.
        """


def sibling_ranks(tree: DraftTree) -> IntArray:
    """int64 [N]: 0 for the likeliest child of its parent, 1 for the next; ties to the lower index. The root's is 0."""
    ranks = np.zeros(tree.size, dtype=np.int64)
    probs = tree.probs.tolist()
    for children in tree.children:
        for rank, child in enumerate(sorted(children, key=lambda node: -probs[node])):
            ranks[child] = rank
    return ranks


def along_paths(parents: IntArray, conditional: FloatArray) -> FloatArray:
    """float64 [N]: products from the root of the nodes' own probabilities, each given that its parent is accepted."""
    path = [1.0]
    for parent, value in zip(parents.tolist()[1:], conditional.tolist()[1:], strict=True):
        path.append(path[parent] * value)
    return np.array(path)


def never_rising(parents: IntArray, estimates: FloatArray) -> FloatArray:
    """float64 [N]: the estimates, each at most its parent's: a node is accepted with all of its path or not at all."""
    path = [1.0]
    for parent, value in zip(parents.tolist()[1:], estimates.tolist()[1:], strict=True):
        path.append(min(path[parent], value))
    return np.array(path)
