"""A measured cost model as it lies on disk: what was measured, on what, and how far to trust it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ecospec.errors import UserError, nearest
from ecospec.harness.checked import first_problem
from ecospec.policies import CostModel

SCHEMA = 1
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How a file is read: nothing that is not asked for, no number out of a text."""


@dataclass(frozen=True)
class CostKey:
    """What a measurement holds for: it is refused where one of these differs.

    Attributes:
        device: its name; ``kind`` is cpu or cuda.
        threads: of a CPU; None on a GPU.
        checkpoint_sha256: of the target's folder.
        widened: factor by which the routed experts are widened.
        unpacked: the quantisation that the weights have on disk but not in memory.
        placement: how a target in parts is spread; None for one that is whole.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: str
    kind: str
    threads: int | None
    dtype: str
    checkpoint_sha256: str
    widened: int
    unpacked: str | None
    placement: str | None
    torch: str
    transformers: str
    ecospec: str

    def difference(self, other: CostKey) -> str | None:
        """In words, the first thing that ``other`` does not share; None where they are equal."""
        for each in dataclasses.fields(self):
            own, its = getattr(self, each.name), getattr(other, each.name)
            if own != its:
                return f"{each.name} = {own!r}, now it is {its!r}"
        return None


@dataclass(frozen=True)
class Interval:
    """The 95 % confidence interval of a coefficient, in seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    low: float
    high: float


@dataclass(frozen=True)
class Coefficient:
    """A number of seconds that was fitted.

    Attributes:
        seconds: at least 0, as it is used.
        standard_error, interval: of the unbounded least-squares fit; None where there are no degrees of freedom, and
            in a projection.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    seconds: float
    standard_error: float | None = None
    interval: Interval | None = None

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval lies above 0."""
        return self.interval is not None and self.interval.low > 0


@dataclass(frozen=True)
class Fit:
    """T_verify = fixed + pair · (unique (layer, expert) pairs) + token · tokens.

    Attributes:
        r_squared: 1 − Σ residual² / Σ (T − mean T)² over the cells that were fitted; None in a projection.
        held_out_error: the largest |T − model| / T over the cells that were left out of the fit; None without any.
        text_error: T / model − 1 of the verification passes of a real decode, the lower quartile as that of every T;
            None where none was made.
        warnings: why not to believe it, a sentence each.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    fixed: Coefficient
    pair: Coefficient
    token: Coefficient
    r_squared: float | None = None
    held_out_error: float | None = None
    text_error: float | None = None
    warnings: tuple[str, ...] = ()

    def verify_seconds(self, tokens: float, expert_pairs: float) -> float:
        """What the model says of a pass."""
        return self.fixed.seconds + self.pair.seconds * expert_pairs + self.token.seconds * tokens


@dataclass(frozen=True)
class Point:
    """One cell of the sweep: passes over so many tokens that are forced to so many experts.

    Attributes:
        active_experts: E, unique experts in each MoE layer.
        expert_pairs: unique (layer, expert) pairs, E · MoE layers.
        seconds: T, the lower quartile of the passes: what else the machine does only ever adds to a pass.
        median, high: of the passes; ``high`` is the upper quartile.
        held_out: whether the fit was made without it.
        bandwidth_share: bytes read / seconds, as a share of the copy bandwidth.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tokens: int
    active_experts: int
    expert_pairs: int
    seconds: float
    median: float
    high: float
    passes: int
    held_out: bool
    bandwidth_share: float


@dataclass(frozen=True)
class StepRest:
    """Seconds of a decode step besides the target's pass, each the lower quartile; ``outside`` is what no phase has.

    Attributes:
        predict: 0 without a predictor.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    draft: float
    predict: float
    select: float
    commit: float
    outside: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.draft + self.predict + self.select + self.commit + self.outside


@dataclass(frozen=True)
class Drafting:
    """What goes with verification for one drafter and tree size, measured on text.

    Attributes:
        drafter: its spec, or ``embedded``; ``drafter_sha256`` is of its folder, where it has one.
        rest: of a step without expert prediction (the confidence policy).
        predicting: of a step with it (marginal-cost), by the predictor's label.
        estimating: T_estimate, seconds of a step's acceptance estimates, by the estimator's name.
        pairs_by_tokens: unique pairs of the 1, 2, … most confident nodes of its draft trees, mean over ``trees`` trees.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    drafter: str
    drafter_sha256: str | None
    draft_steps: int
    draft_topk: int
    rest: StepRest
    predicting: dict[str, StepRest]
    pairs_by_tokens: tuple[float, ...]
    trees: int
    estimating: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str | None, int, int]:
        """The drafter, its hash, its steps and its top-k."""
        return (self.drafter, self.drafter_sha256, self.draft_steps, self.draft_topk)

    def is_for(self, other: tuple[str, str | None, int, int]) -> bool:
        """Whether it is of this drafter, its hash, its steps and its top-k."""
        return self.identity == other


