"""Exit notices: a process tells the others, which may still wait for it, that it ends and why.

If several ranks fail together, one prints its traceback and a summary of which ranks ended with which errors.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection
from types import TracebackType
from typing import Protocol

from hvd_periodic.comm.process_end import end_soon
from hvd_periodic.comm.stall_protocol import TEXT_BYTES, Datagram, MessageType
from hvd_periodic.ranks import titled

VARIABLE = "HVD_PERIODIC_TRACEBACKS"
"""Environment variable: ``all`` makes every rank that fails print its traceback."""

OVER = "its program is over, or has called sys.exit()"
"""Reason given by a process that ends without an error: Python does not reveal the exit code beforehand."""

_OTHERS = 3
"""Number of other errors shown."""


class Others(Protocol):
    """The interface through which a process notifies the other ranks."""

    def first_error(self, error: BaseException) -> str | None:
        """Return why another rank ended before this error; None if none did."""

    def is_first(self, text: str) -> bool:
        """Report an error to the others; return whether this process has to print it because no other has."""

    def summary(self, text: str) -> str | None:
        """Return which ranks ended with this error, and which with other errors; None if the job may go on."""

    def announce_exit(self, text: str) -> None:
        """Notify all others that this process ends, and why."""


def prints_every_traceback() -> bool:
    """Return whether every rank that fails has to print its traceback."""
    return os.environ.get(VARIABLE, "").strip().lower() == "all"


def send_exit_notices(others: Others) -> None:
    """Notify the others when this process ends, and why, if an error ends it.

    ``sys.excepthook`` is chained: the previous hook runs first. Python's own hook, which prints the traceback, runs on
    only one of the failing ranks; an exit function, which could read ``sys.last_value``, could not achieve this.
    Tests: ``test_failures.py::test_one_rank_prints_its_traceback`` and
    ``test_failures.py::test_a_hook_of_the_user_is_called_on_every_rank``.
    """
    before, process = sys.excepthook, os.getpid()
    failed: list[str] = []

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ends_job = not hasattr(sys, "ps1") and os.getpid() == process  # A session goes on; a child is not a rank.
        by_all = not ends_job or prints_every_traceback() or before is not sys.__excepthook__
        if by_all:
            before(kind, error, trace)
        if not ends_job:
            return
        text = _one_line(kind, error, trace)
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
            atexit.register(end_soon)  # At exit, Horovod waits for all ranks, and one of them will not arrive.

    def on_exit() -> None:
        if os.getpid() == process:
            others.announce_exit(failed[-1] if failed else OVER)

    sys.excepthook = on_error
    atexit.register(on_exit)


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return an error as one line, with its location in the program."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<frozen")]
    text = " ".join("".join(traceback.format_exception_only(kind, error)).split())
    return f"{text} ({frames[0].filename}:{frames[0].lineno})" if frames else text


class Failures:
    """Errors of other ranks that are about to end, before and after they have printed them."""

    def __init__(self) -> None:
        self._notices: dict[int, Datagram] = {}
        self._changed = threading.Condition()

    def record(self, notice: Datagram) -> None:
        """Record an error, or the end, of another rank."""
        with self._changed:
            self._notices[notice.rank] = notice
            self._changed.notify_all()

    def is_first(self, rank: int, text: str, others: Collection[int], seconds: float) -> bool:
        """Return whether this rank has to print its error: it is the first, or the first has not done so in time.

        Every rank that fails notifies all others before this call. If several fail at once, the first is the lowest
        rank whose error does not quote another rank's error. This one waits ``seconds`` for their notices, and as long
        for the first rank to print.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._printed() or self._notices.keys() >= set(others), seconds)
            if not self._printed() and self._first(rank, text) != rank:
                self._changed.wait_for(self._printed, seconds)
            return not self._printed()

    def summary(self, rank: int, text: str, size: int, where: str) -> str:
        """Return which of ``size`` ranks ended with which errors, this rank's last; ``where``: its step, in words."""
        with self._changed:
            texts = self._texts(rank, text)
        groups: dict[str, list[int]] = {}
        for other, its_text in texts.items():
            if not _quotes(its_text, texts[rank]):
                groups.setdefault(_kind(its_text), []).append(other)
        same = next(members for members in groups.values() if rank in members)
        different = [members for members in groups.values() if rank not in members]
        lines = [f"{titled(each)} failed at the same time: {texts[each[0]]}" for each in different[:_OTHERS]]
        have, them = ("have", "them") if len(same) > 1 else ("has", "it")
        ended = f"{titled(same)} of {size} {have} ended{where}, and the job with {them}: {text}"
        return "\n".join([*lines, f"{ended}. {VARIABLE}=all prints the traceback of every rank"])

    def _printed(self) -> bool:
        return any(notice.type == MessageType.EXIT and notice.text != OVER for notice in self._notices.values())

    def _texts(self, rank: int, text: str) -> dict[int, str]:
        """Return the errors by rank."""
        texts = {notice.rank: notice.text for notice in self._notices.values() if notice.text != OVER}
        texts[rank] = text.encode()[:TEXT_BYTES].decode(errors="ignore")
        return dict(sorted(texts.items()))

    def _first(self, rank: int, text: str) -> int:
        texts = self._texts(rank, text)
        causes = [each for each in texts if not any(_quotes(texts[each], other) for other in texts.values())]
        return min(causes, default=rank)


def _core(text: str) -> str:
    """Return an error without the modules of its class and its location in the program.

    Example:
        >>> _core("package.BadError: of its own (train.py:31)")
        'BadError: of its own'
    """
    return re.sub(r"^(\w+\.)+(?=\w+(: |$))", "", re.sub(r" \([^()]*:\d+\)$", "", text))


def _quotes(text: str, other: str) -> bool:
    """Return whether an error quotes another one."""
    return _kind(other) != _kind(text) and re.search(re.escape(_core(other)) + r"(?!\w)", text) is not None


def _kind(text: str) -> str:
    """Return an error without its numbers, which may differ between ranks."""
    return re.sub(r"\d+", "", _core(text))
