"""The command line: ``ecospec-bench``.

Only click is imported here; torch, transformers and lm-eval are imported when a command needs them, so that
``--help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import ecospec
from ecospec.errors import UserError, nearest
from ecospec.harness.config import CHECKS, RunConfig

EXIT_VIOLATED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130

F = TypeVar("F", bound=Callable[..., Any])

LISTS = ("policy", "suite", "batch_size")
"""Options that take several values."""
DEFAULTS = RunConfig(suite="", policy=())


def _read_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Take the defaults of all other options from a YAML file with the same keys."""
    if value is None:
        return None
    import yaml

    try:
        text = value.read_text(encoding="utf-8")
        raw, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {value}: not readable ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"--config {value}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(raw, dict) or not isinstance(tree, yaml.MappingNode):
        raise UserError(f"--config {value}: expected 'option: value' lines, found a {type(raw).__name__}")
    known = {p.name for p in ctx.command.params if isinstance(p, click.Option)} - {"config", "version"}
    values: dict[str, Any] = {}
    names = [str(key.value).replace("-", "_") for key, _ in tree.value]  # what a dict has already merged
    for key, entry in raw.items():
        name = str(key).replace("-", "_")
        if names.count(name) > 1:
            raise UserError(f"--config {value}: {key} is given {names.count(name)} times, expected once")
        if name not in known:
            shown = (k.replace("_", "-") for k in known if k)
            raise UserError(f"--config {value}: unknown key {key!r}; {nearest(str(key), shown)}")
        entries = entry if name in LISTS and isinstance(entry, list) else [entry]
        for each in entries:
            if not isinstance(each, str | int | float):
                kind = "empty" if each is None else f"a {type(each).__name__}"
                raise UserError(f"--config {value}: {key} is {kind}, expected one value")
        # As text, so that an option converts it, or refuses it, exactly as from the command line.
        texts = [str(each) for each in entries]
        values[name] = texts if name == "policy" else ",".join(texts)
    ctx.default_map = values
    return value


def _option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    return click.option(*names, show_default=kwargs.pop("show_default", True), **kwargs)


def _batch_sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Sizes separated by commas, each once; what is no integer is refused here, what is below 1 by the run."""
    parts = [part.strip() for part in value.split(",") if part.strip()]
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        sizes = []
    if not sizes:
        raise UserError(f"--batch-size {value}: expected an integer, or several separated by commas, such as 1,2,4")
    return tuple(dict.fromkeys(sizes))


def run_options(command: F) -> F:
    """The options of a run, in the order of ``--help``."""
    options = [
        _option("--suite", help="Benchmark suite such as gsm8k, several separated by commas, or all."),
        _option(
            "--policy",
            multiple=True,
            default=("marginal",),
            help="Selection policy NAME[:parameter=value,...]; repeat it, or separate several by commas.",
        ),
        _option("--baseline", default=DEFAULTS.baseline, help="Policy that the others are compared with."),
        _option("--predictor", default=DEFAULTS.predictor, help="Expert predictor NAME[:parameter=value,...]."),
        _option("--target", help="MoE checkpoint folder or hub name. Default: the embedded model."),
        _option("--drafter", help="EAGLE-3 head's folder. Default: the embedded one."),
        _option(
            "--data",
            help="'embedded', 'hub', or a JSONL or parquet file or folder in the data set's columns.  "
            "[default: embedded with the embedded target, else hub]",
        ),
        _option("--revision", help="With --data hub: branch, tag or commit of the data set.  [default: the newest]"),
        _option(
            "--limit",
            type=int,
            help="Run at most this many problems; a conversation is one.  [default: all]",
            show_default=False,
        ),
        _option("--max-new-tokens", type=int, default=DEFAULTS.max_new_tokens, help="Most tokens per output."),
        _option("--budget", type=int, default=DEFAULTS.budget, help="γ: tokens verified per step, root included."),
        _option("--draft-steps", type=int, default=DEFAULTS.draft_steps, help="Depth of the draft tree."),
        _option("--draft-topk", type=int, default=DEFAULTS.draft_topk, help="Children per expanded node."),
        _option(
            "--batch-size",
            default=str(DEFAULTS.batch_size),
            callback=_batch_sizes,
            help="Prompts decoded together; several sizes separated by commas are run one after another.",
        ),
        _option(
            "--chat-template",
            default=DEFAULTS.chat_template,
            help="auto, on or off: prompts as messages, by the target's chat template; auto is on where it has one.",
        ),
        _option("--thinking", default=DEFAULTS.thinking, help="auto, on or off, where the chat template can do both."),
        _option("--system-prompt", help="System message in front of every prompt of a chat model."),
        _option("--temperature", type=float, default=DEFAULTS.temperature, help="0 is greedy."),
        _option("--top-p", type=float, default=DEFAULTS.top_p, help="Nucleus sampling; 1 is off."),
        _option("--top-k", type=int, default=DEFAULTS.top_k, help="Top-k sampling; 0 is off."),
        _option("--seed", type=int, default=DEFAULTS.seed, help="Seed of the sampling noise."),
        _option("--widen", type=int, help="Widen the routed experts by this factor, function unchanged."),
        _option("--dtype", default=DEFAULTS.dtype, help="auto, float32, bfloat16 or float16."),
        _option("--device", default=DEFAULTS.device, help="auto, cpu, cuda or cuda:N."),
        _option("--threads", type=int, help="CPU threads.  [default: torch's]", show_default=False),
        _option(
            "--check",
            type=click.Choice(CHECKS),
            default=DEFAULTS.check,
            help="Prompts whose output is compared with plain decoding's.",
        ),
        _option(
            "--run-code", is_flag=True, help="Let code that the model wrote run here, to be scored.", show_default=False
        ),
        _option("--output", type=click.Path(path_type=Path), help="Run folder.  [default: runs/SUITE-TIME]"),
        _option("--resume", is_flag=True, help="Go on with the run in --output.", show_default=False),
        _option(
            "--config",
            type=click.Path(path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=_read_config,
            help="YAML file with these options as keys; the command line wins.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A run prints one table and leaves manifest.json, prompts.jsonl, report.json and report.md.",
)
@run_options
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
      ecospec-bench plugins
    """
    if ctx.invoked_subcommand is not None:
        return
    if options["suite"] is None:
        if len(sys.argv) <= 1:
            click.echo(ctx.get_help())
            return
        from ecospec.suites import suite_names

        raise UserError(f"no --suite given; known: {', '.join(suite_names())}")
    from ecospec.harness.app import run_command

    sizes: tuple[int, ...] = options["batch_size"]
    changed = {"policy": _policies(options["policy"]), "batch_size": sizes[0]}
    ctx.exit(run_command(RunConfig(**{**options, **changed}), sizes))