@dataclass(frozen=True)
class SavedCostModel:
    """What a decode step costs on one device, and how that is known.

    Attributes:
        target: its name; the key holds for its files.
        moe_layers, experts, top_k, expert_bytes, always_read_bytes: of the target.
        ar_seconds: T_AR, a forward pass of plain decoding; None in a projection.
        copy_bytes_per_second: the device's copy bandwidth, measured in the same run.
        context: tokens in the KV memory of the sweep.
        pairs_by_tokens: unique pairs of 1, 2, … consecutive tokens of text, mean over ``windows`` places.
        draftings: by drafter and tree size.
        projection: for a model that is reckoned and not measured, what from; None for a measurement.
        measured: when, in ISO 8601.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    key: CostKey
    target: str
    moe_layers: int
    experts: int
    top_k: int
    expert_bytes: int
    always_read_bytes: int
    fit: Fit
    points: tuple[Point, ...]
    ar_seconds: float | None
    copy_bytes_per_second: float
    context: int
    pairs_by_tokens: tuple[float, ...]
    windows: int
    draftings: tuple[Drafting, ...] = ()
    projection: str | None = None
    measured: str = ""
    schema: int = field(default=SCHEMA)

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"a cost model of schema {self.schema}, expected {SCHEMA}")
        for each in self.draftings:
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in each.estimating.values()):
                raise ValueError("a T_estimate that is no time")
        if not (self.copy_bytes_per_second > 0 and all(p.seconds > 0 and p.tokens > 0 for p in self.points)):
            raise ValueError("a bandwidth or a pass of no time")
        if min(self.moe_layers, self.experts, self.top_k) < 1 or self.top_k > self.experts:
            raise ValueError(f"{self.moe_layers} MoE layers with {self.top_k} of {self.experts} experts a token")
        if not self.pairs_by_tokens:
            raise ValueError("no unique pairs by number of tokens")
        if self.projection is None and not self.points:
            raise ValueError("a measurement without points")
        for drafting in self.draftings or (None,):
            for label in [None, *(drafting.predicting if drafting else ())]:
                self._model(drafting, label)

    @property
    def most_tokens(self) -> int:
        """The largest pass that was measured."""
        return max((point.tokens for point in self.points), default=0)

    def for_method(self, predictor: str | None = None, estimator: str | None = None) -> CostModel:
        """The model that a policy gets.

        Args:
            predictor: label of the method's predictor, or None for a method without one.
            estimator: name of the acceptance estimator that it asks, or None; one whose time is not known takes none.

        Raises:
            UserError: nothing was measured with this predictor.
            ValueError: there are several draftings; `narrowed` leaves one.
        """
        if len(self.draftings) > 1:
            raise ValueError("a cost model with several draftings; expected one that is narrowed to the run's")
        drafting = self.draftings[0] if self.draftings else None
        if predictor is not None and drafting is not None and predictor not in drafting.predicting:
            raise UserError(
                f"the cost model has no step with predictor {predictor!r}; {nearest(predictor, drafting.predicting)}"
            )
        return self._model(drafting, predictor, estimator)

    def _model(self, drafting: Drafting | None, predictor: str | None, estimator: str | None = None) -> CostModel:
        rest, pairs = 0.0, self.pairs_by_tokens
        if drafting is not None:
            rest = (drafting.rest if predictor is None else drafting.predicting[predictor]).total
            rest += 0.0 if estimator is None else drafting.estimating.get(estimator, 0.0)
            # A tree is shorter than a text; beyond it CostModel goes on with its last increment.
            pairs = drafting.pairs_by_tokens or pairs
        fit = self.fit
        return CostModel(fit.fixed.seconds, fit.pair.seconds, fit.token.seconds, rest, pairs)

    def narrowed(self, drafting: Drafting) -> SavedCostModel:
        """The same with this drafting alone."""
        return dataclasses.replace(self, draftings=(drafting,))

    def with_drafting(self, drafting: Drafting) -> SavedCostModel:
        """The same with a drafting added, or put in the place of the one of the same drafter and tree size."""
        others = [each for each in self.draftings if not each.is_for(drafting.identity)]
        return dataclasses.replace(self, draftings=(*others, drafting))

    def to_json(self) -> dict[str, Any]:
        """As plain values; what is read back is equal."""
        return dataclasses.asdict(self)

    def manifest(self) -> dict[str, Any]:
        """What a run's manifest says of the model that it used."""
        fit = self.fit
        return {
            "fixed_seconds": fit.fixed.seconds,
            "pair_seconds": fit.pair.seconds,
            "token_seconds": fit.token.seconds,
            **self.to_json(),
            "r_squared": fit.r_squared,
            "warnings": list(fit.warnings),
        }


_ADAPTER = TypeAdapter(SavedCostModel)


def _part_of_profile(data: bytes) -> bytes | None:
    """The cost model in a profile's own file, which has the figures' values beside it; None in any other file."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None  # for the caller to say what is wrong with it
    inner = found.get("cost_model") if isinstance(found, dict) else None
    return json.dumps(inner).encode() if isinstance(inner, dict) else None


def read_cost_model(path: Path, what: str) -> SavedCostModel:
    """Read a file and check every value in it.

    Args:
        what: begins a message, such as ``--cost-model``.

    Raises:
        UserError: it is not there, damaged, or holds what no profile writes.
    """
    try:
        data = path.read_bytes()
        return _ADAPTER.validate_json(_part_of_profile(data) or data)
    except OSError as error:
        raise UserError(f"{what} {path}: cannot be read ({error.strerror}); expected a cost-model file") from error
    except ValidationError as error:
        raise UserError(
            f"{what} {path}: not a cost model of this version ({first_problem(error)}); expected what "
            "ecospec-bench profile writes"
        ) from error


def from_manifest(found: Any, what: str) -> SavedCostModel:
    """The model that a run's manifest holds; the inverse of `SavedCostModel.manifest`.

    Args:
        what: begins a message.

    Raises:
        UserError: it is damaged.
    """
    try:
        own = {each.name: found[each.name] for each in dataclasses.fields(SavedCostModel)}
        return _ADAPTER.validate_json(json.dumps(own))
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{what}: its cost model is damaged; start a new run") from error


def cost_model_text(saved: SavedCostModel) -> str:
    """What a file holds."""
    return json.dumps(saved.to_json(), indent=1, allow_nan=False) + "\n"
