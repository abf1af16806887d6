"""``ecospec-bench record``."""

from __future__ import annotations

import sys
from typing import Any

import click

from ecospec.errors import UserError
from ecospec.harness.cli_options import option, run_options, spec_texts
from ecospec.harness.config import RunConfig
from ecospec.harness.unused import named_options, say_unused, unused_sampling

EXIT_INTERRUPTED = 130


@click.command()
@run_options(
    "policy", "baseline", "budget", "check", "run_code", "acceptance", "cost_model", "resume", "batch_size", "parallel"
)
@option(
    "--acceptance",
    multiple=True,
    default=("learned",),
    help="Acceptance estimator whose estimates are recorded as well; repeat it for several; draft for none.",
)
@option("--resume", is_flag=True, help="Go on with the recording in --output.", show_default=False)
@option("--states", is_flag=True, help="Keep the drafter's hidden states, to fit the learned estimator to.")
@click.pass_context
def record(ctx: click.Context, /, acceptance: tuple[str, ...], states: bool, **options: Any) -> None:
    """Write down what a speculative step would meet at every position of plain decoding's output.

    That is the whole draft tree, its true routing, the predicted expert sets and the target's choices: all that
    'ecospec-bench replay' needs to say what any policy would do, without the target.
    """
    ctx.exit(_record(acceptance, states, options, named_options(ctx)))


def _record(acceptance: tuple[str, ...], states: bool, options: dict[str, Any], named: frozenset[str]) -> int:
    if options["suite"] is None:
        raise UserError("nothing to record; expected --suite")
    if options["output"] is None:
        raise UserError("--output is missing; expected the folder to write the recording to")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ecospec.harness.app import as_user_errors, quieten
    from ecospec.harness.recording.preparing import prepare_all

    quieten()
    specs = spec_texts(options.pop("predictor"))
    config = RunConfig(policy=("confidence",), predictor=specs, **options)
    output = config.output
    assert output is not None
    with as_user_errors(config):
        recorders = prepare_all(config, [spec for spec in spec_texts(acceptance) if spec != "draft"], states=states)
        say_unused(list(unused_sampling(config, named)))
        columns = [TextColumn("recording"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=sum(len(each.bench.prompt_ids) for each in recorders.values()))
            writers = []
            try:
                for folder, recorder in recorders.items():
                    resume = recorder.bench.config.resume
                    writers.append(recorder.record(folder, resume=resume, on_request=lambda _: bar.advance(task)))
            except KeyboardInterrupt:
                click.echo(
                    f"ecospec-bench: interrupted; the same command with --resume goes on with {output}", err=True
                )
                return EXIT_INTERRUPTED
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    entries = [entry for writer in writers for entry in writer.entries]
    ties = sum(entry.ties for entry in entries)
    suites = f" of {len(writers)} suites" if len(writers) > 1 else ""
    click.echo(f"{len(entries)} requests{suites}, {size / 1e6:.1f} MB, in {output}")
    if ties:
        click.echo(
            f"at {ties} positions a pass over the whole tree chose another token than plain decoding; a live run can "
            "differ from its replay there"
        )
    return 0
