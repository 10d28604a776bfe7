"""Checks the values in a line of a run log, so that readers of the log can rely on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from reprlib import repr as shortened
from typing import Any, TypeVar

from hvd_periodic.journal.base import Report, Total

SECONDS = 6e10
"""The longest duration, and the time farthest from 1970, that a line may contain: a year must fit in four digits."""

ENORMOUS = 1e100
"""The largest number that counts as finite: means and axes of larger numbers overflow."""

_COUNT = 2**63
_RANKS = 2**31
_NOT_FINITE = ("nan", "inf", "-inf")
"""Spellings of the numbers that JSON does not have."""

R = TypeVar("R", Report, Total)

Check = Callable[[Any], Any]
"""Returns the value to keep, or raises a ValueError that says what it should be, such as "not a number"."""


def count(value: Any) -> int:
    """Return an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT:
        raise ValueError("not a count")
    return value


def number(value: Any) -> float:
    """Return any number; NaN and infinity are strings in the log, numbers beyond :data:`ENORMOUS` become infinite."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in _NOT_FINITE):
        raise ValueError("not a number")
    if isinstance(value, str) or abs(value) <= ENORMOUS or value != value:
        return float(value)
    return math.copysign(math.inf, 1 if value > 0 else -1)


def seconds(value: Any) -> float:
    """Return a duration, or a time in seconds since 1970."""
    found = number(value)
    if not abs(found) <= SECONDS:
        raise ValueError("not a time")
    return found


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def text(value: Any) -> str:
    """Return a string that can be written into a file."""
    if not isinstance(value, str):
        raise ValueError("not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("not a string that can be encoded") from None
    return value


def ranks(value: Any) -> list[int]:
    """Return a list of distinct ranks, at least one."""
    if not isinstance(value, list) or not value:
        raise ValueError("not a list of ranks")
    found = [count(each) for each in value]
    if len(set(found)) < len(found) or max(found) >= _RANKS:
        raise ValueError("not a list of distinct ranks")
    return found


def plain(value: Any) -> Any:
    """Return a number, a string, a boolean, None, or a list of these."""
    if isinstance(value, list):
        return [_scalar(each) for each in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int) and abs(value) < _COUNT:
        return value
    if isinstance(value, float):
        return value
    raise ValueError("neither a number nor a string")


_COUNTS = ("version", "optimizer", "period", "step", "elements", "tensors", "bytes", "fragments", "quorum")
_TEXTS = (
    "event",
    "name",
    "algorithm",
    "schedule",
    "host",
    "framework",
    "package",
    "python",
    "center",
    "transport",
    "compression",
    "outer_optimizer",
)
_FACTS: dict[str, Check] = {
    **dict.fromkeys(_COUNTS, count),
    **dict.fromkeys(_TEXTS, text),
    "time": seconds,
    "ranks": ranks,
    "closes": number,
    "asynchronous": flag,
}
"""Checks of the facts of a beginning; its other facts are plain."""

_ANY_NUMBER = ("loss", "learning_rate", "distance", "closed", "message_norm", "mean_norm")
_KINDS: dict[str, Check] = {"int": count, "bool": flag, "float": seconds, "Sequence[int]": ranks}
_FIELDS: dict[type[Report] | type[Total], dict[str, tuple[Check, Any]]] = {
    kind: {
        each.name: (
            number if each.name in _ANY_NUMBER else _KINDS[str(each.type).removesuffix(" | None")],
            None if each.default is MISSING and "None" in str(each.type) else each.default,
        )
        for each in fields(kind)
    }
    for kind in (Report, Total)
}
"""Fields of exchanges and ends, by name: the check of the field, and its value if a line lacks it."""


def beginning(line: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the facts of a beginning on one rank.

    Raises:
        ValueError: a fact is missing or invalid.
    """
    for name in ("version", "time", "ranks", "algorithm"):
        if line.get(name) is None:
            raise ValueError(f"it lacks {name}")
    facts = {name: _checked(name, value, _FACTS.get(name, plain)) for name, value in line.items() if value is not None}
    if rank not in facts["ranks"]:
        raise ValueError(f"it belongs to ranks {shortened(facts['ranks'])}, and the file to rank {rank}")
    return facts


def read(kind: type[R], line: Mapping[str, Any]) -> R:
    """Return the report of an exchange, or the totals at an end; raises as :func:`beginning`."""
    known: dict[str, Any] = {}
    for name, (check, default) in _FIELDS[kind].items():
        value = line.get(name)
        if value is None and default is MISSING:
            raise ValueError(f"it lacks {name}")
        known[name] = default if value is None else _checked(name, value, check)
    return kind(**known)


def _checked(name: str, value: Any, check: Check) -> Any:
    """Return the checked value; the error of an invalid one names it."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{shortened(name)[1:-1]}={shortened(value)} is {error}") from None
