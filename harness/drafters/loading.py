"""From what the user typed behind ``--drafter`` to a drafter that is bound to the target."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ecospec.errors import UserError
from ecospec.harness.drafters.asking import bind
from ecospec.harness.drafters.builtin import Eagle3, LanguageModel, Mtp
from ecospec.harness.drafters.contract import BoundDrafter, Drafter, DrafterTarget
from ecospec.harness.hub import find_checkpoint
from ecospec.harness.loading import LoadedTarget
from ecospec.harness.plugins import Plugins
from ecospec.harness.target import decoder_of
from ecospec.policies import spec_of


@dataclass(frozen=True)
class ChosenDrafter:
    """What `choose_drafter` found.

    Attributes:
        spec: as it was asked for, with its parameters.
        commit: of a checkpoint on the hub, else None.
    """

    drafter: Drafter
    spec: str
    commit: str | None


def choose_drafter(
    plugins: Plugins, text: str | None, revision: str | None = None, *, weights: bool = True
) -> ChosenDrafter:
    """The drafter that a text describes: a spec of a registered one, or an EAGLE-3 head's folder or hub name.

    A registered name wins over a folder of that name; ``./name`` is the folder. A checkpoint on the hub is fetched.

    Args:
        text: None for the head that belongs to the target.
        revision: of a checkpoint on the hub; None for the newest.
        weights: whether its weights are fetched too.

    Raises:
        UserError: it is neither, its parameters do not fit, or it cannot be fetched.
    """
    drafter = create_drafter(plugins, text)
    spec = spec_of(drafter)
    if isinstance(drafter, Eagle3 | Mtp | LanguageModel) and drafter.path is not None:
        # A path forgets a leading "./", which tells a folder from a hub name.
        name = text if text is not None and _is_place(plugins, text) else str(drafter.path)
        found = find_checkpoint("drafter", name, revision, weights=weights)
        return ChosenDrafter(replace(drafter, path=found.folder), spec, found.commit)
    if revision is not None:
        raise UserError(
            f"--drafter-revision {revision}: drafter {drafter.name!r} is not fetched from the hub; expected a hub name "
            "to go with it"
        )
    return ChosenDrafter(drafter, spec, None)


def create_drafter(plugins: Plugins, text: str | None) -> Drafter:
    """As `choose_drafter`, but nothing is fetched: a hub name stays one."""
    if text is None:
        return Eagle3()
    if _is_place(plugins, text):
        return Eagle3(Path(text))
    name = text.partition(":")[0].strip()
    try:
        return plugins.create_drafter(text)
    except UserError as error:
        if name in plugins.drafters:
            raise
        raise UserError(f"--drafter: {error}; expected one of these, or the folder of an EAGLE-3 head") from None


def _is_place(plugins: Plugins, text: str) -> bool:
    """Whether a text is a folder or hub name, and no spec."""
    name = text.partition(":")[0].strip()
    return name not in plugins.drafters and (Path(text).is_dir() or "/" in text or os.sep in text)


def drafter_target(loaded: LoadedTarget, bundle: Path | None) -> DrafterTarget:
    """What a drafter may know of a target.

    Args:
        bundle: folder of the drafter that belongs to it.
    """
    target = loaded.target
    geometry = target.geometry
    return DrafterTarget(
        folder=loaded.folder,
        config=target.config,
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        layers=geometry.layers,
        context=geometry.context,
        embedding=target.embedding,
        final_norm=getattr(decoder_of(target.model), "norm", None),
        head=target.model.get_output_embeddings(),
        tokenizer=loaded.tokenizer,
        bundle=bundle,
    )


def load_drafter(drafter: Drafter, loaded: LoadedTarget, bundle: Path | None) -> BoundDrafter:
    """Bind a drafter, whose features the target gives from now on.

    Args:
        bundle: folder of the model that the target and its drafter belong to, where there is one.

    Raises:
        UserError: it does not fit the target.
    """
    bound = bind(drafter, drafter_target(loaded, bundle and bundle / "drafter"))
    try:
        loaded.target.read_features(bound.features)
    except UserError as error:
        raise UserError(f"drafter {drafter.name!r}: {error}") from error
    return bound
