"""Usage errors of a command: one line and an exit code, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """The command cannot run as requested; the message says why, and how to proceed."""


@contextmanager
def as_usage_error(about: str = "") -> Iterator[None]:
    """Turn errors of the core inside a ``with`` block into usage errors of the command.

    Args:
        about: subject of the error, which precedes the message.

    Example:
        >>> with as_usage_error("easgd"):
        ...     raise ValueError("the rate must be positive")
        Traceback (most recent call last):
        hvd_periodic.cli.usage_error.UsageError: easgd: the rate must be positive
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"{about}: {error}" if about else str(error)) from error
