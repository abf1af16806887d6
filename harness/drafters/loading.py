"""From what the user typed behind ``--drafter`` to a drafter that is bound to the target."""

from __future__ import annotations

import os
from pathlib import Path

from ecospec.errors import UserError
from ecospec.harness.drafters.asking import bind
from ecospec.harness.drafters.builtin import Eagle3
from ecospec.harness.drafters.contract import BoundDrafter, Drafter, DrafterTarget
from ecospec.harness.loading import LoadedTarget
from ecospec.harness.plugins import Plugins
from ecospec.harness.target import decoder_of


def create_drafter(plugins: Plugins, text: str | None) -> Drafter:
    """The drafter that a text describes: a spec of a registered one, or the folder of an EAGLE-3 head.

    A registered name wins over a folder of that name; ``./name`` is the folder.

    Args:
        text: None for the head that belongs to the target.

    Raises:
        UserError: it is neither, or its parameters do not fit.
    """
    if text is None:
        return Eagle3()
    name = text.partition(":")[0].strip()
    if name not in plugins.drafters and (Path(text).is_dir() or "/" in text or os.sep in text):
        return Eagle3(Path(text))
    try:
        return plugins.create_drafter(text)
    except UserError as error:
        if name in plugins.drafters:
            raise
        raise UserError(f"--drafter: {error}; expected one of these, or the folder of an EAGLE-3 head") from None


def drafter_target(loaded: LoadedTarget, bundle: Path | None) -> DrafterTarget:
    """What a drafter may know of a target.

    Args:
        bundle: folder of the drafter that belongs to it.
    """
    target = loaded.target
    geometry = target.geometry
    return DrafterTarget(
        name=loaded.name,
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
