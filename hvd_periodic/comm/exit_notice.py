"""Exit notices: a process tells the others, which may still wait for it, that it ends and why."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Protocol

from hvd_periodic.comm.failures import OVER, wants_all

_HANGS = 10.0
"""Seconds after which a process that timed out ends, even if a library still waits for other ranks."""


class Others(Protocol):
    """The other ranks, as a process notifies them."""

    def first_error(self, error: BaseException) -> str | None:
        """Return why another rank ended before this error, if one did."""

    def is_first(self, text: str) -> bool:
        """Report an error to the others; return whether this process prints it, or another has printed one."""

    def summary(self, text: str) -> str | None:
        """Return which ranks ended with this error, and which with other errors; None if the job may go on."""

    def announce_exit(self, text: str) -> None:
        """Tell all others that this process ends, and why."""


def send_exit_notices(others: Others) -> None:
    """Notify the others when this process ends, and why, if an error ends it.

    ``sys.excepthook`` is chained: the previous hook runs first. Python's own hook, which prints the traceback, runs on
    only one of the ranks that fail.

    Args:
        others: the ranks to notify.
    """
    before, process = sys.excepthook, os.getpid()
    failed: list[str] = []

    def failing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        by_all = wants_all() or before is not sys.__excepthook__ or hasattr(sys, "ps1") or os.getpid() != process
        if by_all:
            before(kind, error, trace)
        if hasattr(sys, "ps1") or os.getpid() != process:  # An interactive session goes on; a child is not a rank.
            return
        text = reason(kind, error, trace)
        first = others.first_error(error)
        prints = others.is_first(text)
        if prints and not by_all:
            before(kind, error, trace)
        if first is not None and str(error) and str(error) in first:
            first = None  # The other rank ended with the same error, reported to all, or because of this one.
        if (prints or by_all) and first is not None and first not in str(error):
            print(f"Before that: {first}", file=sys.stderr, flush=True)
        elif prints and (summary := others.summary(text)) is not None:
            print(summary, file=sys.stderr, flush=True)
        failed.append(first or text)
        others.announce_exit(failed[-1])
        if isinstance(error, TimeoutError) and "timeout_seconds=" in str(error):
            atexit.register(_end_soon)  # At exit, Horovod waits for all ranks, and one of them will not arrive.

    def leaving() -> None:
        if os.getpid() == process:
            others.announce_exit(failed[-1] if failed else OVER)

    sys.excepthook = failing
    atexit.register(leaving)


def _end_soon() -> None:
    end = threading.Timer(_HANGS, os._exit, [1])
    end.daemon = True
    end.start()


def reason(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return an error as one line, with its location in the program."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<frozen")]
    text = " ".join("".join(traceback.format_exception_only(kind, error)).split())
    return f"{text} ({frames[0].filename}:{frames[0].lineno})" if frames else text
