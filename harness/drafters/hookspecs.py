"""The hook by which drafters reach the bench; mark an implementation with `ecospec.policies.hookimpl`."""

from __future__ import annotations

from ecospec.policies.hookspecs import hookspec


@hookspec
def ecospec_drafters() -> list[type]:  # type: ignore[empty-body]
    """The drafter classes that this plugin provides.

    Called once per command, before anything is measured. Return classes, not instances, and import
    torch only when one is bound: listing the installed plugins must stay instant.
    """
