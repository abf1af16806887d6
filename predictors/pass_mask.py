"""An attention mask for a model whose layers lie on several devices.

Layers on another device are handed ``mask.to(device)``, each anew, and a tensor loses on the way what was hung on it:
whose tokens are whose (`Packing`), the first key that it speaks of, and what a layer before has made of it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ecospec.predictors.packing import PACKING, Packing

FIRST = "_ecospec_first"
"""The attribute by which a mask says that it begins at this key; those before are seen by no token of the pass."""
_ORIGINAL = "_ecospec_original"


def for_several_devices(mask: Tensor) -> Tensor:
    """Let ``mask`` [.., n, t] be copied to each device once, with its `Packing`: all layers there get the same object.

    The mask itself is returned; its ``to`` is its own from now on.
    """
    copies: dict[torch.device, Tensor] = {}
    itself = weakref.ref(mask)  # a mask that held itself would stay on its device until the garbage collector comes

    def to(*args: Any, **kwargs: Any) -> Tensor:
        """As of any tensor; to another device alone, the copy that is there already."""
        own = itself()
        assert own is not None
        device = args[0] if args else kwargs.get("device")
        if len(args) != 1 or not isinstance(device, str | int | torch.device) or "dtype" in kwargs:
            return Tensor.to(own, *args, **kwargs)
        place = torch.empty(0, device=device).device  # "cuda" means the current one
        if place == own.device:
            return own
        if place not in copies:
            copies[place] = Tensor.to(own, place)
            packing: Packing | None = getattr(own, PACKING, None)
            if packing is not None:
                setattr(copies[place], PACKING, packing.to(place))
            setattr(copies[place], FIRST, getattr(own, FIRST, 0))
            setattr(copies[place], _ORIGINAL, id(own))
        return copies[place]

    mask.to = to  # type: ignore[method-assign]
    return mask


def is_copy(found: Tensor | None, mask: Tensor) -> bool:
    """Whether a mask that a layer was handed is this one, or its copy on another device."""
    return found is mask or getattr(found, _ORIGINAL, None) == id(mask)
