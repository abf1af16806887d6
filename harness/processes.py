"""How many processes run this command together, as the launcher (``torchrun``) tells them by the environment.

Imports no torch: the command line asks before anything is loaded.
"""

from __future__ import annotations

import os

from ecospec.errors import UserError


def process_count() -> int:
    """Processes that run this command together; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def process_rank() -> int:
    """Which of them this is; 0 writes the run folder and speaks to the user."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Which of those on this machine this is."""
    return _number("LOCAL_RANK", 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} in the environment: expected an integer, as torchrun sets it") from None
