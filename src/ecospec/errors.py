"""The one error that ends a command in one line and exit code 2.

A mistake of the user's (an unknown name, a missing file, a misfitting checkpoint, a plugin that breaks
its contract) is raised as `UserError`; the command line prints its message without a traceback. Any
other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 400
"""Characters of somebody else's error that a message repeats."""


class UserError(Exception):
    """What was wrong, what was expected and the nearest valid choice, in one line."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint such as ``did you mean 'marginal'?``, or the list of choices when none is close."""
    known = sorted(set(choices))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(known)})"
    return f"known: {', '.join(known) if known else 'none'}"


def one_line(error: BaseException) -> str:
    """An error's text on one line of bearable length, also where its own `__str__` fails."""
    try:
        text = " ".join(str(error).split())
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):  # the user's
            raise
        text = "an error without a text"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def blame(error: BaseException, own_file: str) -> str:
    """What somebody else's code raised and where, on one line: the innermost frame that is not ``own_file``'s."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if Path(frame.filename) != Path(own_file)]
    frame = (others or frames)[-1]
    return f"raised {type(error).__name__} ({Path(frame.filename).name}, line {frame.lineno}): {one_line(error)}"


@contextmanager
def blaming(what: str, kind: type[UserError], own_file: str) -> Iterator[None]:
    """Turn what somebody else's code raises in this block into an error of ours that names it.

    Its own `UserError`, the user's interrupt and a lack of memory pass.

    Args:
        what: begins the message, such as ``drafter 'mine'``.
        kind: the error that is raised instead.
        own_file: of the caller, whose frames are not to blame.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        if "can't allocate memory" in one_line(error):
            raise
        raise kind(f"{what} {blame(error, own_file)}") from error
