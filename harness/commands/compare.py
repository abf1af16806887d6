"""``ecospec-bench compare``: whether one run is worse than another."""

from __future__ import annotations

from pathlib import Path

import click

from ecospec.errors import UserError
from ecospec.harness.cli_options import option
from ecospec.harness.outputs import check_file


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", required=False, type=click.Path(path_type=Path))
@option(
    "--tolerance",
    multiple=True,
    metavar="FIGURE=NUMBER",
    help="How far a figure may move, as a share: tokens (of the prompts), steps, alpha, active-experts, "
    "verified-tokens, overlap, score (a difference), or all; several separated by commas.  [default: not at all]",
    show_default=False,
)
@option(
    "--elsewhere",
    multiple=True,
    metavar="FIGURE=NUMBER",
    help="The same, in place of --tolerance, where NEW is from another processor or other versions, which round "
    "differently.",
    show_default=False,
)
@option("--slower", type=float, default=0.10, help="By which share a method may become slower.")
@option(
    "--absolute",
    is_flag=True,
    help="Gate seconds too, not only those relative to plain decoding: for a machine with nothing else to do.",
    show_default=False,
)
@option("--json", "output", type=click.Path(path_type=Path), help="JSON file to write as well.")
@option("--save", type=click.Path(path_type=Path), help="Save the run BASE, its times left out, as a small file.")
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    base: Path,
    new: Path | None,
    tolerance: tuple[str, ...],
    elsewhere: tuple[str, ...],
    slower: float,
    absolute: bool,
    output: Path | None,
    save: Path | None,
) -> None:
    """Compare the run NEW with the run BASE, prompt by prompt; a gate for CI.

    BASE and NEW are run folders, folders of several runs, or files of --save. Deterministic figures must be the same;
    seconds per token, relative to plain decoding's in the same run, must not be larger by more than --slower. Two files
    of pytest-benchmark are compared by the medians of their rounds.

    \b
      ecospec-bench compare runs/before runs/after
      ecospec-bench compare runs/before --save base.jsonl
      ecospec-bench compare base.jsonl runs/after --tolerance tokens=0.05,alpha=0.02,active-experts=0.02

    Exit code 0: passes. 1: a regression. 2: the two cannot be compared.
    """
    from ecospec.harness.comparing.command import compare_command, save_command
    from ecospec.harness.comparing.figures import tolerances_of

    if save is not None:
        if new is not None or output is not None or tolerance or elsewhere:
            raise UserError(f"--save {save}: expected one run and nothing to compare it with")
        check_file(f"--save {save}", save)
        save_command(save, base)
        return
    if new is None:
        raise UserError(f"nothing to compare {base} with; expected BASE and NEW, or --save FILE")
    if not 0 < slower < 10:
        raise UserError(f"--slower {slower:g}: expected a share above 0, such as 0.10")
    if output is not None:
        check_file(f"--json {output}", output)
    ctx.exit(
        compare_command(
            base,
            new,
            tolerances_of(tolerance),
            slower=slower,
            absolute=absolute,
            elsewhere=tolerances_of(elsewhere) if elsewhere else None,
            output=output,
        )
    )
