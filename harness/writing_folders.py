"""Writing a folder of several files so that a kill at any moment leaves the old ones or the new ones, never a mixture.

A folder cannot be replaced in one call: the old one is moved aside first, and until the new one has its name a reader
takes the old one from there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ecospec.errors import UserError
from ecospec.harness.writing import LOCK, sync

PATIENCE_SECONDS = 60.0
"""How long a writer waits for another; a folder is written in far less."""


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder, or replace it, as a whole; its parent is made where it is missing.

    Args:
        fill: writes the files into the empty folder that it is given.

    Raises:
        UserError: it cannot be written, and what was there is still there; another process has been writing into the
            same parent for a minute.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / LOCK, timeout=PATIENCE_SECONDS):
            _settle(path)
            new = _new(path)
            new.mkdir()
            try:
                fill(new)
                for each in [*new.iterdir(), new]:
                    sync(each)
                if path.exists():
                    os.rename(path, _old(path))
                os.rename(new, path)
                sync(path.parent)
            finally:
                _settle(path)
    except Timeout:
        raise UserError(f"{path.parent}: another process is writing there; expected one at a time") from None
    except (OSError, NotImplementedError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path}: cannot be written ({why})") from error


def found_folder(path: Path) -> Path | None:
    """Where the files of a folder that `write_folder` writes are now; None where there are none.

    Raises:
        OSError: it cannot be looked at.
    """
    return next((each for each in (path, _old(path)) if each.is_dir()), None)


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _settle(path: Path) -> None:
    """Put away what a kill, or an error, has left beside a folder; whoever calls has the lock."""
    if _new(path).exists():
        shutil.rmtree(_new(path))
    if _old(path).exists() and path.exists():  # else it is still the one that is read
        shutil.rmtree(_old(path))
