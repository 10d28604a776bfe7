"""Complex arrays as pairs of real numbers, which is how they are exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_periodic.vectors.store import PackedStore

Array = np.ndarray[Any, Any]


def as_real(array: Array) -> Array:
    """Return a complex array as reals of shape (…, 2), in the same memory; other arrays as they are.

    Every algorithm acts elementwise with real factors, so that exchanging the pairs exchanges the complex numbers.

    Example:
        >>> as_real(np.array([1 + 2j, 3j]))
        array([[1., 2.],
               [0., 3.]])
    """
    return array[..., np.newaxis].view(array.real.dtype) if np.iscomplexobj(array) else array


def as_complex(pairs: Array) -> Array:
    """Return the complex array of which :func:`as_real` returns these pairs."""
    return pairs.view(np.result_type(pairs, np.complex64))[..., 0]


class ComplexArrayStore(PackedStore[Array]):
    """The user's arrays, of which complex ones are read and written as pairs of reals."""

    def _tensor(self, index: int) -> Array:
        return as_real(self._tensors[index])
