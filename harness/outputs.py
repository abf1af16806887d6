"""Whether what a command is to write can be written, asked before the work begins and without writing anything."""

from __future__ import annotations

import os
from pathlib import Path

from ecospec.errors import UserError


def check_folder(what: str, folder: Path) -> None:
    """Check that a folder can be made, or written into where it is there.

    Args:
        what: begins a message, such as ``--output runs/new``.

    Raises:
        UserError: something on its path is a file, or a folder that nothing can be written into.
    """
    try:
        nearest_there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest_there.is_dir():
            raise UserError(f"{what}: {nearest_there} is a file; expected a folder")
    except OSError as error:
        raise UserError(f"{what}: cannot be made ({error.strerror})") from error
    if not os.access(nearest_there, os.W_OK | os.X_OK):
        raise UserError(f"{what}: cannot be made (nothing can be written into {nearest_there})")


def check_file(what: str, path: Path) -> None:
    """Check that a file can be written, or replaced where it is there.

    Args:
        what: begins a message, such as ``--output out.json``.

    Raises:
        UserError: it is a folder, its own folder is not there, or it cannot be written.
    """
    try:
        if path.is_dir():
            raise UserError(f"{what}: a folder; expected a file to write")
        if not path.parent.is_dir():
            raise UserError(f"{what}: cannot be written (there is no folder {path.parent})")
        there = path.exists()
    except OSError as error:
        raise UserError(f"{what}: cannot be written ({error.strerror})") from error
    if not os.access(path if there else path.parent, os.W_OK):
        raise UserError(f"{what}: cannot be written (no permission)")
