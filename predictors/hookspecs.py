"""The hook by which expert predictors reach the bench; mark an implementation with `hookimpl`."""

from __future__ import annotations

from ecospec.policies.hookspecs import hookspec


@hookspec
def ecospec_predictors() -> list[type]:  # type: ignore[empty-body]
    """The predictor classes that this plugin provides.

    Called once per command, before anything is measured. Return classes, not instances, and import
    torch only when one is created: listing the installed plugins must stay instant.
    """
