"""``ecospec-bench train acceptance``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("acceptance")
@click.option(
    "--recording",
    "recordings",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder that 'ecospec-bench record' wrote; repeat it for several.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and batches.")
def train_acceptance(recordings: tuple[Path, ...], output: Path, seed: int) -> None:
    """Acceptance estimators, isotonic and learned, fitted to recorded steps.

    One fit for every temperature that was recorded. The learned one needs a recording with --states.
    """
    from ecospec.harness.training.acceptance import fit_recordings
    from ecospec.predictors.acceptance.folder import CARD

    fitted = fit_recordings(recordings, output, seed=seed)
    click.echo((output / CARD).read_text(encoding="utf-8"), nl=False)
    missing = [key for key, each in fitted.items() if each.weights is None]
    if missing:
        click.echo(f"no learned estimator at temperature {', '.join(missing)}: recorded without the drafter's states")
    best = "isotonic" if missing else "learned"
    click.echo(f"in {output}: --acceptance {best}:path={output}")
