"""Writing so that a kill at any moment leaves the old file or the new one, and one process in a folder at a time.

A file that is replaced is first written whole beside itself; a file that grows gets each of its records in one write
with a newline at its end, so that what a kill has cut is the last line and has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ecospec.errors import UserError

PARTIAL = ".partial"
LOCK = ".lock"
"""Stays in the folder: to remove it would let two processes hold a lock each."""


def write_text(path: Path, text: str) -> None:
    """Write a file, or replace it, as a whole.

    Raises:
        UserError: it cannot be written; what was there is still there.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder; expected a file to write")
    # The process's own, so that of two that write one file each renames what it has written.
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        try:
            _write(partial, text, os.O_TRUNC)
            os.replace(partial, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as a whole.

    Raises:
        UserError: see `write_text`.
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def append_text(path: Path, text: str) -> None:
    """Append to a file and wait until it is on the disk.

    Args:
        text: whole lines.

    Raises:
        UserError: it cannot be written; its last line can then be cut short.
    """
    try:
        _write(path, text, os.O_APPEND)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _write(path: Path, text: str, how: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)
    try:
        rest = memoryview(text.encode("utf-8"))
        while rest:  # one call, but for a full disk or a signal
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: it cannot be opened.
    """
    if os.name != "posix" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def is_leftover(path: Path) -> bool:
    """Whether a file is of this module's own: the lock, or what a kill has left half-written."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(PARTIAL))


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing but `is_leftover`.

    Raises:
        OSError: it cannot be read, or is no folder.
    """
    return all(is_leftover(path) for path in folder.iterdir())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out of an existing folder; a kill frees it.

    What an earlier process has left half-written is removed.

    Raises:
        UserError: another process is in it, or no file can be made in it.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another process is running in it; expected one at a time") from None
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{folder}: cannot be locked ({error})") from error
    try:
        for path in list(folder.iterdir()):
            if is_leftover(path) and path.name != LOCK:
                path.unlink()
        yield
    finally:
        lock.release()
