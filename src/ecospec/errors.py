"""The one error that ends a command in one line and exit code 2.

A mistake of the user's (an unknown name, a missing file, a misfitting checkpoint, a plugin that breaks
its contract) is raised as `UserError`; the command line prints its message without a traceback. Any
other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was wrong, what was expected and the nearest valid choice, in one line."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint such as ``did you mean 'marginal'?``, or the list of choices when none is close."""
    known = sorted(set(choices))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(known)})"
    return f"known: {', '.join(known) if known else 'none'}"
