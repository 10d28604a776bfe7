"""Memory layout of arrays: files hold elements row by row; loaded arrays get the strides of the saved ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SPREAD = 16
"""A view whose elements span more than this many times its size is restored row-major."""


def strides_of(array: np.ndarray) -> list[int] | None:
    """Return the strides of an array, in elements; None if it is row-major or its strides cannot be restored."""
    size = array.itemsize
    if not array.size or not size or any(stride < 0 or stride % size for stride in array.strides):
        return None
    strides = [stride // size for stride in array.strides]
    row_major = [int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)]
    return None if strides == row_major or _span(array.shape, strides) > _SPREAD * array.size else strides


def with_strides(array: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """Return the same values in an array with these strides.

    Raises:
        ValueError: an array of this shape cannot have them.
    """
    span = _span(array.shape, strides)
    if len(strides) != array.ndim or min(strides, default=0) < 0 or not 0 < span <= _SPREAD * array.size:
        raise ValueError(f"an array of shape {array.shape} cannot have the strides {strides}")
    found: np.ndarray = np.ndarray(
        array.shape, array.dtype, np.zeros(span, array.dtype), strides=[stride * array.itemsize for stride in strides]
    )
    found[...] = array
    return found


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory that an array spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False))
