"""Named tensors as users pass them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def unique_pairs(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Return (name, tensor) pairs as a list; a tensor with several names (tied weights) occurs once.

    Args:
        pairs: a list, an iterator, or the items of a dict.

    Raises:
        TypeError: the elements are not pairs of a string and a tensor.
        ValueError: one name for two different tensors.
    """
    by_name: dict[str, T] = {}
    first: dict[int, tuple[str, T]] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "`model` must give (name, tensor) pairs, as model.named_parameters() does. "
                f"Received an element of type {type(pair).__name__}"
            )
        name, tensor = pair
        if name in by_name and by_name[name] is not tensor:
            raise ValueError(f"`model` must have unique names. Received: {name!r} for two different tensors")
        by_name[name] = tensor
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())
