"""What tells a drafter from others of its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ecospec.harness.drafters.contract import Drafter
from ecospec.harness.manifest import folder_hash


def parameters_of(drafter: Drafter) -> dict[str, Any]:
    """Its parameters as JSON has them; in place of a folder a hash of it, so that it may lie anywhere."""
    kind: type = type(drafter)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {each.name: _plain(getattr(drafter, each.name)) for each in fields if each.init}


def _plain(value: Any) -> Any:
    found = folder_hash(value) if isinstance(value, Path) else None
    if found is not None:
        return found
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
