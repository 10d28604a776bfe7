"""Whether what a state holds is copied: for one that is written before training goes on, that would cost memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    lends = False


_thread = _Thread()


@contextmanager
def lending() -> Iterator[None]:
    """Let states that this thread asks for inside the block share memory with what training changes."""
    before, _thread.lends = _thread.lends, True
    try:
        yield
    finally:
        _thread.lends = before


def lends() -> bool:
    """Return whether this thread is inside of :func:`lending`."""
    return _thread.lends
