"""The hook by which policies reach the bench; a plugin marks its implementation with `hookimpl`."""

from __future__ import annotations

import pluggy

from ecospec.policies.contract import Policy

hookspec = pluggy.HookspecMarker("ecospec")
hookimpl = pluggy.HookimplMarker("ecospec")


@hookspec
def ecospec_policies() -> list[type[Policy]]:  # type: ignore[empty-body]
    """The policy classes that this plugin provides.

    Called once per command, before anything is measured. Return classes, not instances: the bench
    creates one from what the user typed, such as `--policy mine:strength=2`.
    """
