"""Whether what is read of a recording can have been recorded: a file may have been damaged, or edited by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter

from ecospec.harness.recording.steps import RecordedRequest, Routing

DTYPES = {
    **dict.fromkeys(("tokens", "sizes", "node_tokens", "parents", "choices", "state_rows"), ("int32",)),
    **{"probs": ("float64",), "entropies": ("float32",), "states": ("float16",), "routing": ("uint8", "uint16")},
}
"""What type the arrays of a request have."""

OUTPUT = "the output's token at every root"
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class _Geometry:
    """Of the recorded target, what a replay reckons with."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)

    moe_layers: Count
    experts: Count
    top_k: Count


@dataclass(frozen=True)
class _Manifest:
    """What a reader of a recording relies on; a manifest has more."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)

    suite: str
    target: str
    widened: Count
    target_sha256: str
    target_facts: dict[str, Any]
    dtype: str
    geometry: _Geometry
    drafter_spec: str
    drafter_sha256: str | None
    drafter_facts: dict[str, Any]
    draft_steps: Count
    draft_topk: Count
    temperature: Annotated[float, Field(ge=0)]
    outputs: Annotated[int, Field(ge=0)]
    predictors: list[str]
    estimators: list[str]
    states: bool
    estimators_sha256: list[str | None] | None = None
    estimators_folders: list[str | None] | None = None


_MANIFEST = TypeAdapter(_Manifest)


def check_manifest(text: str) -> None:
    """Check that a manifest says all that a reader relies on.

    Args:
        text: as JSON.

    Raises:
        ValidationError: something is missing, or of another type.
    """
    _MANIFEST.validate_json(text)


def check_request(request: RecordedRequest) -> None:
    """Check that the arrays of a request are draft trees along an output.

    Raises:
        ValueError: they are not; the text says in what.
    """
    named: list[tuple[str, tuple[str, ...], Any]] = [
        *((name, kinds, getattr(request, name)) for name, kinds in DTYPES.items()),
        *((f"predicted by {name}", DTYPES["routing"], array) for name, array in request.predicted.items()),
        *((f"estimated by {name}", ("float64",), array) for name, array in request.estimated.items()),
    ]
    for name, kinds, array in named:
        if array is not None and array.dtype.name not in kinds:
            raise ValueError(f"{name} is {array.dtype}, expected {' or '.join(kinds)}")
    starts = np.cumsum(request.sizes) - request.sizes
    within = np.arange(len(request.parents)) - np.repeat(starts, request.sizes)
    root = within == 0
    parents, probs = request.parents, request.probs
    misplaced = np.where(root, parents != -1, (parents < 0) | (parents >= within))
    _refuse("parents", parents, misplaced, "-1 for a root, and else a node before its children")
    _refuse("probs", probs, _no_probability(probs) | (root & (probs != 1.0)), "probabilities, 1 for roots")
    for name in ("tokens", "node_tokens", "choices"):
        _refuse(name, getattr(request, name), getattr(request, name) < 0, "token ids")
    _refuse("node_tokens", request.node_tokens[root], request.node_tokens[root] != request.tokens[:-1], OUTPUT)
    _refuse("choices", request.choices[root], request.choices[root] != request.tokens[1:], OUTPUT)
    for label, estimated in request.estimated.items():
        wrong = _no_probability(estimated) | (root & (estimated != 1.0))
        _refuse(f"estimated by {label}", estimated, wrong, "probabilities, 1 for roots")
    if request.entropies is not None:
        no_entropy = ~((request.entropies >= 0) & np.isfinite(request.entropies))
        _refuse("entropies", request.entropies, no_entropy, "numbers of at least 0")
    if (request.states is None) != (request.state_rows is None):
        raise ValueError("states without state_rows, or the other way round")
    if request.states is not None and request.state_rows is not None:
        if request.states.ndim != 2 or not np.isfinite(request.states).all():
            raise ValueError("states are no table of finite numbers")
        rows = request.state_rows
        _refuse("state_rows", rows, (rows < 0) | (rows >= len(request.states)), f"rows of {len(request.states)}")
    for name, routing in _routings(request):
        if not (routing[:, :, 1:] > routing[:, :, :-1]).all():
            raise ValueError(f"{name} has an expert twice in one layer, or not in ascending order")


def check_belongs(request: RecordedRequest, manifest: Mapping[str, Any]) -> None:
    """Check that a request is one of the recording with this manifest, which has been checked.

    Raises:
        ValueError: it is of another target, or lacks something that was recorded.
    """
    geometry = manifest["geometry"]
    for name, routing in _routings(request):
        shape = (geometry["moe_layers"], geometry["top_k"])
        if (routing.shape[0], routing.shape[2]) != shape:
            raise ValueError(f"{name} is of {routing.shape[0]} layers and K = {routing.shape[2]}, expected {shape}")
        if routing.size and int(routing.max()) >= geometry["experts"]:
            raise ValueError(f"{name} names expert {routing.max()}, expected less than {geometry['experts']}")
    if not request.positions:  # nothing was asked for at no position
        return
    for kind, recorded in (("predictors", request.predicted), ("estimators", request.estimated)):
        if set(recorded) != set(manifest[kind]):
            raise ValueError(f"it has the {kind} {sorted(recorded)}, expected {sorted(manifest[kind])}")
    if manifest["states"] and request.states is None:
        raise ValueError("it lacks the drafter's states")


def _routings(request: RecordedRequest) -> list[tuple[str, Routing]]:
    return [("routing", request.routing), *((f"predicted by {name}", each) for name, each in request.predicted.items())]


def _no_probability(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return ~((values >= 0.0) & (values <= 1.0))  # also true for nan


def _refuse(name: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(f"{name} has {values[at]} at {at}, expected {expected}")
