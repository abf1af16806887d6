"""An attention mask for a model whose layers lie on several devices.

Layers on another device are handed ``mask.to(device)``, each anew, and a plain tensor loses on the way what was
hung on it: whose tokens are whose (`Packing`), and what a layer before has made of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecospec.predictors.packing import PACKING, Packing


class PassMask(Tensor):
    """A mask that is copied to each device once, with its `Packing`; all layers there get the same object."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors
    _copies: dict[torch.device, PassMask]

    @staticmethod
    def of(mask: Tensor) -> PassMask:
        """``mask`` [.., n, t], which may carry a `Packing`, as one that stays itself on every device."""
        whole = mask.as_subclass(PassMask)
        whole._copies = {mask.device: whole}
        packing: Packing | None = getattr(mask, PACKING, None)
        if packing is not None:
            setattr(whole, PACKING, packing)
        return whole

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of any tensor; to a device alone, the copy that is there already."""
        device = args[0] if args else kwargs.get("device")
        if len(args) > 1 or isinstance(device, Tensor | torch.dtype) or device is None or "dtype" in kwargs:
            return super().to(*args, **kwargs)
        place = torch.empty(0, device=device).device  # "cuda" means the current one
        if place not in self._copies:
            copy = super().to(place).as_subclass(PassMask)
            copy._copies = self._copies
            packing: Packing | None = getattr(self, PACKING, None)
            if packing is not None:
                setattr(copy, PACKING, packing.to(place))
            self._copies[place] = copy
        return self._copies[place]
