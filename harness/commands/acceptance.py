"""``ecospec-bench train acceptance``."""

from __future__ import annotations

from pathlib import Path

import click

from ecospec.errors import UserError

MOST_THREADS = 1024


@click.command("acceptance")
@click.option(
    "--recording",
    "recordings",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder that 'ecospec-bench record' wrote, or one of several of them; repeat it for more.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write, to be named by --acceptance NAME:path=FOLDER.  [default: beside the saved cost models, "
    "where runs of this target and drafter find it]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and batches.")
@click.option("--threads", type=int, help="CPU threads.  [default: torch's]")
def train_acceptance(recordings: tuple[Path, ...], output: Path | None, seed: int, threads: int | None) -> None:
    """Acceptance estimators, isotonic and learned, fitted to recorded steps.

    One fit for every temperature that was recorded. The learned one needs a recording with --states.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: expected an integer from 0 to 2^63 - 1")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UserError(f"--threads {threads}: expected an integer from 1 to {MOST_THREADS}")
    from ecospec.harness.training.acceptance_files import check_place

    check_place(output)
    import torch

    from ecospec.harness.estimators import shipped_with
    from ecospec.harness.loading import embedded_folder
    from ecospec.harness.training.acceptance import fit_recordings
    from ecospec.harness.training.acceptance_card import card_text
    from ecospec.harness.training.acceptance_files import save, write_into
    from ecospec.suites import EMBEDDED

    if threads is not None:
        torch.set_num_threads(threads)
    found = fit_recordings(recordings, seed=seed)
    if output is not None:
        write_into(output, found)
    saved = {} if output is not None else save(found)
    click.echo(card_text(found), nl=False)
    missing = [key for key, each in found.fitted.items() if each.weights is None]
    if missing:
        click.echo(f"no learned estimator at temperature {', '.join(missing)}: recorded without the drafter's states")
    if output is not None:
        click.echo(f"in {output}: --acceptance {'isotonic' if missing else 'learned'}:path={output}")
    shipped = found.target == EMBEDDED and shipped_with(embedded_folder() / "predictor", found.facts["drafter"])
    for key, folder in saved.items():
        names = "isotonic" if key in missing else "learned, the default, or isotonic"
        how = f"runs of this target and drafter at temperature {key} find it by --acceptance {names}"
        if shipped:  # which comes first
            how = (
                f"the embedded target has its own, so name this by --acceptance {names.partition(',')[0]}:path={folder}"
            )
        click.echo(f"saved in {folder}: {how}")
