"""``ecospec-bench profile``: what verification costs on this device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ecospec.harness.cli_options import RUN_OPTIONS, option, run_options
from ecospec.harness.config import RunConfig

OPTIONS = (
    *("target", "target_revision", "trust_remote_code", "drafter", "drafter_revision"),
    *("draft_steps", "draft_topk", "budget", "chat_template", "thinking", "system_prompt"),
    *("widen", "dtype", "device", "device_map", "max_memory", "offload_folder", "threads"),
)
"""Of a run's options, those that a profile has too."""


@click.command()
@run_options(*set(RUN_OPTIONS).difference(OPTIONS))
@option("--predictor", multiple=True, help="Expert predictor whose time to measure; with the embedded model its own.")
@option("--suite", default="gsm8k,humaneval,mtbench", help="Suites whose texts are decoded, separated by commas.")
@option("--data", default="embedded", help="'embedded', 'hub', or a file or folder in the suite's columns.")
@option("--max-tokens", type=int, default=16, help="Most tokens of a pass.")
@option("--context", type=int, help="Tokens in the KV memory.  [default: 200]", show_default=False)
@option("--rounds", type=int, default=25, help="How often every pass is measured.")
@option("--max-new-tokens", type=int, default=48, help="Most tokens per output of the real decodes.")
@option("--output", type=click.Path(path_type=Path), help="Folder of the profile.  [default: runs/profile-TIME]")
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    predictor: tuple[str, ...],
    suite: str,
    max_tokens: int,
    context: int | None,
    rounds: int,
    **options: Any,
) -> None:
    """Measure what verification costs on this device, and save it for the policies that weigh costs.

    Routing is forced, so that the number of active experts varies independently of the number of tokens. The folder
    gets profile.md, profile.json and the plots; the fitted model is saved for later runs of this target and device.
    """
    from ecospec.harness.app import quieten
    from ecospec.harness.costs.command import Asked, profile_command
    from ecospec.policies import split_specs

    quieten()
    specs = tuple(spec for text in predictor for spec in split_specs(text))
    config = RunConfig(suite="", policy=("confidence",), predictor=specs, **options)
    names = tuple(name.strip() for name in suite.split(",") if name.strip())
    ctx.exit(profile_command(config, Asked(names, max_tokens, context, rounds)))
