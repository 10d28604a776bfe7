"""The center that an optimizer moves, with the optimizer's state, as one unit of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors
from hvd_periodic.asynchronous.slots import ALIGNMENT, aligned
from hvd_periodic.outer.framework import OuterOptimizer


class SteppedCenter:
    """All buckets of a center and the state of its optimizer, in memory that is another one at every step.

    The optimizer is bound to a copy of the center in this process, and to the gradient, once; its state may be used
    where it lies. All methods may be called again, with other memory of the same values.

    Args:
        part: the tensors that the optimizer moves.
        workers: number of workers.
        optimizer: the optimizer.
        shapes: shape and dtype of the arrays of its state.

    Attributes:
        nbytes: bytes of the unit.
    """

    def __init__(
        self,
        part: ExchangedTensors,
        workers: int,
        optimizer: OuterOptimizer,
        shapes: Sequence[tuple[tuple[int, ...], str]],
    ) -> None:
        self._optimizer, self._shapes, self._buckets = optimizer, shapes, part.layout.buckets
        parts, shares = [part], [part.layout]
        self._copy = CenterInMemory(
            parts, shares, workers, np.zeros(CenterInMemory.nbytes(parts, shares, workers), np.uint8)
        )
        self._copy.bind(optimizer)
        self._arrays = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        self._starts = [0]
        for nbytes in (ALIGNMENT, *(bucket.nbytes for bucket in self._buckets), *self._arrays):
            self._starts.append(self._starts[-1] + aligned(nbytes))
        self.nbytes = self._starts[-1]

    def set_gradient(self, index: int, message: np.ndarray, exchange: Exchange) -> None:
        """Keep the gradient of a bucket for the next step, given the message of a worker."""
        self._copy.set_total(index, message, exchange)

    def step(self, memory: np.ndarray) -> None:
        """Let the optimizer take a step on the center in some memory, by the gradient that was set."""
        stepped, center, state = self._views(memory)
        for index, values in enumerate(center):
            self._copy.write(index, values)
        if stepped[0]:
            self._optimizer.pull(state)
        else:
            self._optimizer.reset()
        self._optimizer.step()
        self._optimizer.push(state)
        stepped[0] = True
        for index, values in enumerate(center):
            values[:] = self._copy.read(index)

    def read(self, index: int) -> np.ndarray:
        """Return a copy of a bucket after the last step."""
        return self._copy.read(index)

    def places(self, memory: np.ndarray) -> dict[int, np.ndarray]:
        """Return the buckets of the center in some memory, by index."""
        return dict(enumerate(self._views(memory)[1]))

    def write(self, memory: np.ndarray, buckets: Sequence[np.ndarray], state: Any) -> None:
        """Set the center, and the state of the optimizer (None: that before its first step)."""
        stepped, center, arrays = self._views(memory)
        for here, values in zip(center, buckets, strict=True):
            here[:] = values
        stepped[0] = state is not None
        if state is not None:
            self._optimizer.load(state)
            self._optimizer.push(arrays)

    def state(self, memory: np.ndarray) -> Any:
        """Return a copy of the optimizer's state; None before its first step."""
        stepped, _, arrays = self._views(memory)
        if not stepped[0]:
            return None
        self._optimizer.pull(arrays)
        return self._optimizer.state()

    def _views(self, memory: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Return whether the optimizer has stepped, in an array; the buckets; and the arrays of the state."""
        mark, *rest = (memory[start:stop] for start, stop in pairwise(self._starts))
        center, state = rest[: len(self._buckets)], rest[len(self._buckets) :]
        return (
            mark.view(np.bool_),
            [
                each[: bucket.nbytes].view(bucket.kind.split()[0])
                for bucket, each in zip(self._buckets, center, strict=True)
            ],
            [
                each[:nbytes].view(dtype).reshape(shape)
                for (shape, dtype), nbytes, each in zip(self._shapes, self._arrays, state, strict=True)
            ],
        )