def _policies(given: tuple[Any, ...]) -> tuple[str, ...]:
    from ecospec.policies import split_specs

    return tuple(spec for text in given for spec in split_specs(str(text)))


@cli.command()
def plugins() -> None:
    """List policies and predictors with their parameters, and suites."""
    from ecospec.harness.app import plugins_command

    plugins_command()


@cli.group()
def train() -> None:
    """Train a target, a drafter or a predictor."""


def train_options(steps: int) -> Callable[[F], F]:
    """The options that all three trainings share."""

    def decorate(command: F) -> F:
        options = [
            _option("--corpus", required=True, type=click.Path(path_type=Path), help="JSONL(.gz) of text records."),
            _option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write."),
            _option("--steps", type=int, default=steps, help="Optimiser steps."),
            _option("--seconds", type=float, default=0.0, help="Stop after this long; 0 is no bound."),
            _option("--learning-rate", type=float, help="Peak learning rate.  [default: the recipe's]"),
            _option("--seed", type=int, default=0, help="Seed of weights and batches."),
            _option("--device", default="cpu", help="cpu or cuda."),
            _option("--threads", type=int, help="CPU threads.  [default: torch's]", show_default=False),
            _option("--resume", is_flag=True, help="Go on from the checkpoint in --output.", show_default=False),
        ]
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@train.command("target")
@train_options(steps=3000)
def train_target(**options: Any) -> None:
    """A small Qwen3-MoE with fine-grained experts, and its tokenizer."""
    from ecospec.harness.app import train_command

    train_command("target", options)


@train.command("drafter")
@_option("--target", required=True, type=click.Path(path_type=Path), help="Target checkpoint folder.")
@_option("--own-text", type=int, default=0, help="Windows of the target's own text to train on as well.")
@_option(
    "--start",
    type=click.Path(),
    default="",
    help="Folder of a head to go on from, its vocabulary kept.",
    show_default=False,
)
@train_options(steps=800)
def train_drafter(**options: Any) -> None:
    """An EAGLE-3 head for a target, by training-time test over three steps."""
    from ecospec.harness.app import train_command

    train_command("drafter", options)


@train.command("predictor")
@_option("--target", required=True, type=click.Path(path_type=Path), help="Target checkpoint folder.")
@train_options(steps=800)
def train_predictor(**options: Any) -> None:
    """The learned expert predictor of a target, and its token-frequency table."""
    from ecospec.harness.app import train_command

    train_command("predictor", options)


@cli.command()
@click.argument("parts", nargs=3, type=click.Path(path_type=Path), metavar="TARGET DRAFTER PREDICTOR")
@_option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@_option("--widen", type=int, required=True, help="Widening factor to load the target with.")
@_option("--report", type=click.Path(path_type=Path), help="report.json of a run with them, for the card.")
def bundle(parts: tuple[Path, Path, Path], output: Path, widen: int, report: Path | None) -> None:
    """Pack a trained target, drafter and predictor into one folder with its card."""
    from ecospec.harness.bundle import write_bundle

    write_bundle(*parts, output, widen=widen, report=report)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2; a bug keeps its traceback."""
    try:
        sys.exit(cli.main(standalone_mode=False, prog_name="ecospec-bench"))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("ecospec-bench: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message(), EXIT_USER)
    except UserError as error:
        _fail(str(error), EXIT_USER)


def _fail(message: str, code: int) -> None:
    click.echo(f"ecospec-bench: error: {' '.join(message.split())}", err=True)
    sys.exit(code)
