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
            f"expected {predictor.name}:path=FOLDER (train one: ecospec-bench train predictor)"
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


@hookimpl
def ecospec_predictors() -> list[type]:
    """The built-ins."""
    return [Learned, TokenFrequency, Oracle]
