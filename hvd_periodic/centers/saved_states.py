"""Gathers the states of an optimizer of a sharded center for a checkpoint."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.lending import Deferred, defers

_SMALL_BYTES = 2**16
"""Smaller arrays travel with the state that contains them."""

_PART_BYTES = 16 * 2**20
"""Bytes of a larger array that travel at once."""


def gather_states(communicator: Communicator, state: Any, name: str) -> list[Any]:
    """Return the states of all ranks, in rank order. Collective.

    If states may hold deferred tensors, large arrays are replaced with such tensors.
    """
    if not defers():
        return communicator.allgather_object(state, name)
    stream, own = io.BytesIO(), list[np.ndarray]()
    _Pickler(stream, own).dump(state)
    gathered = communicator.allgather_object((stream.getvalue(), [array.shape for array in own]), name)

    def parts(owner: int, index: int, shape: tuple[int, ...], like: Any) -> Iterator[np.ndarray]:
        flat = own[index].reshape(-1) if owner == communicator.rank else None
        count = _PART_BYTES // like.itemsize
        for start in range(0, int(np.prod(shape)), count):
            part = None if flat is None else flat[start : start + count]
            yield communicator.broadcast_object(part, name, owner)

    return [
        _Unpickler(
            io.BytesIO(pickled),
            lambda index, like, owner=owner, shapes=shapes: Deferred(
                shapes[index], like, parts(owner, index, shapes[index], like)
            ),
        ).load()
        for owner, (pickled, shapes) in enumerate(gathered)
    ]


class _Pickler(pickle.Pickler):
    """Leaves out large arrays."""

    def __init__(self, stream: io.BytesIO, arrays: list[np.ndarray]) -> None:
        super().__init__(stream)
        self._arrays = arrays

    def persistent_id(self, value: Any) -> tuple[int, Any] | None:
        """Return the index of an array that is left out, and an empty tensor like it; None to pickle the value."""
        if isinstance(value, type) or not hasattr(value, "__array__") or getattr(value, "nbytes", 0) < _SMALL_BYTES:
            return None
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):  # It is in the memory of a GPU, or has a dtype that numpy lacks.
            return None
        if array.dtype.kind != "f" or not array.flags.c_contiguous:
            return None
        self._arrays.append(array)
        return len(self._arrays) - 1, value.reshape(-1)[:0] * 1


class _Unpickler(pickle.Unpickler):
    """Inserts deferred tensors in place of the arrays that were left out."""

    def __init__(self, stream: io.BytesIO, make: Any) -> None:
        super().__init__(stream)
        self._make = make

    def persistent_load(self, pid: tuple[int, Any]) -> Deferred:
        """Return the deferred tensor for an array."""
        made: Deferred = self._make(*pid)
        return made
