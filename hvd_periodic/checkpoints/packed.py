"""A nested value as one array of bytes, for another rank: exactly, and without pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from hvd_periodic.checkpoints.tree import KINDS, Content, Leaves, decode, encode

_COUNT = 8
"""Bytes of the length of the JSON, which they precede."""


def pack(value: Any, leaves: Leaves | None = None) -> np.ndarray:
    """Return a nested value as bytes: a length, JSON of that length, and the elements of its arrays.

    The JSON is ``{"tree": values, "arrays": [[name, dtype, shape], ...]}``, as of :func:`encode`.

    Args:
        value: a nested value.
        leaves: handles the tensors of a framework.

    Raises:
        TypeError: as :func:`encode`.

    Example:
        >>> unpack(pack({"step": 3, "m": np.ones(2)}))
        {'step': 3, 'm': array([1., 1.])}
    """
    content = encode(value, leaves)
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    described = [[name, array.dtype.str, content.arrays[name].shape] for name, array in arrays.items()]
    text = json.dumps({"tree": content.tree, "arrays": described}).encode()
    parts = [len(text).to_bytes(_COUNT, "little"), text, *(array.tobytes() for array in arrays.values())]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack(data: np.ndarray, leaves: Leaves | None = None) -> Any:
    """Return the value that :func:`pack` was given.

    Raises:
        ValueError: the bytes are invalid.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        end = _COUNT + int.from_bytes(data[:_COUNT].tobytes(), "little")
        found = json.loads(data[_COUNT:end].tobytes())
        for name, dtype, shape in found["arrays"]:
            kind, start = np.dtype(dtype), end
            end += kind.itemsize * math.prod(shape)
            if kind.kind not in KINDS or min(shape, default=0) < 0 or end > data.size:
                raise ValueError(name, dtype, shape)
            arrays[name] = np.frombuffer(data[start:end].tobytes(), kind).reshape(shape).copy()
        if end != data.size:
            raise ValueError(end)
        return decode(Content(found["tree"], arrays), leaves)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"{data.size} bytes are not a packed value: {error!r}") from error
