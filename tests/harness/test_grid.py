"""Grids: what a file or the command line can ask for, the points and runs of it, and the grids that are shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecospec.errors import UserError
from ecospec.harness import sweep as sweeping
from ecospec.harness.config import RunConfig
from ecospec.harness.grid import Cell, Grid, Point, grid_names, grid_path, split_into_runs
from ecospec.suites import SUITES


@pytest.fixture
def grid_of(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Grid]:
    """The grid that a command line asks for, instead of a sweep."""
    asked: list[Grid] = []
    monkeypatch.setattr(sweeping, "sweep_command", lambda grid, named=(): asked.append(grid) or 0)

    def read(*arguments: object) -> Grid:
        ran = command("sweep", *arguments)
        assert ran.code == 0, ran.err
        return asked[-1]

    return read


def test_axes_are_lists_separated_by_commas_or_repeated(grid_of: Callable[..., Grid]) -> None:
    grid = grid_of(
        *("--suite", "gsm8k,amc", "--suite", "gsm8k", "--budget", "3,4", "--budget", 5, "--temperature", "0,0.7"),
        *("--batch-size", 1, "--batch-size", "2,1", "--policy", "marginal:epsilon=2,oracle", "--policy", "confidence"),
        *("--predictor", "noisy-oracle:accuracy=0.5,seed=1,learned", "--limit", 3),
    )
    assert grid.suites == ("gsm8k", "amc")
    assert (grid.budgets, grid.batch_sizes, grid.temperatures) == ((3, 4, 5), (1, 2), (0.0, 0.7))
    assert grid.base.policy == ("marginal:epsilon=2", "oracle", "confidence")
    assert grid.base.predictor == ("noisy-oracle:accuracy=0.5,seed=1", "learned")
    assert grid.base.limit == 3


def test_a_file_gives_the_grid_and_the_command_line_wins(grid_of: Callable[..., Grid], tmp_path: Path) -> None:
    text = "suite: all\npolicy: [marginal, global-cost]\nbudget: [3, 4]\ntemperature: 1\nlimit: 5\nmax-new-tokens: 9\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    grid = grid_of("mine.yaml", "--budget", 6, "--limit", 7)
    assert grid.name == "mine.yaml"
    assert grid.suites == SUITES
    assert grid.base.policy == ("marginal", "global-cost")
    assert (grid.budgets, grid.temperatures, grid.batch_sizes) == ((6,), (1.0,), (1,))
    assert (grid.base.limit, grid.base.max_new_tokens) == (7, 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgett: 4\n", "unknown key 'budgett'; did you mean 'budget'"),
        ("resume: true\n", "unknown key 'resume'"),
        ("config: x.yaml\n", "unknown key 'config'"),
        ("grid: table-4\n", "unknown key 'grid'"),
        ("budget: []\n", "budget is an empty list, expected at least one value"),
        ("policy: []\n", "policy is an empty list"),
        ("suite:\n", "suite is empty"),
        ("budget: [[3]]\n", "budget is a list"),
        ("limit: [1, 2]\n", "limit is a list, expected one value"),
        ("budget: [3, many]\n", "--budget 3,many: expected an integer, or several"),
        ("budget: 3.5\n", "--budget 3.5: expected an integer"),
        ("temperature: [0, hot]\n", "--temperature 0,hot: expected a number, or several"),
        ("temperature: true\n", "--temperature True: expected a number"),
        ("limit: few\n", "few"),
        ("budget: 3\nbudget: 4\n", "budget is given 2 times"),
        (f"seed: 0x{'f' * 6000}\n", "seed: Exceeds the limit (4300 digits)"),
        ("- budget\n", "found a list"),
        ("{", "not YAML"),
        ("budget: 3\n", "no --suite given; known: aime25, "),
    ],
)
def test_a_wrong_grid_is_one_line(command: Callable[..., Any], tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    ran = command("sweep", "mine.yaml")
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tabel-4",), "unknown grid 'tabel-4': did you mean 'table-4'"),
        (("mine",), "or give the path of a .yaml file"),
        (("nowhere.yaml",), "grid nowhere.yaml: not readable (No such file or directory)"),
        ((), "no --suite given"),
        (("--suite", "gsm8k", "--budget", ","), "--budget ,: expected an integer"),
        (("--suite", "gsm8k", "--policy", ","), "empty entry"),
        (("--suite", "gsm8k", "--resume"), "--resume"),
        (("table-4", "table-9"), "table-9"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "mine").write_text("suite: gsm8k\n", encoding="utf-8")  # a path has to end in .yaml
    ran = command("sweep", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_the_points_of_a_grid_are_runs_with_readable_names() -> None:
    base = RunConfig(suite="", policy=("marginal",), seed=5)
    grid = Grid("", base, ("gsm8k", "my/own.yaml"), (0.0, 0.75), (1,), (3, 12))
    runs = grid.points({"gsm8k": "gsm8k", "my/own.yaml": "own"})
    assert [point.name for point in runs] == [
        *("gsm8k-t0-b1-g3", "gsm8k-t0-b1-g12", "gsm8k-t0.75-b1-g3", "gsm8k-t0.75-b1-g12"),
        *("own-t0-b1-g3", "own-t0-b1-g12", "own-t0.75-b1-g3", "own-t0.75-b1-g12"),
    ]
    last = list(runs.values())[-1]
    assert last == RunConfig(
        suite="my/own.yaml", policy=("marginal",), seed=5, temperature=0.75, batch_size=1, budget=12
    )


@pytest.mark.parametrize(
    ("methods", "runs"),
    [
        ("", []),
        ("a", [("a", "")]),
        ("aX", [("a", "X")]),
        ("aX aY bX bY", [("ab", "XY")]),
        ("aX bX bY", [("a", "X"), ("b", "XY")]),
        ("aY bX bY c dY", [("cad", "Y"), ("b", "XY")]),
    ],
)
def test_methods_are_run_together_where_they_lack_the_same_predictors(
    methods: str, runs: list[tuple[str, str]]
) -> None:
    point = Point("gsm8k", 0.0, 1, 4)
    cells = [Cell(point, name[0], name[1:] or None) for name in methods.split()]
    assert [("".join(policies), "".join(predictors)) for policies, predictors in split_into_runs(cells)] == runs


def test_the_shipped_grids_are_those_of_the_papers_tables(grid_of: Callable[..., Grid]) -> None:
    assert grid_names() == ["table-4", "table-9", "table-10", "table-11"]
    asked = {name: grid_of(name) for name in grid_names()}
    assert asked["table-4"].suites == asked["table-10"].suites == SUITES
    for name in ("table-4", "table-11"):
        assert asked[name].base.policy == ("confidence", "global-cost", "marginal-cost")
    assert asked["table-10"].base.predictor == ("learned", "feature", "oracle")
    assert asked["table-9"].base.predictor == (
        *(f"noisy-oracle:accuracy={accuracy}" for accuracy in (0.2, 0.4, 0.6, 0.8)),
        *("oracle", "token-frequency", "learned", "feature"),
    )
    assert asked["table-11"].budgets == (3, 4, 5, 6)
    assert all(grid.base.limit and grid.base.target is None for grid in asked.values())
    assert grid_path("table-4").is_file()
    with pytest.raises(UserError, match="did you mean 'table-10'"):
        grid_path("tables-10")
