"""The hook by which acceptance estimators reach the bench."""

from __future__ import annotations

import pluggy

from ecospec.predictors.acceptance.contract import AcceptanceEstimator

hookspec = pluggy.HookspecMarker("ecospec")


@hookspec
def ecospec_estimators() -> list[type[AcceptanceEstimator]]:  # type: ignore[empty-body]
    """The acceptance estimator classes that this plugin provides.

    Called once per command, before anything is measured. Return classes, not instances: the bench creates one from
    what the user typed, such as `--acceptance mine:strength=2`.
    """
