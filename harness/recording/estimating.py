"""Estimates of acceptance for a replay that the recording does not hold: by what was fitted since, from the same places
as a run's. torch is imported only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ecospec.errors import UserError
from ecospec.harness.plugins import load_plugins
from ecospec.harness.recording.folder import Recording
from ecospec.harness.recording.replay import DRAFT
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.policies import DraftTree
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance.builtin import Isotonic, Learned, nothing_fitted
from ecospec.predictors.acceptance.contract import AcceptanceRequest, along_paths
from ecospec.predictors.contract import NodeStates
from ecospec.suites import EMBEDDED

if TYPE_CHECKING:
    from ecospec.predictors.acceptance.learned import Weights


@dataclass(frozen=True)
class FittedEstimator:
    """A fitted estimator over recorded trees.

    Attributes:
        label: what the estimates are called. note: where it was found, to go on from its name.
    """

    label: str
    note: str
    _estimate: Callable[[RecordedRequest, int, DraftTree], FloatArray]

    def added_to(self, request: RecordedRequest) -> RecordedRequest:
        """A request with this estimator's estimates besides the recorded ones.

        Raises:
            UserError: the recording lacks what it looks at.
        """
        trees = [request.tree(position) for position in range(request.positions)]
        found = [np.ones(1) if tree.size == 1 else self._estimate(request, at, tree) for at, tree in enumerate(trees)]
        joined = np.concatenate(found) if found else np.zeros(0)
        return replace(request, estimated={**request.estimated, self.label: joined})


def fitted_for(spec: str, recordings: Sequence[Recording]) -> FittedEstimator | None:
    """The estimator that a replay asks for and its recordings do not hold; None for one that they hold, and for one
    that is no fitted one of ours.

    Args:
        recordings: of one target, drafter and temperature.

    Raises:
        UserError: nothing is fitted for the recorded target, drafter and temperature, or it was fitted to a recorded
            prompt.
    """
    ours = spec.partition(":")[0] in (Isotonic.name, Learned.name)
    manifest = recordings[0].manifest
    if not ours or spec in (*manifest["estimators"], DRAFT):
        return None
    estimator = load_plugins().create_estimator(spec)
    if not isinstance(estimator, Isotonic | Learned):  # another's of that name
        return None
    from ecospec.harness.estimators import saved_of, shipped_with
    from ecospec.harness.loading import embedded_folder
    from ecospec.harness.manifest import checkpoint_hash
    from ecospec.predictors.acceptance import isotonic, weights
    from ecospec.predictors.acceptance.folder import read_folder

    temperature = float(manifest["temperature"])
    facts = [manifest.get(f"{name}_facts") or {} for name in ("target", "drafter")]
    folder: Path | None = estimator.path
    if folder is None and manifest["target"] == EMBEDDED:
        folder = shipped_with(embedded_folder() / "predictor", facts[1])
    if folder is None:
        saved = saved_of(estimator.name, facts[0], facts[1], temperature)
        if saved is None:
            raise nothing_fitted(estimator.name)
        folder = saved.folder
    fitted = read_folder(folder, *facts)
    entries = [entry for recording in recordings for entry in recording.entries]
    seen = [entry.id for entry in entries if entry.prompt in fitted.fitted_on]
    if seen:
        raise UserError(
            f"acceptance estimator {spec!r} was fitted to {len(seen)} of these {len(entries)} requests, such "
            f"as {seen[0]}; expected a recording of other prompts, or --acceptance draft"
        )
    note = f", fitted in {folder} (sha256 {checkpoint_hash(folder)[:12]})"
    if isinstance(estimator, Isotonic):
        bound = isotonic.BoundIsotonic(isotonic.from_json(fitted.section(isotonic.KIND, temperature), str(folder)))
        return FittedEstimator(spec, note, lambda _, __, tree: bound.estimate(AcceptanceRequest(tree, _no_states)))

    sizes: set[int] = set()
    for recording in recordings:
        states = next((each.states for _, each in recording.requests() if each.positions), None)
        if states is None:
            raise UserError(
                f"acceptance estimator {spec!r} reads the drafter's states, which recording {recording.folder} does "
                "not hold; expected one that was made with --states, or with this --acceptance"
            )
        sizes.add(states.shape[1])
    read = weights.read_weights(fitted, temperature, max(sizes))
    note += "; from the recorded states, which are rounded, so that a live run can select otherwise"
    return FittedEstimator(spec, note, lambda *step: _by_weights(read, *step))


def _by_weights(read: Weights, request: RecordedRequest, position: int, tree: DraftTree) -> FloatArray:
    from ecospec.predictors.acceptance.learned import conditional, features_of

    at = request.rows(position)
    if request.states is None or request.state_rows is None or request.entropies is None:
        raise UserError("a recorded request has no states or entropies; expected a drafter that keeps distributions")
    states = request.states[request.state_rows[at]].astype(np.float32)
    features = features_of(tree, request.entropies[at].astype(np.float64))
    return along_paths(tree.parents, conditional(read, features, states, np.arange(tree.size)))


def _no_states(tree: DraftTree) -> NodeStates:
    raise AssertionError("the isotonic estimator asks for no states")
