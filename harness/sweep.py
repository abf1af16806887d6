"""A sweep from its grid to its combined report. Imports torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ecospec.errors import UserError, one_line
from ecospec.harness.app import EXIT_INTERRUPTED, as_user_errors, console_width, execute, exit_code, is_gated, quieten
from ecospec.harness.config import RunConfig
from ecospec.harness.grid import Cell, Grid, Point, split_into_runs
from ecospec.harness.outputs import check_folder
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import Parts, check_options
from ecospec.harness.run_folder import new_folder
from ecospec.harness.runner import Bench
from ecospec.harness.several import named_suites
from ecospec.harness.sweep_folder import (
    SWEEP_JSON,
    SWEEP_PAGE,
    FinishedRun,
    FoundRun,
    check_sweep_folder,
    discard_sweep,
    finished_run,
    found_run,
    found_runs,
    new_run_folder,
    refuse_others,
)
from ecospec.harness.sweep_report import cell_results, sweep_json
from ecospec.harness.sweep_tables import print_sweep, sweep_markdown
from ecospec.harness.unused import say_unused, unused_options
from ecospec.harness.writing import alone_in, write_json, write_text

EXIT_REFUSED = 2
NOT_RUN, INTERRUPTED = "not run yet", "interrupted"


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be made or finished, ready to start; of its methods, the ``cells`` are asked for."""

    point: Point
    bench: Bench
    cells: tuple[Cell, ...]

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.bench.config.output is not None
        return self.bench.config.output


@dataclass
class Sweep:
    """What there is to do, and how far it has come.

    Attributes:
        cells: all that are asked for, in the order of the report.
        runs: to be made.
        done: runs that are finished.
        reasons: why a cell that no finished run has is missing.
    """

    grid: Grid
    parent: Path
    cells: list[Cell]
    runs: list[PlannedRun]
    done: list[FinishedRun]
    reasons: dict[Cell, str]

    def add(self, run: FinishedRun) -> None:
        """Take in a run where a later call will find it: by its point, then by the number of its folder."""
        points = list(dict.fromkeys(cell.point for cell in self.cells))
        self.done.append(run)
        self.done.sort(key=lambda each: (points.index(each.found.point), each.found.number))

    def write(self) -> None:
        """Write the combined report, missing cells and all."""
        results = cell_results(self.cells, self.done, self.reasons)
        plain = sweep_json(self.grid, results, self.done)
        write_json(self.parent / SWEEP_JSON, plain)
        write_text(self.parent / SWEEP_PAGE, sweep_markdown(self.grid, results, self.done))


def sweep_command(grid: Grid, named: Collection[str] = ()) -> int:
    """Run what is not done of a grid, write and print the combined report; returns the worst exit code.

    Args:
        named: the options that the user has given; of those that nothing uses it is said so.
    """
    quieten()
    parent = grid.base.output or new_folder("sweep")
    check_sweep_folder(parent)
    check_folder(f"--output {parent}", parent)
    plugins = load_plugins()
    with as_user_errors(grid.base):
        check_options(grid.base)
        unused = unused_options(grid.base, named, plugins, grid.temperatures)
        sweep = plan_sweep(grid, parent, plugins)
    say_unused(unused)
    to_run = sum(len(run.cells) for run in sweep.runs)
    print(
        f"{len(sweep.cells)} cells, {len(sweep.cells) - to_run} of them done and skipped; runs to make: "
        f"{len(sweep.runs)}, into {parent}",
        flush=True,
    )
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {parent}: cannot be made ({error.strerror})") from error
    with alone_in(parent):
        sweep.write()
        code = run_planned(sweep)
    print_sweep(cell_results(sweep.cells, sweep.done, sweep.reasons), sweep.done, Console(width=console_width()))
    print(f"sweep folder: {parent}")
    return max([code, *(verdict_code(run) for run in sweep.done)])


