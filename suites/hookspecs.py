"""The hook by which suites reach the bench; mark an implementation with `hookimpl`."""

from __future__ import annotations

from pathlib import Path

import pluggy

hookspec = pluggy.HookspecMarker("ecospec")
hookimpl = pluggy.HookimplMarker("ecospec")


@hookspec
def ecospec_suites() -> list[Path]:  # type: ignore[empty-body]
    """The task files of the suites that this plugin provides, each named after its ``task``.

    Called once per command, before anything is measured. A task file is an lm-eval YAML file with a
    ``metadata.columns``; a ``sample.jsonl`` beside it is its embedded sample.
    """
