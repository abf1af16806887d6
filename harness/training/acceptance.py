"""Fitting acceptance estimators to recordings: the data and the fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.errors import UserError
from ecospec.harness.recording.folder import Recording, open_recording
from ecospec.harness.recording.pooling import folders_in
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance import isotonic, learned
from ecospec.predictors.acceptance.contract import along_paths, never_rising, sibling_ranks
from ecospec.predictors.acceptance.fitting import Examples, fit_weights
from ecospec.predictors.acceptance.folder import temperature_key
from ecospec.predictors.acceptance.judging import Judgement, judge
from ecospec.predictors.acceptance.learned import Floats, Weights

HELD_OUT_EVERY = 5
"""Every fifth prompt is held out: it judges what was fitted, and nothing is fitted to it."""
DRAFT = "draft"


@dataclass(frozen=True)
class Step:
    """One recorded tree of more than its root: what is known of its nodes, and which were accepted.

    Attributes:
        features: float32 [N, INPUTS] or None. rows: int64 [N], of the request's states.
    """

    depths: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]
    path_probs: FloatArray
    accepted: npt.NDArray[np.bool_]
    features: Floats | None
    rows: npt.NDArray[np.int64] | None


@dataclass
class Gathered:
    """The steps of some prompts at one temperature; ``states`` one array a prompt, ``owners`` which is a step's."""

    steps: list[Step] = field(default_factory=list)
    states: list[Floats] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    @property
    def with_states(self) -> bool:
        """Whether the drafter's states and entropies are there for every step."""
        return bool(self.steps) and len(self.owners) == len(self.steps)

    def nodes(self, name: str) -> np.ndarray:
        """One field of all nodes but the roots."""
        return np.concatenate([getattr(step, name)[1:] for step in self.steps])


@dataclass(frozen=True)
class Fitted:
    """What was fitted at one temperature, and how each estimator does on the prompts that were held out."""

    curves: dict[str, isotonic.Curve]
    weights: Weights | None
    judged: dict[str, Judgement]
    prompts: int
    held_out: int


@dataclass(frozen=True)
class FittedRecordings:
    """What was fitted to recordings of one target and drafter; the mappings are by temperature.

    Attributes:
        facts: ``target`` and ``drafter``, by which what was fitted knows them again.
        target, drafter: as the recordings were asked for them.
        prompts: keys of the prompts that it was fitted to or judged by, see `prompt_key`.
        suites: whose prompts these are.
    """

    facts: Mapping[str, Any]
    target: str
    drafter: str
    fitted: Mapping[str, Fitted]
    prompts: Mapping[str, frozenset[str]]
    suites: Mapping[str, tuple[str, ...]]

    def at(self, temperature: str) -> FittedRecordings:
        """The part of one temperature."""
        return replace(
            self,
            fitted={temperature: self.fitted[temperature]},
            prompts={temperature: self.prompts[temperature]},
            suites={temperature: self.suites[temperature]},
        )


def steps_of(request: RecordedRequest) -> Iterator[Step]:
    """Every recorded tree of more than its root."""
    known = request.entropies is not None and request.state_rows is not None
    for position in range(request.positions):
        tree = request.tree(position)
        if tree.size == 1:
            continue
        at = request.rows(position)
        entropies = None if request.entropies is None else request.entropies[at].astype(np.float64)
        yield Step(
            depths=tree.depths,
            ranks=sibling_ranks(tree),
            parents=tree.parents,
            path_probs=tree.path_probs,
            accepted=request.accepted(position, tree) == 1.0,
            features=learned.features_of(tree, entropies) if known and entropies is not None else None,
            rows=None if request.state_rows is None else request.state_rows[at].astype(np.int64),
        )


def gather(requests: Sequence[RecordedRequest]) -> Gathered:
    """The steps of some requests."""
    found = Gathered()
    for request in requests:
        steps = list(steps_of(request))
        found.steps += steps
        if request.states is not None and all(step.features is not None for step in steps):
            found.states.append(request.states.astype(np.float32))
            found.owners += [len(found.states) - 1] * len(steps)
    return found


def examples_of(gathered: Gathered) -> Examples:
    """The nodes whose parent was accepted."""
    features, rows, accepted = [], [], []
    starts = np.cumsum([0, *(len(each) for each in gathered.states)])
    for step, owner in zip(gathered.steps, gathered.owners, strict=True):
        assert step.features is not None
        assert step.rows is not None
        asked = np.flatnonzero(step.accepted[np.maximum(step.parents, 0)])
        asked = asked[asked > 0]
        features.append(step.features[asked])
        rows.append(step.rows[asked] + starts[owner])
        accepted.append(step.accepted[asked])
    return Examples(
        np.concatenate(features), np.concatenate(gathered.states), np.concatenate(rows), np.concatenate(accepted)
    )


