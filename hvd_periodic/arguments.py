"""Checks of arguments, with one wording for all."""

from __future__ import annotations

import operator


def require_int(value: object, argument: str, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``; numpy integers are ints, bools are not.

    Raises:
        TypeError: not an int.
        ValueError: below ``minimum``.
    """
    message = f"{argument} must be an int >= {minimum}. Received: {value!r}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(message)
    number = operator.index(value)
    if number < minimum:
        raise ValueError(message)
    return number


def require_real(value: object, argument: str, *, positive: bool) -> float:
    """Return ``value`` as a finite float, above zero or at least zero.

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    message = f"{argument} must be {'positive' if positive else 'zero or positive'} and finite. Received: {value!r}"
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{argument} must be a number. Received: {value!r}")
    number = float(value)
    if not (0 < number < float("inf") or (number == 0 and not positive)):
        raise ValueError(message)
    return number


def require_momentum(value: object, argument: str) -> float:
    """Return ``value`` as a float in [0, 1).

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    number = require_real(value, argument, positive=False)
    if number >= 1:
        raise ValueError(f"{argument} must be in [0, 1). Received: {value!r}")
    return number
