"""Refusal of a command: one line and an exit code, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RefusalError(Exception):
    """The command cannot run as requested; the message says why, and how to proceed."""


@contextmanager
def refusing(about: str = "") -> Iterator[None]:
    """Turn errors of the core inside a ``with`` block into refusals of the command.

    Args:
        about: subject of the error, which precedes the message.

    Example:
        >>> with refusing("easgd"):
        ...     raise ValueError("the rate must be positive")
        Traceback (most recent call last):
        hvd_periodic.cli.refusal.RefusalError: easgd: the rate must be positive
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise RefusalError(f"{about}: {error}" if about else str(error)) from error
