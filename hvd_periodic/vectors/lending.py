"""Lets states that are saved before training continues share its memory, in place of copies."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np


class _Thread(threading.local):
    lends = defers = False


_thread = _Thread()


@contextmanager
def lending(defer: bool = False) -> Iterator[None]:
    """Allow states that this thread requests inside the block to share memory with tensors that training changes.

    Args:
        defer: states may also hold :class:`Deferred` tensors, which all ranks write, or read to the end, in the same
            order.
    """
    before = _thread.lends, _thread.defers
    _thread.lends, _thread.defers = True, defer
    try:
        yield
    finally:
        _thread.lends, _thread.defers = before


def lends() -> bool:
    """Return whether states may share memory with tensors: this thread is inside :func:`lending`."""
    return _thread.lends


def defers() -> bool:
    """Return whether states may hold deferred tensors."""
    return _thread.defers


class Deferred:
    """A tensor with parts on other ranks: its elements travel while it is written, and no rank holds all of it.

    Args:
        shape: shape of the tensor.
        like: an empty tensor of the same framework and dtype.
        parts: yields the elements, row-major, in flat arrays, each of which is valid until the next. Collective: all
            ranks read the deferred tensors of a state in the same order.

    Attributes:
        shape, like, parts: as given.
        dtype: dtype of the parts; set by the reader, which knows the framework.
        failure: the error of a collective, after which no more parts are yielded.

    Example:
        >>> deferred = Deferred((2, 2), np.empty(0, "f4"), iter([np.zeros(3, "f4"), np.ones(1, "f4")]))
        >>> np.concatenate(list(deferred.parts)).tolist()
        [0.0, 0.0, 0.0, 1.0]
    """

    dtype: np.dtype[Any]

    def __init__(self, shape: tuple[int, ...], like: Any, parts: Iterable[np.ndarray]) -> None:
        self.shape, self.like, self.parts = shape, like, self._recording_failure(parts)
        self.failure: Exception | None = None

    def _recording_failure(self, parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        try:
            yield from parts
        except Exception as error:
            self.failure = error
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def discard(self) -> None:
        """Read the remaining parts: other ranks may be waiting for this rank."""
        for _ in self.parts:
            pass
