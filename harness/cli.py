"""The command line: ``ecospec-bench``.

Only click is imported here; torch, transformers and lm-eval are imported when a command needs them, so that
``--help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

import ecospec
from ecospec.errors import UserError
from ecospec.harness.cli_options import (
    DOCTOR_OPTIONS,
    RUN_OPTIONS,
    option,
    run_options,
    spec_texts,
    sweep_options,
    train_options,
)
from ecospec.harness.commands.acceptance import train_acceptance
from ecospec.harness.commands.compare import compare
from ecospec.harness.commands.profile import profile
from ecospec.harness.commands.record import record
from ecospec.harness.commands.replay import replay
from ecospec.harness.commands.report import report
from ecospec.harness.config import RunConfig
from ecospec.harness.grid import Grid, grid_names
from ecospec.harness.processes import process_count
from ecospec.harness.resuming import take_options
from ecospec.harness.unused import named_options

EXIT_VIOLATED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A run prints one table and leaves manifest.json, prompts.jsonl, report.json, .md, .csv and .html.",
)
@run_options()
@click.version_option(ecospec.__version__, prog_name="ecospec-bench")
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> None:
    """Measure draft-selection policies for speculative decoding of Mixture-of-Experts models.

    Plain decoding, the baseline and each policy decode the same prompts, interleaved; every output is
    compared with plain decoding's.

    \b
      ecospec-bench --suite gsm8k --policy marginal
      ecospec-bench --suite gsm8k --policy marginal:epsilon=0.5 --policy oracle --budget 5
      ecospec-bench --suite all --policy marginal
      ecospec-bench --suite gsm8k --policy marginal --batch-size 1,2,4,8
      ecospec-bench --resume runs/gsm8k-20260102-030405
      ecospec-bench sweep table-11
      ecospec-bench plugins
    """
    if ctx.invoked_subcommand is not None:
        if process_count() > 1:
            raise UserError(f"{ctx.invoked_subcommand} in {process_count()} processes: expected one process")
        return
    resume: str | None = options.pop("resume")
    options["resume"] = resume is not None
    if resume:
        folder = Path(resume)
        if options["output"] not in (None, folder):
            raise UserError(f"--resume {resume} with --output {options['output']}: expected one folder")
        options = take_options(ctx, folder, options)
    if options["suite"] is None:
        if len(sys.argv) <= 1:
            click.echo(ctx.get_help())
            return
        raise _no_suite()
    from ecospec.harness.app import run_command

    sizes: tuple[int, ...] = options["batch_size"]
    specs = {name: spec_texts(options[name]) for name in ("policy", "predictor")}
    ctx.exit(run_command(RunConfig(**{**options, **specs, "batch_size": sizes[0]}), sizes, named_options(ctx)))


def _no_suite() -> UserError:
    from ecospec.suites import suite_names

    return UserError(f"no --suite given; known: {', '.join(suite_names())}")


@cli.command()
def plugins() -> None:
    """List policies, predictors and drafters with their parameters, and suites."""
    from ecospec.harness.app import plugins_command

    plugins_command()


@cli.command()
@run_options(*set(RUN_OPTIONS).difference(DOCTOR_OPTIONS))
@option("--max-context", type=int, help="Tokens to reckon KV caches with.  [default: the target's context]")
@option(
    "--device-map",
    type=click.Choice(("auto",)),
    help="auto: memory with the target spread over all devices; an estimate.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.", show_default=False)
@click.pass_context
def doctor(
    ctx: click.Context, /, max_context: int | None, device_map: str | None, as_json: bool, **options: Any
) -> None:
    """Say in seconds whether target, drafter and predictors fit each other and this machine.

    Only configs and tensor headers are read: a folder with nothing but config.json will do, and what is missing is
    named. The exit code is 0 where a run would have nothing to stop at, else 2.
    """
    from ecospec.harness.doctor.command import Asked, doctor_command

    specs = {name: spec_texts(options.pop(name)) for name in ("policy", "predictor")}
    size = max(options.pop("batch_size"))
    config = RunConfig(**{**options, **specs, "suite": "", "batch_size": size})
    ctx.exit(doctor_command(config, Asked(max_context, device_map is not None, as_json), named_options(ctx)))


@cli.command(epilog=f"Grids that ship with the package: {', '.join(grid_names())}.")
@sweep_options()
@click.pass_context
def sweep(ctx: click.Context, /, grid: str | None, **options: Any) -> None:
    """Run a grid: every policy with every predictor, in every suite, at every temperature, batch size and budget.

    GRID is a YAML file with the options below as keys, or one of the grids that ship with the package; the command
    line wins over it. Suites, policies, predictors, temperatures, batch sizes and budgets can be several: a list in
    the file, separated by commas or repeated on the command line.

    The same command with the same --output goes on with an earlier sweep: what is done is skipped, an interrupted
    run is finished, and of a grid that has grown only what is new is run. The combined report is sweep.md and
    sweep.json.
    """
    if not options["suite"]:
        raise _no_suite()
    from ecospec.harness.several import suites_asked
    from ecospec.harness.sweep import sweep_command
    from ecospec.suites import SUITES

    suites = suites_asked(",".join(options.pop("suite")), SUITES)
    axes = [options.pop(name) for name in ("temperature", "batch_size", "budget")]
    specs = {name: spec_texts(options[name]) for name in ("policy", "predictor")}
    base = RunConfig(**{**options, "suite": "", **specs})
    ctx.exit(sweep_command(Grid(grid or "", base, tuple(suites), *axes), named_options(ctx)))


@cli.command()
@run_options(
    *("policy", "baseline", "predictor", "drafter", "drafter_revision", "budget", "draft_steps", "draft_topk"),
    *("check", "run_code", "resume", "acceptance", "cost_model"),
)
@option("--resume", is_flag=True, help="Go on with the trace in --output.", show_default=False)
@option("--text", type=click.Path(path_type=Path), help="JSON lines with a column text, instead of a suite or besides.")
@click.pass_context
def trace(ctx: click.Context, /, text: Path | None, **options: Any) -> None:
    """Write down which experts the target routes every token of its texts to.

    Suites are answered by plain decoding, and prompt and answer are traced; texts are traced as they are.
    """
    from ecospec.harness.app import trace_command

    sizes: tuple[int, ...] = options.pop("batch_size")
    if options["suite"] is None and text is None:
        raise UserError("nothing to trace; expected --suite, or --text with a file")
    if len(sizes) > 1:
        raise UserError(f"--batch-size {','.join(map(str, sizes))}: expected one size")
    if options["output"] is None:
        raise UserError("--output is missing; expected the folder to write the trace to")
    suites, options["suite"] = options["suite"], ""
    ctx.exit(trace_command(RunConfig(policy=("confidence",), batch_size=sizes[0], **options), suites, text))


@cli.command()
@option("--trace", "traces", required=True, multiple=True, type=click.Path(path_type=Path), help="Trace; repeat it.")
@option(
    "--predictor",
    multiple=True,
    default=("feature", "learned", "token-frequency"),
    help="Expert predictor NAME[:parameter=value,...]; repeat it for several.",
)
@option("--held-out-of", type=click.Path(path_type=Path), help="Training from these traces: only what it held out.")
@option(
    "--trees",
    type=int,
    help="Texts that are decoded anew, to judge by draft trees.  [default: 8 where there are a drafter and answers]",
    show_default=False,
)
@option("--output", type=click.Path(path_type=Path), help="JSON file to write as well.")
@run_options(
    *set(RUN_OPTIONS).difference(
        ("target", "target_revision", "trust_remote_code", "drafter", "drafter_revision"),
        ("budget", "draft_steps", "draft_topk", "dtype", "device", "threads"),
    )
)
def evaluate(
    traces: tuple[Path, ...], held_out_of: Path | None, trees: int | None, output: Path | None, **options: Any
) -> None:
    """How often predictors name the experts that tokens are routed to, written ones and drafted ones."""
    from ecospec.harness.app import evaluate_command

    specs = spec_texts(options.pop("predictor"))
    config = RunConfig(suite="", policy=("marginal-cost",), predictor=specs, widen=1, **options)
    evaluate_command(config, traces, held_out_of, trees, output)


@cli.group()
def train() -> None:
    """Train a target, a drafter or a predictor."""


@train.command("target")
@train_options(steps=3000)
def train_target(**options: Any) -> None:
    """A small Qwen3-MoE with fine-grained experts, and its tokenizer."""
    _train("target", options)


@train.command("drafter")
@option("--target", required=True, type=click.Path(path_type=Path), help="Target checkpoint folder.")
@option("--own-text", type=int, default=0, help="Windows of the target's own text to train on as well.")
@option(
    "--start",
    type=click.Path(),
    default="",
    help="Folder of a head to go on from, its vocabulary kept.",
    show_default=False,
)
@option(
    "--patience",
    type=int,
    help="Evaluations, one every 50 steps, without a better share of right first guesses, after which to stop.  "
    "[default: 8]",
    show_default=False,
)
@train_options(steps=800)
def train_drafter(**options: Any) -> None:
    """An EAGLE-3 head for a target, by training-time test over three steps."""
    _train("drafter", options)


@train.command("predictor")
@option("--target", type=click.Path(path_type=Path), help="Target checkpoint folder. Default: the embedded target.")
@option("--kind", type=click.Choice(("learned", "feature")), default="learned", help="What is trained.")
@option(
    "--drafter",
    type=click.Path(path_type=Path),
    help="With --kind feature: the EAGLE-3 head whose states are read. Default: the embedded one.",
)
@option(
    "--trace",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Trace of that target to train on, in place of a corpus; repeat it for several.",
)
@option(
    "--backbone",
    help="Pretrained causal LM to start from, folder or hub name; the learning rate is then 1e-5 where none is given.  "
    "[default: a fresh small one, at 2e-3]",
    show_default=False,
)
@option("--epochs", type=int, help="With --trace: most passes over its texts.  [default: 100]", show_default=False)
@option("--batch-size", type=int, help="With --trace: texts in a batch.  [default: 16]", show_default=False)
@option(
    "--patience",
    type=int,
    help="Evaluations without a better held-out overlap, after which to stop: one an epoch with --trace, every 50 "
    "steps with --corpus.  [default: 5 or 8]",
    show_default=False,
)
@option("--own-text", type=int, default=0, help="With --corpus: windows of the target's own text to train on as well.")
@train_options(steps=800, corpus_required=False)
def train_predictor(**options: Any) -> None:
    """An expert predictor of a target, and its token-frequency table."""
    _train("predictor", options)


train.add_command(train_acceptance)
cli.add_command(record)
cli.add_command(replay)


def _train(kind: str, options: dict[str, Any]) -> None:
    from ecospec.harness.app import quieten
    from ecospec.harness.training.command import train_command

    quieten()
    train_command(kind, options)


@cli.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("drafter", type=click.Path(path_type=Path))
@click.argument("predictors", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PREDICTOR...")
@option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@option("--widen", type=int, required=True, help="Widening factor to load the target with.")
@option("--report", type=click.Path(path_type=Path), help="report.json of a run with them, for the card.")
@option("--acceptance", type=click.Path(path_type=Path), help="Folder of acceptance estimators fitted for them.")
def bundle(
    target: Path,
    drafter: Path,
    predictors: tuple[Path, ...],
    output: Path,
    widen: int,
    report: Path | None,
    acceptance: Path | None,
) -> None:
    """Pack a trained target, drafter and predictors into one folder with its card."""
    from ecospec.harness.app import quieten
    from ecospec.harness.bundle import write_bundle

    quieten()
    write_bundle(target, drafter, predictors, output, widen=widen, report=report, acceptance=acceptance)


@cli.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.pass_context
def card(ctx: click.Context, folder: Path | None) -> None:
    """Make a bundle's card anew, measure its predictors' accuracy again, and say what does not agree.

    FOLDER is what bundle has written; by default the embedded model.
    """
    from ecospec.harness.app import card_command

    ctx.exit(card_command(folder))


cli.add_command(profile)
cli.add_command(report)
cli.add_command(compare)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2; a bug keeps its traceback."""
    try:
        several = process_count() > 1
    except UserError as error:
        _end(EXIT_USER, f"error: {error}")
    if several:
        from ecospec.harness.distributed import together

        together(_answer)
    _end(*_answer())


def _answer() -> tuple[int, str]:
    """Run the command: its exit code, and what is to be said of a user's mistake."""
    try:
        code = cli.main(standalone_mode=False, prog_name="ecospec-bench")
        return code if isinstance(code, int) else 0, ""
    except click.exceptions.Exit as error:
        return error.exit_code, ""
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    except click.ClickException as error:
        return EXIT_USER, f"error: {error.format_message()}"
    except UserError as error:
        return EXIT_USER, f"error: {error}"


def _end(code: int, line: str) -> NoReturn:
    if line:
        click.echo(f"ecospec-bench: {' '.join(line.split())}", err=True)
    sys.exit(code)
