"""The array types of this package, and the one way its values become immutable."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
WordArray: TypeAlias = NDArray[np.uint64]


def frozen(name: str, values: ArrayLike, dtype: DTypeLike, ndim: int) -> NDArray[Any]:
    """A read-only copy of `values` as `dtype`; the caller's own array stays as it was.

    Raises:
        ValueError: `values` has another number of dimensions, or a kind that `dtype` cannot hold
            without loss (floats for integers).
    """
    array = np.array(values)
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}, expected {ndim} dimension(s)")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name} has dtype {array.dtype}, expected {np.dtype(dtype)}")
    array = array.astype(dtype, copy=False)
    array.flags.writeable = False
    return array
