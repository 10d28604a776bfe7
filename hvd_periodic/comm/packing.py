"""Small records as integers of 64 bits, packed and unpacked by the names of their fields."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def bits(value: float | None) -> int:
    """Return a float as the integer of the same 64 bits; None as NaN.

    Example:
        >>> bits(1.0), number(bits(0.1)), number(bits(None))
        (4607182418800017408, 0.1, None)
    """
    return int(struct.unpack("<q", struct.pack("<d", math.nan if value is None else value))[0])


def number(integer: int) -> float | None:
    """Return the float of these 64 bits; None of NaN."""
    value = float(struct.unpack("<d", struct.pack("<q", integer))[0])
    return None if math.isnan(value) else value


def pack(record: Any) -> list[int]:
    """Return the fields of a dataclass, ints and floats, as integers."""
    values = [(getattr(record, field.name), is_real(field.type)) for field in fields(record)]
    return [bits(value) if real else int(value) for value, real in values]


def unpack(cls: type[T], integers: Sequence[int]) -> T:
    """Return what :func:`pack` was given."""
    of_class = fields(cls)  # type: ignore[arg-type]
    pairs = zip(of_class, integers, strict=True)
    return cls(**{field.name: number(value) if is_real(field.type) else value for field, value in pairs})


def is_real(annotation: Any) -> bool:
    """Return whether a field holds a float."""
    return str(annotation).startswith("float")
