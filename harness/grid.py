"""The grid of a sweep: its axes, its points, each of which is a run, and the cells of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecospec.errors import UserError, nearest
from ecospec.harness.config import RunConfig

GRIDS = Path(__file__).parent / "grids"
"""The grids that ship with the package."""
SUFFIXES = (".yaml", ".yml")


def grid_names() -> list[str]:
    """The names of the grids that ship with the package."""
    return sorted((path.stem for path in GRIDS.glob("*.yaml")), key=lambda name: (len(name), name))


def grid_path(name: str) -> Path:
    """The file of a grid: a path that ends in .yaml or .yml, else the name of one that ships with the package.

    Raises:
        UserError: no grid has that name.
    """
    if name.endswith(SUFFIXES):
        return Path(name)
    if name not in grid_names():
        raise UserError(f"unknown grid {name!r}: {nearest(name, grid_names())}; or give the path of a .yaml file")
    return GRIDS / f"{name}.yaml"


@dataclass(frozen=True)
class Point:
    """What the methods of one run have in common."""

    suite: str
    temperature: float
    batch_size: int
    budget: int

    @property
    def name(self) -> str:
        """That of the run's folder."""
        temperature = repr(float(self.temperature)).removesuffix(".0")
        return f"{self.suite}-t{temperature}-b{self.batch_size}-g{self.budget}"


@dataclass(frozen=True)
class Cell:
    """One method at one point.

    Attributes:
        policy: the policy's spec, with its full name.
        predictor: the predictor's spec; None for a policy that needs none.
        true_routing: it looks at the target's true routing, and so has no speed-up.
        baseline: it is what the others are compared with; every run has it.
    """

    point: Point
    policy: str
    predictor: str | None
    true_routing: bool = False
    baseline: bool = False

    @property
    def key(self) -> tuple[str, str | None]:
        """The method, for any point."""
        return self.policy, self.predictor

    @property
    def method(self) -> str:
        """The cell's method by its full name."""
        return self.policy if self.predictor is None else f"{self.policy} with {self.predictor}"


@dataclass(frozen=True)
class Grid:
    """All that a sweep is asked for.

    Attributes:
        name: the grid's name or file; empty where the command line alone says it.
        base: a run's options; of the axes, policies and predictors count, the others are set by each point.
        suites: as asked for, names or paths of task files.
    """

    name: str
    base: RunConfig
    suites: tuple[str, ...]
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    budgets: tuple[int, ...]

    def points(self, names: Mapping[str, str]) -> dict[Point, RunConfig]:
        """Every point and the run at it, suites outermost and budgets innermost.

        Args:
            names: the suites' own names by what was asked for.
        """
        return {
            Point(names[suite], temperature, size, budget): dataclasses.replace(
                self.base, suite=suite, temperature=temperature, batch_size=size, budget=budget
            )
            for suite in self.suites
            for temperature in self.temperatures
            for size in self.batch_sizes
            for budget in self.budgets
        }


def split_into_runs(cells: Sequence[Cell]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Policies and predictors of a few runs that together have these methods and no others.

    A run has every policy with every predictor, so that policies that lack the same predictors go together.
    Those that need none go with the first.
    """
    lacking: dict[str, list[str]] = {}
    for cell in cells:
        lacking.setdefault(cell.policy, []).extend([] if cell.predictor is None else [cell.predictor])
    groups: dict[tuple[str, ...], list[str]] = {}
    for policy, predictors in lacking.items():
        if predictors:
            groups.setdefault(tuple(predictors), []).append(policy)
    alone = [policy for policy, predictors in lacking.items() if not predictors]
    if not groups and alone:
        return [(tuple(alone), ())]
    first = next(iter(groups), ())
    return [(tuple([*alone, *found] if key == first else found), key) for key, found in groups.items()]
