"""The built-in acceptance estimators. They register through the same hook as a plugin's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ecospec.errors import UserError
from ecospec.policies import hookimpl
from ecospec.policies.arrays import FloatArray
from ecospec.predictors.acceptance.contract import AcceptanceEstimator, AcceptanceRequest, BoundEstimator
from ecospec.predictors.acceptance.folder import SHIPPED
from ecospec.predictors.contract import TargetView

_PATH_HELP = "folder that 'ecospec-bench train acceptance' wrote; default: the one saved for the target and drafter"


def _folder(estimator: AcceptanceEstimator, path: Path | None, target: TargetView) -> Path:
    """The folder an estimator loads from: what the user named, else the one that belongs to the target."""
    if path is not None:
        return path
    if target.bundle is None:
        raise nothing_fitted(estimator.name)
    return target.bundle / SHIPPED


def nothing_fitted(name: str) -> UserError:
    """The error of an estimator for which there is nothing to load, with the two commands that make it."""
    return UserError(
        f"acceptance estimator {name!r}: nothing fitted belongs to this target and drafter; expected "
        "'ecospec-bench record --suite SUITE --target TARGET --drafter DRAFTER --predictor PREDICTOR --acceptance "
        "draft --states --output RECORDING' and 'ecospec-bench train acceptance --recording RECORDING' first "
        "(docs/acceptance.md), or "
        f"{name}:path=FOLDER, or --acceptance draft"
    )


class BoundDraft(BoundEstimator):
    """Nothing to load."""

    def estimate(self, request: AcceptanceRequest) -> FloatArray:
        """float64 [N], the draft's path probabilities."""
        return request.tree.path_probs


@dataclass(frozen=True)
class Draft(AcceptanceEstimator):
    """The draft's own path probabilities, as they are."""

    name = "draft"

    def bind(self, target: TargetView, temperature: float) -> BoundEstimator:
        """Nothing to load."""
        return BoundDraft()


@dataclass(frozen=True)
class Isotonic(AcceptanceEstimator):
    """A rising function of the path probability for each depth and rank, fitted to recorded steps."""

    name = "isotonic"
    path: Path | None = field(default=None, metadata={"help": _PATH_HELP})

    def bind(self, target: TargetView, temperature: float) -> BoundEstimator:
        """Load the curves of this temperature and check target and drafter."""
        from ecospec.predictors.acceptance.folder import open_folder
        from ecospec.predictors.acceptance.isotonic import KIND, BoundIsotonic, from_json

        fitted = open_folder(_folder(self, self.path, target), target)
        return BoundIsotonic(from_json(fitted.section(KIND, temperature), str(fitted.folder)), fitted.fitted_on)


@dataclass(frozen=True)
class Learned(AcceptanceEstimator):
    """A small model over what the drafter knows at each node, its hidden state among it, fitted to recorded steps."""

    name = "learned"
    path: Path | None = field(default=None, metadata={"help": _PATH_HELP})

    def bind(self, target: TargetView, temperature: float) -> BoundEstimator:
        """Load the weights of this temperature and check target and drafter."""
        from ecospec.predictors.acceptance.folder import open_folder
        from ecospec.predictors.acceptance.learned import BoundLearned
        from ecospec.predictors.acceptance.weights import read_weights

        if target.drafter is None:
            raise UserError(
                f"acceptance estimator {self.name!r} reads a drafter's states, which drafter {target.stateless!r} has "
                "not; expected draft, or isotonic with a folder that was fitted for this drafter"
            )
        fitted = open_folder(_folder(self, self.path, target), target)
        return BoundLearned(read_weights(fitted, temperature, target.drafter.hidden_size), fitted.fitted_on)


@hookimpl
def ecospec_estimators() -> list[type]:
    """The built-ins."""
    return [Draft, Isotonic, Learned]
