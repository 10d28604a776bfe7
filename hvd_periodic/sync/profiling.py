"""Ranges that profilers show: the parts of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hvd_periodic.sync.exchanger import Exchanger


F = TypeVar("F", bound=Callable[..., Any])


def profiler_range(exchanger: Exchanger[Any], name: str) -> AbstractContextManager[object]:
    """Return a range ``hvd_periodic.NAME``, which lasts as long as a ``with`` block."""
    return exchanger.context.exchanged.replica.range(f"hvd_periodic.{name}")


def profiled(name: str) -> Callable[[F], F]:
    """Return what makes a range of a method of a course."""

    def decorate(method: F) -> F:
        @wraps(method)
        def within(self: Exchanger[Any], *args: Any, **kwargs: Any) -> Any:
            with profiler_range(self, name):
                return method(self, *args, **kwargs)

        return within  # type: ignore[return-value]

    return decorate
