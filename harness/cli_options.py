"""The options of the commands, each declared once; a command takes those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ecospec.errors import UserError
from ecospec.harness.config import CHECKS, RunConfig
from ecospec.harness.grid import grid_path
from ecospec.harness.option_file import take_defaults
from ecospec.harness.resuming import NO_FOLDER

F = TypeVar("F", bound=Callable[..., Any])
N = TypeVar("N", int, float)

LISTS = ("suite", "batch_size")
"""Options of a run that take several values in one text, separated by commas."""
INTEGERS = "an integer, or several separated by commas, such as 1,2,4"
DEFAULTS = RunConfig(suite="", policy=())


def _read_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Take the defaults of all other options from a YAML file with the same keys."""
    if value is not None:
        take_defaults(ctx, f"--config {value}", value, joined=LISTS)
    return value


def _read_grid(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Take the defaults of all options from a grid."""
    if value is not None:
        take_defaults(ctx, f"grid {value}", grid_path(value))
    return value


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    return click.option(*names, show_default=kwargs.pop("show_default", True), **kwargs)


def _numbers(option: str, text: str, kind: type[N], expected: str) -> tuple[N, ...]:
    """Numbers separated by commas, each once; what is none is refused here, what no run can have by the run."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        numbers = [kind(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers:
        raise UserError(f"{option} {text}: expected {expected}")
    return tuple(dict.fromkeys(numbers))


def _batch_sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    return _numbers("--batch-size", value, int, INTEGERS)


def spec_texts(given: Sequence[Any]) -> tuple[str, ...]:
    """The specs in what a repeatable option was given, each possibly several separated by commas."""
    from ecospec.policies import split_specs

    return tuple(spec for text in given for spec in split_specs(str(text)))


def integers(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[int, ...]:
    return _numbers(parameter.opts[0], ",".join(value), int, INTEGERS)


def _floats(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[float, ...]:
    return _numbers(parameter.opts[0], ",".join(value), float, "a number, or several separated by commas, such as 0,1")


_RUN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option("--suite", help="Benchmark suite such as gsm8k, several separated by commas, or all."),
    option(
        "--policy",
        multiple=True,
        default=("marginal",),
        help="Selection policy NAME[:parameter=value,...]; repeat it, or separate several by commas.",
    ),
    option("--baseline", default=DEFAULTS.baseline, help="Policy that the others are compared with."),
    option(
        "--predictor",
        multiple=True,
        default=DEFAULTS.predictor,
        help="Expert predictor NAME[:parameter=value,...]; with several, policies that use one are run with each.",
    ),
    option(
        "--acceptance",
        default=DEFAULTS.acceptance,
        help="Acceptance estimator NAME[:parameter=value,...], for policies that look at one; draft does without.",
    ),
    option(
        "--cost-model",
        type=click.Path(path_type=Path),
        help="Cost model for policies that need one.  [default: the saved one, which is measured first if need be]",
    ),
    option("--target", help="MoE checkpoint folder or hub name. Default: the embedded model."),
    option("--target-revision", help="Of a target on the hub: branch, tag or commit.  [default: the newest]"),
    option(
        "--drafter",
        help="EAGLE-3 head's folder or hub name, or NAME[:parameter=value,...]: mtp, lm:path=FOLDER, ngram. "
        "Default: the embedded head.",
    ),
    option("--drafter-revision", help="Of a drafter on the hub: branch, tag or commit.  [default: the newest]"),
    option(
        "--trust-remote-code",
        is_flag=True,
        help="Let Python files of the target's checkpoint run, where transformers does not know its model.",
        show_default=False,
    ),
    option(
        "--data",
        help="'embedded', 'hub', or a JSONL or parquet file or folder in the data set's columns.  "
        "[default: embedded with the embedded target, else hub]",
    ),
    option("--revision", help="With --data hub: branch, tag or commit of the data set.  [default: the newest]"),
    option(
        "--limit",
        type=int,
        help="Run at most this many problems; a conversation is one.  [default: all]",
        show_default=False,
    ),
    option("--max-new-tokens", type=int, default=DEFAULTS.max_new_tokens, help="Most tokens per output."),
    option("--budget", type=int, default=DEFAULTS.budget, help="γ: tokens verified per step, root included."),
    option("--draft-steps", type=int, default=DEFAULTS.draft_steps, help="Depth of the draft tree."),
    option("--draft-topk", type=int, default=DEFAULTS.draft_topk, help="Children per expanded node."),
    option(
        "--batch-size",
        default=str(DEFAULTS.batch_size),
        callback=_batch_sizes,
        help="Prompts decoded together; several sizes separated by commas are run one after another.",
    ),
    option(
        "--chat-template",
        default=DEFAULTS.chat_template,
        help="auto, on or off: prompts as messages, by the target's chat template; auto is on where it has one.",
    ),
    option("--thinking", default=DEFAULTS.thinking, help="auto, on or off, where the chat template can do both."),
    option("--system-prompt", help="System message in front of every prompt of a chat model."),
    option("--temperature", type=float, default=DEFAULTS.temperature, help="0 is greedy."),
    option("--top-p", type=float, default=DEFAULTS.top_p, help="Nucleus sampling; 1 is off."),
    option("--top-k", type=int, default=DEFAULTS.top_k, help="Top-k sampling; 0 is off."),
    option("--seed", type=int, default=DEFAULTS.seed, help="Seed of the sampling noise."),
    option("--widen", type=int, help="Widen the routed experts by this factor, function unchanged."),
    option("--dtype", default=DEFAULTS.dtype, help="auto, float32, bfloat16 or float16."),
    option("--device", default=DEFAULTS.device, help="auto, cpu, cuda or cuda:N."),
    option(
        "--device-map",
        help="Spread a large target over all devices: auto, balanced, sequential, or a JSON file of module: device.",
    ),
    option("--max-memory", help="With --device-map: most memory by device, such as 0=70GiB,cpu=200GiB."),
    option("--offload-folder", help="With --device-map: where weights go for which no memory is left."),
    option(
        "--parallel",
        help="Under torchrun: tensor or expert, how the target is split over the processes.  [default: tensor]",
        show_default=False,
    ),
    option("--threads", type=int, help="CPU threads.  [default: torch's]", show_default=False),
    option(
        "--check",
        type=click.Choice(CHECKS),
        default=DEFAULTS.check,
        help="Prompts whose output is compared with plain decoding's.",
    ),
    option(
        "--run-code", is_flag=True, help="Let code that the model wrote run here, to be scored.", show_default=False
    ),
    option(
        "--output",
        type=click.Path(path_type=Path),
        help="Run folder.  [default: runs/SUITE-TIME, or runs/several-TIME]",
    ),
    option(
        "--resume",
        metavar="[RUN]",
        is_flag=False,
        flag_value=NO_FOLDER,
        help="Go on with a run folder, with the options that it was begun with. Without a folder: with that of "
        "--output, the whole command given again.",
        show_default=False,
    ),
    option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="YAML file with these options as keys; the command line wins.",
    ),
)


def _value_name(add: Callable[[Any], Any]) -> str | None:
    """The name of the value that an option's decorator gives to a command."""

    def command() -> None:
        """Takes the option."""

    parameter: click.Parameter = add(command).__click_params__[0]
    return parameter.name


RUN_OPTIONS = tuple(_value_name(add) for add in _RUN_OPTIONS)
"""The names of the values of all options of a run."""

DOCTOR_OPTIONS = (
    *("policy", "predictor", "target", "target_revision", "drafter", "drafter_revision", "trust_remote_code"),
    *("batch_size", "widen", "dtype", "device"),
)
"""Of these, the ones that decide whether parts fit."""


def run_options(*left_out: str | None) -> Callable[[F], F]:
    """The options of a run in the order of ``--help``, but those that are left out, by the names of their values."""
    return _decorator([add for add, name in zip(_RUN_OPTIONS, RUN_OPTIONS, strict=True) if name not in left_out])


_AXIS_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option("--suite", multiple=True, help="Suites such as gsm8k, or all."),
    option(
        "--budget",
        multiple=True,
        default=(str(DEFAULTS.budget),),
        callback=integers,
        help="γ: tokens verified per step, root included.",
    ),
    option(
        "--batch-size",
        multiple=True,
        default=(str(DEFAULTS.batch_size),),
        callback=integers,
        help="Prompts decoded together.",
    ),
    option(
        "--temperature",
        multiple=True,
        default=(f"{DEFAULTS.temperature:g}",),
        callback=_floats,
        help="0 is greedy.",
    ),
    option(
        "--output",
        type=click.Path(path_type=Path),
        help="Folder of the sweep; an earlier one is gone on with.  [default: runs/sweep-TIME]",
    ),
    click.argument("grid", required=False, is_eager=True, callback=_read_grid),
)
"""What a sweep takes several of, and what it has in place of a run's own."""