def plan_sweep(grid: Grid, parent: Path, plugins: Plugins) -> Sweep:
    """What the grid has, what of it is done, and what is to be run; all is checked and nothing written.

    Raises:
        UserError: what no run can have, or runs in the folder that were made with other options.
    """
    sweep = Sweep(grid, parent, [], [], [], {})
    parts: Parts | None = None
    for point, config in grid.points(named_suites(grid.base, grid.suites, plugins)).items():
        found = found_runs(parent, point)
        bench = Bench(dataclasses.replace(config, output=new_run_folder(parent, point, ())), plugins, parts)
        parts = bench.parts
        cells = _cells_of(point, bench)
        hashes = {cell.key: bench.predictor_sha256.get(cell.predictor or "") for cell in cells}
        refuse_others(found, bench.identity(), hashes)
        done = [run for each in found if (run := finished_run(each, bench.prompt_ids)) is not None]
        configs = _configs_to_run(bench.config, cells, found, done)
        sweep.cells += cells
        sweep.done += done
        lacking = {cell for cell in cells if all(cell.key not in run.found.labels for run in done)}
        for each in configs:
            ready = bench if each == bench.config else Bench(each, plugins, parts)
            keys = {(method.policy, method.predictor) for method in ready.method_parts}
            own = tuple(cell for cell in cells if cell in lacking and cell.key in keys)
            lacking -= set(own)
            sweep.runs.append(PlannedRun(point, ready, own))
    sweep.reasons = dict.fromkeys(sweep.cells, NOT_RUN)
    return sweep


def _cells_of(point: Point, bench: Bench) -> list[Cell]:
    baseline = bench.method_parts[0].policy
    return [
        Cell(point, parts.policy, parts.predictor, method.true_routing, parts.policy == baseline)
        for parts, method in zip(bench.method_parts, bench.methods[1:], strict=True)
    ]


def _configs_to_run(
    config: RunConfig, cells: Sequence[Cell], found: Sequence[FoundRun], done: Sequence[FinishedRun]
) -> list[RunConfig]:
    """The runs that a point still needs: unfinished ones as they were, then new ones with what none of these has.

    Args:
        config: the run with all methods.
    """
    if not found:
        return [config]
    # Every run has the baseline, so that it alone is no reason to finish one.
    needed = [cell for cell in cells if not cell.baseline] or list(cells)
    covered = {key for run in done for key in run.found.labels}
    finished = {run.found.folder for run in done}
    configs = []
    for run in found:
        if run.folder not in finished and any(cell.key in run.labels and cell.key not in covered for cell in needed):
            policies, predictors = (tuple(run.manifest[name]) for name in ("policy", "predictor"))
            configs.append(
                dataclasses.replace(config, policy=policies, predictor=predictors, output=run.folder, resume=True)
            )
            covered |= set(run.labels)
    taken = {run.folder for run in found}
    assert config.output is not None
    for policies, predictors in split_into_runs([cell for cell in needed if cell.key not in covered]):
        folder = new_run_folder(config.output.parent, cells[0].point, taken)
        taken.add(folder)
        configs.append(
            dataclasses.replace(config, policy=policies, predictor=predictors or config.predictor, output=folder)
        )
    return configs


def run_planned(sweep: Sweep) -> int:
    """Make the runs one after another, the combined report written after each; returns the worst exit code.

    A run that is refused on the way is noted and the others go on; where nothing is done yet, it ends the sweep.

    Raises:
        UserError: the first run was refused.
    """
    code = 0
    for number, run in enumerate(sweep.runs, 1):
        print(f"run {number} of {len(sweep.runs)}: {run.folder.name}", flush=True)
        try:
            with as_user_errors(run.bench.config):
                outcome = execute(
                    run.bench, run.bench.config, go_on=f"the same command with --output {sweep.parent}", show=False
                )
        except UserError as error:
            if not sweep.done:
                discard_sweep(sweep.parent)
                raise
            print(f"ecospec-bench: error: {run.folder.name}: {one_line(error)}", file=sys.stderr)
            sweep.reasons.update(dict.fromkeys(run.cells, f"refused: {one_line(error)}"))
            code = max(code, EXIT_REFUSED)
            continue
        if outcome is None:
            sweep.reasons.update(dict.fromkeys(run.cells, INTERRUPTED))
            code = EXIT_INTERRUPTED
            break
        sweep.add(FinishedRun(found_run(run.point, run.folder), outcome.report))
        sweep.write()
    sweep.write()
    return code


def verdict_code(run: FinishedRun) -> int:
    """What the run's command came to, from its report."""
    return exit_code([row.lossless.verdict for row in run.report.rows], gated=is_gated(run.found.manifest))
