"""Ranks that fail together: one of them prints its traceback, and names the others that have ended."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection

from hvd_periodic.comm.stall_protocol import TEXT_BYTES, Datagram, MessageType
from hvd_periodic.ranks import titled

VARIABLE = "HVD_PERIODIC_TRACEBACKS"
"""Environment variable: ``all`` makes every rank that fails print its traceback."""

_OTHERS = 3
"""Number of other errors shown."""

OVER = "its program is over, or has called sys.exit()"
"""Reason given by a process that ends without an error: Python does not reveal the exit code beforehand."""


def wants_all() -> bool:
    """Return whether every rank is to print its traceback."""
    return os.environ.get(VARIABLE, "").strip().lower() == "all"


class Failures:
    """Errors of other ranks: of ranks that are about to end, and of ranks that have printed theirs and end."""

    def __init__(self) -> None:
        self._notes: dict[int, Datagram] = {}
        self._changed = threading.Condition()

    def hear(self, note: Datagram) -> None:
        """Record an error, or the end, of another rank."""
        with self._changed:
            self._notes[note.rank] = note
            self._changed.notify_all()

    def is_first(self, rank: int, text: str, others: Collection[int], seconds: float) -> bool:
        """Return whether this rank is to print its error: it is the first, or the first has not done so in time.

        Every rank that fails notifies all others before this call. If several fail at once, the first is the lowest
        rank whose error does not quote another rank's error.

        Args:
            rank: this rank.
            text: its error.
            others: the ranks whose notices can reach it.
            seconds: how long it waits for notices of errors, and then for the first rank to print.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._printed() or self._notes.keys() >= set(others), seconds)
            if not self._printed() and self._first(rank, text) != rank:
                self._changed.wait_for(self._printed, seconds)
            return not self._printed()

    def summary(self, rank: int, text: str, size: int, where: str) -> str:
        """Return which ranks ended with which errors, this rank's error last.

        Args:
            rank: this rank, which has printed its traceback.
            text: its error.
            size: number of ranks.
            where: the local step in words, or an empty string.
        """
        with self._changed:
            texts = self._texts(rank, text)
        groups: dict[str, list[int]] = {}
        for other, told in texts.items():
            if not _quotes(told, texts[rank]):
                groups.setdefault(_kind(told), []).append(other)
        alike = next(members for members in groups.values() if rank in members)
        different = [members for members in groups.values() if rank not in members]
        lines = [f"{titled(each)} failed at the same time: {texts[each[0]]}" for each in different[:_OTHERS]]
        have, them = ("have", "them") if len(alike) > 1 else ("has", "it")
        ended = f"{titled(alike)} of {size} {have} ended{where}, and the job with {them}: {text}"
        return "\n".join([*lines, f"{ended}. {VARIABLE}=all prints the traceback of every rank"])

    def _printed(self) -> bool:
        return any(note.kind == MessageType.EXIT and note.text != OVER for note in self._notes.values())

    def _texts(self, rank: int, text: str) -> dict[int, str]:
        """Return the errors by rank."""
        texts = {note.rank: note.text for note in self._notes.values() if note.text != OVER}
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
