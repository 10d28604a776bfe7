"""What a command says to arguments that make no sense: one line and an exit code, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RefusalError(Exception):
    """The command cannot do what it was asked for; the message says why, and what to do."""


@contextmanager
def refusing(about: str = "") -> Iterator[None]:
    """Let what the core refuses inside a ``with`` block be refused by the command.

    Args:
        about: what is being made, before the message.

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
