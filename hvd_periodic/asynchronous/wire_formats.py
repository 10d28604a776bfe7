"""What messages to an asynchronous center hold besides buckets, as arrays of a known dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors
from hvd_periodic.checkpoints.packed import pack, unpack
from hvd_periodic.checkpoints.tree import Leaves

_LARGEST_STATE = 64
"""Largest state of an optimizer, in sizes of the center, besides what fits into 16 MiB."""


class States:
    """States of the center's optimizer as arrays of bytes.

    Args:
        parts: tensors that are exchanged.
        leaves: handles the tensors in a state.
    """

    def __init__(self, parts: Sequence[ExchangedTensors], leaves: Leaves) -> None:
        center = sum(bucket.nbytes for bucket in parts[0].layout.buckets)
        self._leaves, self._largest = leaves, _LARGEST_STATE * center + 2**24

    def pack(self, state: Any) -> np.ndarray:
        """Return a state as bytes."""
        return pack(state, self._leaves)

    def unpack(self, data: np.ndarray) -> Any:
        """Return the state that :meth:`pack` was given."""
        return unpack(data, self._leaves)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return memory for a state of a size that another rank has told.

        Raises:
            ValueError: no state has that size.
        """
        if not 0 <= nbytes <= self._largest:
            raise ValueError(
                f"The state of the center's optimizer has {nbytes} bytes, and asynchronous exchange carries up to "
                f"{self._largest}: {_LARGEST_STATE} times the center"
            )
        return np.empty(nbytes, np.uint8)
