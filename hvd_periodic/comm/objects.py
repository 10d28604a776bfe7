"""Objects of any size, over collectives that are limited to 2³¹ elements."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

AT_ONCE = 2**30
"""Maximum number of bytes, over all ranks, that one collective gathers."""


def gather_objects(value: object, allgather: Callable[[np.ndarray, str], np.ndarray], name: str) -> list[Any]:
    """Return the picklable values of all ranks, in rank order, sent in as many pieces as necessary.

    Args:
        value: this rank's value.
        allgather: returns the concatenated arrays of all ranks, whose sizes may differ.
        name: prefix of the names of collectives.
    """
    data = _pickled(value)
    sizes = np.asarray(allgather(np.array([data.size], dtype=np.int64), f"{name}.sizes"))
    piece = max(AT_ONCE // len(sizes), 1)
    if sizes.max() <= piece:
        parts = np.split(np.asarray(allgather(data, f"{name}.data")), np.cumsum(sizes)[:-1])
        return [pickle.loads(part.data) for part in parts]
    whole = [np.empty(size, np.uint8) for size in sizes]
    for start in range(0, int(sizes.max()), piece):
        held = [one[start : start + piece] for one in whole]
        gathered = np.asarray(allgather(data[start : start + piece], f"{name}.data"))
        for mine, part in zip(held, np.split(gathered, np.cumsum([len(one) for one in held])[:-1]), strict=True):
            mine[:] = part
    del data
    return [pickle.loads(whole.pop(0).data) for _ in sizes]  # Keep few copies of large objects.


def send_object(
    value: object,
    sizes: Callable[[int], np.ndarray],
    send: Callable[[np.ndarray], tuple[np.ndarray, Sequence[int]]],
) -> dict[int, Any]:
    """Send a picklable value to one rank, in as many pieces as necessary; return the values received, by sender.

    Args:
        value: this rank's value.
        sizes: returns the sizes that all ranks have passed to it, in rank order.
        send: sends bytes to that rank; returns the bytes received, in order of senders, and how many from each.
    """
    data = _pickled(value)
    parts: dict[int, list[np.ndarray]] = {}
    for start in range(0, int(sizes(data.size).max()), AT_ONCE):
        received, counts = send(data[start : start + AT_ONCE])
        for sender, part in enumerate(np.split(received, np.cumsum(counts)[:-1])):
            if part.size:
                parts.setdefault(sender, []).append(part)
    return {sender: pickle.loads(np.concatenate(found).data) for sender, found in parts.items()}


def _pickled(value: object) -> np.ndarray:
    stream = io.BytesIO()
    pickle.dump(value, stream)
    return np.frombuffer(stream.getbuffer(), dtype=np.uint8)
