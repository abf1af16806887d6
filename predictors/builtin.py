"""The built-in predictors. They register through the same hook as a plugin's, and import torch in `bind`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ecospec.errors import UserError
from ecospec.policies import hookimpl
from ecospec.predictors.contract import BoundPredictor, Predictor, TargetView


def _folder(predictor: Predictor, path: Path | None, target: TargetView, part: str) -> Path:
    """The folder a predictor loads from: what the user named, else the one that belongs to the target."""
    if path is not None:
        return path
    if target.bundle is None:
        raise UserError(
            f"predictor {predictor.name!r}: no trained predictor belongs to this target; "
            f"expected {predictor.name}:path=FOLDER (docs/predictors.md has the commands that train one)"
        )
    return target.bundle / part


@dataclass(frozen=True)
class Learned(Predictor):
    """Target embedding, projection, a small decoder-only backbone and L×E logits (section 4.1 of the paper)."""

    name = "learned"
    path: Path | None = field(
        default=None, metadata={"help": "folder of a trained predictor; default: the embedded target's own"}
    )

    def bind(self, target: TargetView) -> BoundPredictor:
        """Load the weights and check the geometry."""
        from ecospec.predictors.learned import load_learned

        return load_learned(_folder(self, self.path, target, "learned"), target)


@dataclass(frozen=True)
class Feature(Predictor):
    """The drafter's own hidden state of each node and its token's embedding, through a low-rank head for each layer."""

    name = "feature"
    path: Path | None = field(
        default=None, metadata={"help": "folder of a trained predictor; default: the embedded target's own"}
    )

    def bind(self, target: TargetView) -> BoundPredictor:
        """Load the weights and check the geometry and the drafter."""
        from ecospec.predictors.feature import load_feature

        return load_feature(_folder(self, self.path, target, "feature"), target)


@dataclass(frozen=True)
class TokenFrequency(Predictor):
    """The experts that each token id was routed to most often, whatever its context."""

    name = "token-frequency"
    path: Path | None = field(
        default=None, metadata={"help": "folder of a counted table; default: the embedded target's own"}
    )

    def bind(self, target: TargetView) -> BoundPredictor:
        """Load the table and check the geometry."""
        from ecospec.predictors.token_frequency import load_table

        return load_table(_folder(self, self.path, target, "token-frequency"), target)


@dataclass(frozen=True)
class Oracle(Predictor):
    """The target's own routing of the whole tree, from an extra pass that no timing includes."""

    name = "oracle"
    oracle = True

    def bind(self, target: TargetView) -> BoundPredictor:
        """Nothing to load."""
        from ecospec.predictors.oracle import BoundOracle

        return BoundOracle()


@dataclass(frozen=True)
class NoisyOracle(Predictor):
    """The target's own routing, of which only a chosen share is kept and the rest replaced at random."""

    name = "noisy-oracle"
    oracle = True
    accuracy: float = field(default=0.5, metadata={"help": "mean share of the true experts that is kept, 0 to 1"})
    seed: int = field(default=0, metadata={"help": "seed of what is kept and what replaces the rest"})

    def __post_init__(self) -> None:
        if not 0.0 <= self.accuracy <= 1.0:
            raise ValueError(f"accuracy must be from 0 to 1, got {self.accuracy}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def bind(self, target: TargetView) -> BoundPredictor:
        """Check that there are enough other experts."""
        from ecospec.predictors.noisy_oracle import BoundNoisyOracle, least_accuracy

        least = least_accuracy(target.experts, target.top_k)
        if self.accuracy < least:
            raise UserError(
                f"predictor {self.name!r}: accuracy {self.accuracy} cannot be had with {target.top_k} of "
                f"{target.experts} experts; expected at least {least:g}"
            )
        return BoundNoisyOracle(target.experts, self.accuracy, self.seed)


@hookimpl
def ecospec_predictors() -> list[type]:
    """The built-ins."""
    return [Learned, Feature, TokenFrequency, Oracle, NoisyOracle]
