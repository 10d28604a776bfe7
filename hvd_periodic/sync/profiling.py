"""Names the parts of an exchange for profilers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hvd_periodic.sync.exchanger import Exchanger


F = TypeVar("F", bound=Callable[..., Any])


def profiler_range(exchanger: Exchanger[Any], name: str) -> AbstractContextManager[object]:
    """Return a context manager whose block profilers show as the range ``hvd_periodic.NAME``."""
    return exchanger.context.exchanged.replica.range(f"hvd_periodic.{name}")


def profiled(name: str) -> Callable[[F], F]:
    """Return a decorator that marks a method of an :class:`Exchanger` as a profiler range."""

    def decorate(method: F) -> F:
        @wraps(method)
        def within(self: Exchanger[Any], *args: Any, **kwargs: Any) -> Any:
            with profiler_range(self, name):
                return method(self, *args, **kwargs)

        return within  # type: ignore[return-value]

    return decorate
