"""``ecospec-bench report``: a run's report anew, in any format, without loading a model."""

from __future__ import annotations

from pathlib import Path

import click

from ecospec.errors import UserError
from ecospec.harness.outputs import check_file

FORMATS = ("html", "markdown", "csv", "json", "paper")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="html",
    show_default=True,
    help="paper: tables in the layout of the EcoSpec paper, as Markdown.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: for html report.html or summary.html in RUN, else the terminal]",
)
def report(run: Path, kind: str, output: Path | None) -> None:
    """Make a report anew from what a run left.

    RUN is a run folder, of a finished run or of an interrupted one, whose finished prompts are counted then; or a
    folder of several runs or of a sweep.
    """
    from ecospec.harness.report_writing import rendered, write_page
    from ecospec.harness.run_reading import not_begun, read_runs

    if output is not None:
        check_file(f"--output {output}", output)
    runs = read_runs(run)
    for each in runs:
        if each.missing:
            click.echo(f"ecospec-bench: {each.name}: {each.unfinished}", err=True)
    for name in not_begun(run, runs):
        click.echo(f"ecospec-bench: {name}: not begun, so that nothing of it is counted", err=True)
    try:
        if kind == "html":
            click.echo(f"written to {write_page(run, runs, output)}")
            return
        text = rendered(run, runs, kind)
        if output is None:
            click.echo(text, nl=False)
            return
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"report: {error.filename or output}: cannot be written ({error.strerror})") from error
    click.echo(f"written to {output}")
