"""Loops over the blocks of a message, which numba compiles where it is installed: the same bytes in one pass.

In host memory, each loop does the work of a wire's ``quantize`` and packs the codes. Without numba, wires use the
operations of a ``Coding``, one after another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Rows = np.ndarray[Any, Any]
Loop = Callable[[Rows, Rows, Rows], None]
"""Encodes rows of float32: fills the scale of every block of 256, and the codes in as few bits as they have."""

_SIGNATURE = "void(f4[:, ::1], f4[:, ::1], u1[:, ::1])"


@cache
def compiled(loop: Loop) -> Loop | None:
    """Return the loop as machine code, which is kept on disk for the next process; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    if numba.config.DISABLE_JIT:
        return None
    try:
        found: Loop = numba.njit(_SIGNATURE, nogil=True, cache=True)(loop)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "cache" not in str(error):
            raise
        where = "numba has no folder to keep its machine code in: set NUMBA_CACHE_DIR to one"
        warnings.warn(f"Each process compiles {loop.__name__} again, since {where} ({error})", stacklevel=2)
        found = numba.njit(_SIGNATURE, nogil=True)(loop)
    return found


def ternary(rows: Rows, scales: Rows, codes: Rows) -> None:
    """Encode as :class:`~hvd_periodic.wires.int2.Int2`.

    Magnitudes are added half to half, as in :func:`~hvd_periodic.wires.blockwise.sums`: first all of them, which gives
    θ, and then those above θ.
    """
    zero, least, share = np.float32(0), np.float32(2.0**-126), np.float32(0.7)
    x, found, terms = np.zeros(256, np.float32), np.zeros(256, np.float32), np.zeros(256, np.float32)
    code = np.zeros(256, np.uint8)
    for row in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            start = 256 * block
            size = min(256, rows.shape[1] - start)
            for i in range(size):
                x[i] = rows[row, start + i]
            for i in range(size, 256):
                x[i] = zero
            for i in range(256):
                magnitude = abs(x[i]) * np.float32(1 / 256)
                found[i] = zero if magnitude <= least else magnitude
            threshold, divisor = np.float32(-1), np.float32(size)
            for turn in range(2):
                number = 0
                for i in range(256):
                    large = found[i] > threshold
                    terms[i] = found[i] * np.float32(large)
                    number += large
                half = 128
                while half > 0:
                    for i in range(half):
                        terms[i] += terms[half + i]
                    half //= 2
                if turn == 0:
                    threshold = terms[0] / divisor * share
                else:
                    divisor = np.float32(number) if number > 0 else np.float32(np.inf)
            scales[row, block] = terms[0] / divisor * np.float32(256)
            for i in range(256):
                code[i] = np.uint8(found[i] > threshold) << np.uint8(x[i] < zero)
            for i in range(-(-size // 4)):
                codes[row, start // 4 + i] = (
                    code[4 * i] | code[4 * i + 1] << 2 | code[4 * i + 2] << 4 | code[4 * i + 3] << 6
                )


def powers(rows: Rows, scales: Rows, codes: Rows) -> None:
    """Encode as :class:`~hvd_periodic.wires.e3m0.E3M0`; the exponents as in ``Coding.exponents``."""
    zero = np.float32(0)
    x, ratio, code = np.zeros(256, np.float32), np.zeros(256, np.float32), np.zeros(256, np.uint8)
    bits = ratio.view(np.int32)
    for row in range(rows.shape[0]):
        for block in range(scales.shape[1]):
            start = 256 * block
            size = min(256, rows.shape[1] - start)
            for i in range(size):
                x[i] = rows[row, start + i]
            for i in range(size, 256):
                x[i] = zero
            for i in range(256):
                ratio[i] = abs(x[i])
            half = 128
            while half > 0:
                for i in range(half):  # NaN stays.
                    other = ratio[half + i]
                    ratio[i] = ratio[i] if ratio[i] >= other or ratio[i] != ratio[i] else other
                half //= 2
            largest = ratio[0] * np.float32(ratio[0] > np.float32(2.0**-118))
            scales[row, block] = largest
            divisor = np.float32(np.inf) if largest == zero else largest
            for i in range(256):
                quotient = abs(x[i]) / divisor
                ratio[i] = max(quotient, np.float32(2.0**-6))
                code[i] = quotient > np.float32(2.0**-7)
            for i in range(256):
                level = ((bits[i] >> 23 & 1) + bits[i] + (0x3FFFFF - (127 << 23)) >> 23) + 7
                code[i] *= np.uint8(level + 8 * (x[i] < zero))
            for i in range(-(-size // 2)):
                codes[row, start // 2 + i] = code[2 * i] | code[2 * i + 1] << 4
