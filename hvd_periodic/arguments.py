"""Checks of arguments, with uniform messages that use the names the user has typed."""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec

P = ParamSpec("P")

_spellings: ContextVar[Mapping[str, str]] = ContextVar("spellings", default=MappingProxyType({}))


@contextmanager
def spelled(spelling: Mapping[str, str]) -> Iterator[None]:
    """Make messages inside a ``with`` block name classes and arguments as a named constructor does.

    An enclosing block, of what was typed, has precedence.

    Args:
        spelling: the user's names, by the names of the core.

    Example:
        >>> with spelled({"period": "interval_steps"}):
        ...     as_typed("period"), as_typed("center")
        ('interval_steps', 'center')
    """
    token = _spellings.set({**spelling, **_spellings.get()})
    try:
        yield
    finally:
        _spellings.reset(token)


def as_typed(name: str) -> str:
    """Return the user's name of a class or an argument of the core, for a message; see :func:`spelled`."""
    return _spellings.get().get(name, name)


def refuse_both(one: str, other: str, given: Collection[str]) -> None:
    """Raise a TypeError if two names of one argument are given.

    Example:
        >>> refuse_both("period", "interval_steps", ["model", "period"])
    """
    if one in given and other in given:
        raise TypeError(f"`{one}` and `{other}` are two names of one argument: pass one of them")


def also_period(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor that takes the period under another name take it as ``period``, too, unless that is None.

    Messages use the name that was given.

    Args:
        name: the other name.

    Raises:
        TypeError: by the constructor: both are given.

    Example:
        >>> class Setup:
        ...     @also_period("interval_steps")
        ...     def __init__(self, interval_steps=100, *, period=None):
        ...         with spelled({"period": "interval_steps"}):
        ...             self.typed = as_typed("period")
        >>> Setup(10).typed, Setup(period=10).typed
        ('interval_steps', 'period')
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        parameters = list(inspect.signature(construct).parameters)

        @wraps(construct)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            alone = kwargs.get("period") is None
            refuse_both(name, "period", [] if alone else [*parameters[: len(args)], *map(str, kwargs)])
            with spelled({} if alone else {"period": "period"}):
                construct(*args, **kwargs)

        return checked

    return decorate


def outer_name() -> str:
    """Return the user's name of the argument for the center's optimizer."""
    return as_typed("outer_optimizer")


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


def seconds_in_environment(variable: str, default: float, least: float, allowed: str) -> float:
    """Return the seconds that an environment variable sets.

    Args:
        variable: the variable.
        default: the seconds if it is not set, or empty.
        least: the least value.
        allowed: that, in the words of the error.

    Raises:
        ValueError: they are not a number of at least ``least``.
    """
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        raise ValueError(
            f"The environment variable {variable} must be a number of seconds, {allowed}. Received: {text!r}"
        )
    return seconds


def described(value: object) -> str:
    """Return ``repr(value)`` without the addresses of objects, so that it is equal on all ranks.

    Example:
        >>> described(object())
        '<object object>'
    """
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


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


def refuse_asynchronous(given: bool, option: str, received: object, why: str) -> None:
    """Raise a ValueError if an option was given that asynchronous exchange does not have."""
    if given:
        raise ValueError(
            f"`{option}` is for synchronous exchange: with asynchronous=True {why}. Received: {option}={received!r}"
        )


def refuse_with_quorum(quorum: int | None, **options: tuple[object, bool]) -> None:
    """Raise a ValueError for options, each with its value and whether it was given, that a quorum, if any, excludes."""
    for option, (received, given) in options.items():
        if quorum is not None and given:
            raise ValueError(
                f"`{option}` is not available with `quorum`, where ranks may be missing in a round. Received: "
                f"{option}={received!r}, quorum={quorum!r}"
            )
