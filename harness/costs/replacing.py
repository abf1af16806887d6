"""What is said before a cost model is put into the store in the place of another."""

from __future__ import annotations

from ecospec.errors import UserError
from ecospec.harness.costs.saved import SavedCostModel
from ecospec.harness.costs.store import VARIABLE, find_cost_model, path_of, store_folder
from ecospec.harness.outputs import check_folder


def check_store() -> None:
    """Check that a cost model can be saved, before one is measured.

    Raises:
        UserError: it cannot.
    """
    check_folder(f"cost models {store_folder()} (another place: ${VARIABLE})", store_folder())


def replaced_by(saved: SavedCostModel) -> str | None:
    """In one line, what is saved where this model is to be saved, and which of the two fits better.

    None where nothing is there yet.
    """
    try:
        before = find_cost_model(saved.key)
    except UserError:
        return f"it replaces a damaged file: {path_of(saved.key)}"
    if before is None:
        return None
    line = (
        f"it replaces the cost model measured {before.measured or 'before'}: R² was {_digits(before.fit.r_squared)} "
        f"and is {_digits(saved.fit.r_squared)} now"
    )
    kept = [each for each in before.draftings if not any(each.is_for(own.identity) for own in saved.draftings)]
    if kept:
        line += f"; steps of {len(kept)} other drafters or tree sizes are measured again when they are needed"
    return line


def _digits(share: float | None) -> str:
    return "not known" if share is None else f"{share:.4f}"
