"""Options that a user has named and that nothing will use: they are checked all the same, and said to be unused."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.processes import process_rank
from ecospec.harness.resuming import GIVEN

if TYPE_CHECKING:
    from ecospec.harness.plugins import Plugins

SAMPLING = ("top_p", "top_k", "seed")


def named_options(ctx: click.Context) -> frozenset[str]:
    """The options that the user has given a value, on the command line or in a file; not what is a default."""
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) in GIVEN)


def unused_options(
    config: RunConfig, named: Collection[str], plugins: Plugins, temperatures: Sequence[float] = ()
) -> list[str]:
    """A line for each named option of a run that nothing uses.

    Args:
        named: the fields of ``config`` that the user has given a value.
        temperatures: those of several runs; by default the run's own.

    Raises:
        UserError: one of them is wrong, used or not: an unknown name, or a file that is not there or not readable.
    """
    from ecospec.harness.costs.saved import read_cost_model
    from ecospec.harness.preparing import create_policies, create_predictors
    from ecospec.policies import AcceptanceNeed, ExpertNeed

    policies = create_policies(plugins, (config.baseline, *config.policy))
    predictors = create_predictors(plugins, config.predictor)
    estimator = plugins.create_estimator(config.acceptance)
    unused = []
    if "cost_model" in named and config.cost_model is not None:
        if not config.resume:  # a run that is gone on with has its own
            read_cost_model(config.cost_model, "--cost-model")
        if not any(policy.needs_cost_model for policy in policies.values()):
            unused.append(_unused("--cost-model", str(config.cost_model), "weighs time", policies))
    if "predictor" in named and not any(policy.needs is ExpertNeed.PREDICTED for policy in policies.values()):
        for label, predictor in predictors.items():
            _check_path(f"--predictor {label}", predictor)
        unused.append(_unused("--predictor", ", ".join(predictors), "looks at predicted experts", policies))
    if "acceptance" in named and not any(policy.acceptance is AcceptanceNeed.ESTIMATED for policy in policies.values()):
        _check_path(f"--acceptance {config.acceptance}", estimator)
        unused.append(_unused("--acceptance", config.acceptance, "looks at estimates of acceptance", policies))
    return [*unused, *unused_sampling(config, named, temperatures)]


def unused_sampling(config: RunConfig, named: Collection[str], temperatures: Sequence[float] = ()) -> Iterator[str]:
    """A line for each option of sampling that was named where nothing is sampled."""
    if any(temperatures or (config.temperature,)):
        return
    for name in SAMPLING:
        if name in named:
            option = f"--{name.replace('_', '-')} {getattr(config, name)}"
            yield f"{option}: nothing is sampled at temperature 0; nothing uses it"


def say_unused(lines: Sequence[str]) -> None:
    """Say it on the terminal, once for all processes of a run."""
    if process_rank() == 0:
        for line in lines:
            print(f"ecospec-bench: note: {line}", file=sys.stderr, flush=True)


def _unused(option: str, value: str, does: str, policies: Collection[str]) -> str:
    return f"{option} {value}: no policy here {does} ({', '.join(policies)}); nothing uses it"


def _check_path(what: str, part: Any) -> None:
    """Check that the folder or file that a part would load from is there.

    Raises:
        UserError: it is not.
    """
    path = getattr(part, "path", None)
    try:
        if isinstance(path, Path) and not path.exists():
            raise UserError(f"{what}: {path} does not exist; expected a file or folder")
    except OSError as error:
        raise UserError(f"{what}: {path} is not readable ({error.strerror})") from error
