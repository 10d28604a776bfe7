"""Small records as 64-bit integers, encode and decode by the names of their fields."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def bits(value: float | None) -> int:
    """Return a float as the integer with the same 64 bits; None as NaN.

    Example:
        >>> bits(1.0), number(bits(0.1)), number(bits(None))
        (4607182418800017408, 0.1, None)
    """
    return int(struct.unpack("<q", struct.pack("<d", math.nan if value is None else value))[0])


def number(integer: int) -> float | None:
    """Return the float with these 64 bits; None for NaN."""
    value = float(struct.unpack("<d", struct.pack("<q", integer))[0])
    return None if math.isnan(value) else value


def pack(record: Any) -> list[int]:
    """Return the fields of a dataclass, ints and floats, as integers."""
    names, kinds, integers = _forms(record.__class__)
    values = [_as(kind, getattr(record, name)) for name, kind in zip(names, kinds[1:], strict=True)]
    return list(struct.unpack(integers, struct.pack(kinds, *values)))


def unpack(cls: type[T], integers: Sequence[int]) -> T:
    """Return the dataclass that :func:`pack` was given."""
    form_of: Any = cls
    names, kinds, form = _forms(form_of)
    return cls(**dict(zip(names, map(_known, struct.unpack(kinds, struct.pack(form, *integers))), strict=True)))


@cache
def _forms(cls: Any) -> tuple[list[str], str, str]:
    """Return a dataclass's field names, the ``struct`` codes of the fields, and the format of as many integers."""
    of_class = fields(cls)
    kinds = "".join("d" if is_real(field.type) else "q" for field in of_class)
    return [field.name for field in of_class], f"<{kinds}", f"<{len(kinds)}q"


def _as(kind: str, value: Any) -> int | float:
    """Return a value in the type to pack; None as NaN."""
    if kind == "q":
        return int(value)
    return math.nan if value is None else float(value)


def _known(value: Any) -> Any:
    """Return an integer or a float; None for NaN."""
    return None if math.isnan(value) else value


def is_real(annotation: Any) -> bool:
    """Return whether a field holds a float."""
    return str(annotation).startswith("float")