def sweep_options() -> Callable[[F], F]:
    """The options of a run, its axes open to several values; a grid takes the place of ``--config``."""
    own = {_value_name(add): add for add in _AXIS_OPTIONS}
    return _decorator(
        [
            own.pop(name) if (name := _value_name(add)) in own else add
            for add in _RUN_OPTIONS
            if _value_name(add) not in ("resume", "config")
        ]
        + [own["grid"]]
    )


def _decorator(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def train_options(steps: int, *, corpus_required: bool = True) -> Callable[[F], F]:
    """The options that all three trainings share; ``steps`` are the recipe's."""

    return _decorator(
        [
            option(
                "--corpus",
                required=corpus_required,
                type=click.Path(path_type=Path),
                help="JSONL(.gz) of text records.",
            ),
            option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write."),
            option("--steps", type=int, help=f"Optimiser steps.  [default: {steps}]", show_default=False),
            option("--seconds", type=float, default=0.0, help="Stop after this long; 0 is no bound."),
            option("--learning-rate", type=float, help="Peak learning rate.  [default: the recipe's]"),
            option("--seed", type=int, default=0, help="Seed of weights and batches."),
            option("--device", default="cpu", help="cpu or cuda."),
            option("--threads", type=int, help="CPU threads.  [default: torch's]", show_default=False),
            option("--resume", is_flag=True, help="Go on from the checkpoint in --output.", show_default=False),
        ]
    )
