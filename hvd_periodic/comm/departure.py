"""The end of a process that others may still wait for: they are told of it, and why."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

_HANGS = 10.0
"""Seconds after which a process that has waited too long ends, also where a library waits for others then."""

OVER = "its program is over, or has called sys.exit()"
"""Why a process ends that no error has ended: Python tells its exit code to nobody before its end."""


def watch_end(tell: Callable[[str], None], first_error: Callable[[BaseException], str | None]) -> None:
    """Tell others when this process ends, and why where an error ends it.

    ``sys.excepthook`` is chained: what was there before comes first, and prints.

    Args:
        tell: sends a reason to all others.
        first_error: returns why another rank has ended before an error, if one has.
    """
    before, process = sys.excepthook, os.getpid()
    failed: list[str] = []

    def failing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if hasattr(sys, "ps1") or os.getpid() != process:  # An interactive session goes on; a child is no rank.
            return
        first = first_error(error)
        if first is not None and str(error) and str(error) in first:
            first = None  # The other has ended of the same error, which all were told of, or of this one.
        if first is not None and first not in str(error):
            print(f"Before that: {first}", file=sys.stderr, flush=True)
        failed.append(first or reason(kind, error, trace))
        tell(failed[-1])
        if isinstance(error, TimeoutError) and "timeout_seconds=" in str(error):
            atexit.register(_end_soon)  # Horovod waits for all ranks at its end, and one of them does not come.

    def leaving() -> None:
        if os.getpid() == process:
            tell(failed[-1] if failed else OVER)

    sys.excepthook = failing
    atexit.register(leaving)


def _end_soon() -> None:
    end = threading.Timer(_HANGS, os._exit, [1])
    end.daemon = True
    end.start()


def reason(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return an error in one line, with the place in the program where it has come from."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<frozen")]
    text = " ".join("".join(traceback.format_exception_only(kind, error)).split())
    return f"{text} ({frames[0].filename}:{frames[0].lineno})" if frames else text