def fit(prompts: Sequence[Sequence[RecordedRequest]], *, seed: int = 0) -> Fitted:
    """Fit all estimators to the recorded requests of one temperature.

    Args:
        prompts: the requests of each prompt, of which a recording may hold several; they are held out together.

    Raises:
        UserError: there are too few prompts to hold some out, or their outputs are too short.
    """
    if len(prompts) < 2 * HELD_OUT_EVERY:
        raise UserError(f"{len(prompts)} prompts to fit acceptance to; expected at least {2 * HELD_OUT_EVERY}")
    # A prompt without a tree of more than a root says nothing, so that it takes no place among those that do.
    useful = [each for each in prompts if any((request.sizes > 1).any() for request in each)]
    kept = [each for at, each in enumerate(useful) if at % HELD_OUT_EVERY]
    held_out = gather([request for at, each in enumerate(useful) if at % HELD_OUT_EVERY == 0 for request in each])
    own = gather([request for each in kept for request in each])
    if not own.steps or not held_out.steps:
        raise UserError("the recorded outputs are too short to fit acceptance to; expected more than one token each")
    curves = isotonic.fit_curves(*(own.nodes(name) for name in ("depths", "ranks", "path_probs", "accepted")))
    weights = None
    if own.with_states and held_out.with_states:
        stopping = [request for at, each in enumerate(kept) if at % HELD_OUT_EVERY == 0 for request in each]
        fitting = [request for at, each in enumerate(kept) if at % HELD_OUT_EVERY for request in each]
        if not stopping or not fitting:
            raise UserError("too many of the recorded outputs are a single token; expected more prompts to fit to")
        weights, _ = fit_weights(examples_of(gather(fitting)), examples_of(gather(stopping)), seed=seed)
    accepted = held_out.nodes("accepted")
    judged = {DRAFT: judge(held_out.nodes("path_probs"), accepted)}
    judged[isotonic.KIND] = judge(_by_curves(curves, held_out), accepted)
    if weights is not None:
        judged[learned.KIND] = judge(_by_weights(weights, held_out), accepted)
    return Fitted(curves, weights, judged, len(kept), len(useful) - len(kept))


def _by_curves(curves: Mapping[str, isotonic.Curve], gathered: Gathered) -> FloatArray:
    found = []
    for step in gathered.steps:
        nodes = zip(step.depths.tolist(), step.ranks.tolist(), step.path_probs.tolist(), strict=True)
        each = [curves.get(isotonic.curve_key(d, r), curves[isotonic.ALL])(prob) for d, r, prob in nodes]
        found.append(never_rising(step.parents, np.array(each))[1:])
    return np.concatenate(found)


def _by_weights(weights: Weights, gathered: Gathered) -> FloatArray:
    found = []
    for step, owner in zip(gathered.steps, gathered.owners, strict=True):
        assert step.features is not None
        assert step.rows is not None
        chances = learned.conditional(weights, step.features, gathered.states[owner], step.rows)
        found.append(along_paths(step.parents, chances)[1:])
    return np.concatenate(found)


def fit_recordings(folders: Sequence[Path], *, seed: int = 0) -> FittedRecordings:
    """Fit to every temperature that is recorded.

    Raises:
        UserError: the recordings are of different targets or drafters, or there are too few prompts.
    """
    recordings = [open_recording(each) for folder in folders for each in folders_in(folder)]
    facts = _shared_facts(recordings)
    requests: dict[str, dict[str, list[RecordedRequest]]] = {}
    suites: dict[str, list[str]] = {}
    for recording in recordings:
        key = temperature_key(float(recording.manifest["temperature"]))
        suites.setdefault(key, []).append(str(recording.manifest.get("suite")))
        for entry, request in recording.requests():
            requests.setdefault(key, {}).setdefault(entry.prompt, []).append(request)
    first = recordings[0].manifest
    return FittedRecordings(
        facts=facts,
        target=str(first.get("target")),
        drafter=str(first.get("drafter_spec")),
        fitted={key: fit(list(found.values()), seed=seed) for key, found in sorted(requests.items())},
        prompts={key: frozenset(found) for key, found in requests.items()},
        suites={key: tuple(dict.fromkeys(names)) for key, names in suites.items()},
    )


def _shared_facts(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Target and drafter of all recordings."""
    first = recordings[0].manifest
    facts = {"target": first.get("target_facts"), "drafter": first.get("drafter_facts")}
    for recording in recordings[1:]:
        for name, expected in facts.items():
            if recording.manifest.get(f"{name}_facts") != expected:
                raise UserError(
                    f"recording {recording.folder} is of another {name} than {recordings[0].folder}; expected one"
                )
    return facts
