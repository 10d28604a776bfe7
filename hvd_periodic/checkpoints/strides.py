"""Where the elements of arrays lie in memory: files hold them row by row, and what is loaded lies as it was saved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SPREAD = 16
"""A view whose elements are spread over more than so many times its size comes back row-major."""


def strides_of(array: np.ndarray) -> list[int] | None:
    """Return the strides of an array, in elements; None where it is row-major, or they cannot be had again."""
    size = array.itemsize
    if not array.size or not size or any(stride < 0 or stride % size for stride in array.strides):
        return None
    strides = [stride // size for stride in array.strides]
    row_major = [int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)]
    return None if strides == row_major or _span(array.shape, strides) > _SPREAD * array.size else strides


def with_strides(array: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """Return the same values in memory of these strides.

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
    """Return over how many elements of memory an array reaches."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False))
