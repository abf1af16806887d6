"""A cost model that was reckoned from published figures and not measured, as a run or a replay can use it."""

from __future__ import annotations

from ecospec.errors import UserError
from ecospec.harness.costs.saved import SavedCostModel
from ecospec.harness.costs.words import drafting_name


def projected_for(saved: SavedCostModel, drafting: tuple[str, str | None, int, int], what: str) -> SavedCostModel:
    """A projection as a run with this drafter and tree size can use it: nothing that it lacks can be measured.

    Args:
        what: begins a message.

    Raises:
        UserError: it has steps of other drafters or tree sizes alone.
    """
    if not saved.draftings:
        return saved
    own = next((each for each in saved.draftings if each.is_for(drafting)), None)
    if own is None:
        has = "; ".join(drafting_name(each) for each in saved.draftings)
        spec, _, steps, top_k = drafting
        raise UserError(
            f"{what}: a projection, with steps of {has} alone; expected one with steps of {spec}, {steps} steps, "
            f"top-{top_k}, or with none"
        )
    return saved.narrowed(own)
