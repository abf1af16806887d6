"""``ecospec-bench replay``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ecospec.errors import UserError
from ecospec.harness.cli_options import integers, option, spec_texts
from ecospec.harness.outputs import check_file


@click.command()
@click.argument("recordings", nargs=-1, required=True, metavar="RECORDING...", type=click.Path(path_type=Path))
@option(
    "--policy",
    multiple=True,
    default=("confidence", "global-cost", "marginal-cost", "oracle"),
    help="Selection policy NAME[:parameter=value,...]; repeat it, or separate several by commas.",
)
@option("--budget", multiple=True, default=("4",), callback=integers, help="γ; several separated by commas.")
@option("--predictor", multiple=True, help="Predictors of the recording, or oracle.  [default: the first]")
@option("--acceptance", help="Acceptance estimator of the recording, or draft.  [default: the first]")
@option(
    "--cost-model",
    type=click.Path(path_type=Path),
    help="What 'ecospec-bench profile' saved, a YAML file of a device and a geometry, or a projection's name.",
)
@option("--limit", type=int, help="At most so many requests of each recording.  [default: all]", show_default=False)
@option("--output", type=click.Path(path_type=Path), help="JSON file to write as well.")
def replay(
    recordings: tuple[Path, ...],
    policy: tuple[str, ...],
    budget: tuple[int, ...],
    predictor: tuple[str, ...],
    acceptance: str | None,
    cost_model: Path | None,
    limit: int | None,
    output: Path | None,
) -> None:
    """What policies would do over recordings: the α and E of a live run, without the target.

    Several, or a folder of them, are replayed as one: those of several suites.

    Seconds come from a cost model, where one is given: they are what such steps would take where it holds, and no
    measurement.
    """
    from rich.console import Console

    from ecospec.harness.app import console_width
    from ecospec.harness.recording.comparing import ReplayAsked, replay_recordings, replay_tables

    asked = ReplayAsked(
        policies=spec_texts(policy),
        budgets=budget,
        predictors=spec_texts(predictor),
        estimator=acceptance,
        cost_model=cost_model,
        limit=limit,
    )
    if output is not None:
        check_file(f"--output {output}", output)
    found = replay_recordings(recordings, asked)
    console = Console(width=console_width())
    for table in replay_tables(found, console.width):
        console.print(table)
    for line in found.notes:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if output is not None:
        try:
            output.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written ({error.strerror})") from error
