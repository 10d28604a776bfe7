"""Converts real numbers to whole steps, so that rounding errors do not add or drop a step."""

from __future__ import annotations

import math

_ROUNDING = 1e-6
"""Relative tolerance; a learning rate may be a float32."""


def floor(value: float) -> int:
    """Return the largest int not above ``value``, up to rounding errors.

    Example:
        >>> (0.3 / 0.1) ** 2, floor((0.3 / 0.1) ** 2)
        (8.999999999999998, 9)
    """
    return math.floor(value * (1 + _ROUNDING))


def ceil(value: float) -> int:
    """Return the smallest int not below ``value``, up to rounding errors.

    Example:
        >>> 0.07 * 100, ceil(0.07 * 100)
        (7.000000000000001, 7)
    """
    return math.ceil(value * (1 - _ROUNDING))
