"""The built-in drafters. They register through the same hook as a plugin's, and import torch in `bind`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ecospec.errors import UserError
from ecospec.harness.drafters.contract import BoundDrafter, Drafter, DrafterTarget
from ecospec.policies import hookimpl

MOST_LOOKED_UP = 64
"""Longest n-gram: each of every length is kept, so that memory grows with its square."""


@dataclass(frozen=True)
class Eagle3(Drafter):
    """An EAGLE-3 head: three states of the target, one decoder layer, a dynamic tree."""

    name = "eagle3"
    path: Path | None = field(default=None, metadata={"help": "folder of the head; default: the embedded target's own"})

    def bind(self, target: DrafterTarget) -> BoundDrafter:
        """Load the head and check that it fits."""
        from ecospec.harness.drafters.heads import bind_eagle3

        folder = target.bundle if self.path is None else self.path
        if folder is None:
            raise UserError(
                "drafter 'eagle3': no head belongs to this target; expected eagle3:path=FOLDER or the folder alone"
            )
        return bind_eagle3(folder, target)


@dataclass(frozen=True)
class Mtp(Drafter):
    """The target's own multi-token-prediction layer (DeepSeek-V3), read from its shards and run step after step."""

    name = "mtp"
    path: Path | None = field(
        default=None, metadata={"help": "checkpoint folder to read the layer from; default: the target's"}
    )

    def bind(self, target: DrafterTarget) -> BoundDrafter:
        """Read the layer and check that it fits."""
        from ecospec.harness.drafters.mtp_loading import bind_mtp

        return bind_mtp(self.path or target.folder, target)


@dataclass(frozen=True)
class LanguageModel(Drafter):
    """A small causal language model with the target's vocabulary."""

    name = "lm"
    path: Path = field(metadata={"help": "checkpoint folder or hub name"})

    def bind(self, target: DrafterTarget) -> BoundDrafter:
        """Load the model and check its vocabulary, and that tree passes come out right."""
        from ecospec.harness.drafters.language_model import bind_language_model

        return bind_language_model(str(self.path), target)


@dataclass(frozen=True)
class Ngram(Drafter):
    """Prompt lookup: what followed the last few tokens where they stood in the text before. No model."""

    name = "ngram"
    longest: int = field(default=3, metadata={"help": "most tokens that are looked up together, 1 to 64"})

    def __post_init__(self) -> None:
        if not 1 <= self.longest <= MOST_LOOKED_UP:
            raise ValueError(f"longest must be from 1 to {MOST_LOOKED_UP}, got {self.longest}")

    def bind(self, target: DrafterTarget) -> BoundDrafter:
        """Nothing to load."""
        from ecospec.harness.drafters.ngram import BoundNgram

        return BoundNgram(self.longest)


@hookimpl
def ecospec_drafters() -> list[type]:
    """The built-ins."""
    return [Eagle3, Mtp, LanguageModel, Ngram]
