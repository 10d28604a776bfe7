"""A question to all that are waited for: who is asked when, and what is said of their answers."""

from __future__ import annotations

import math
import sys
import sysconfig
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hvd_periodic.comm.attendance import Attendance, Wait
from hvd_periodic.comm.presence import Note
from hvd_periodic.comm.roster import absent

_PATIENCE = 3.0
"""Seconds in which a rank that is alive answers."""

_AGAIN = 0.5
"""Seconds after which it is asked again: datagrams get lost, and ranks come meanwhile."""

_AT_ONCE, TICK = 64, 0.05
"""Ranks that are asked at once, and seconds until the next are: a socket holds some hundred datagrams."""

_NAMED = 8
"""Ranks that are described one by one."""


@dataclass
class Inquiry:
    """Asks who has come to a collective.

    Attributes:
        attendance: among which ranks.
        wait: for which collective.
        number: tells answers from those of inquiries before.
        final: the wait has been too long.
        began: when the first question was sent.
        asked: when a rank was asked last.
        answers: by rank.
    """

    attendance: Attendance
    wait: Wait
    number: int
    final: bool
    began: float
    asked: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Note] = field(default_factory=dict)

    def others(self) -> list[int]:
        """Return all ranks but this one, beginning with the next: where all ask at once, each is asked by one."""
        ranks, own = self.attendance.ranks, self.attendance.ranks.index(self.attendance.rank)
        return [*ranks[own + 1 :], *ranks[:own]]

    def is_over(self, now: float) -> bool:
        """Return whether all ranks that can be reached have answered, or had the time for it."""
        reachable = [rank for rank in self.others() if rank in self.attendance.peers]
        patience = _PATIENCE + TICK * len(reachable) / _AT_ONCE
        return all(rank in self.answers for rank in reachable) or now - self.began >= patience

    def to_be_asked(self, now: float) -> list[int]:
        """Return some of the ranks that have not come, as far as is known, and were not asked just now."""
        due = [rank for rank in self.missing() if now - self.asked.get(rank, -math.inf) >= _AGAIN]
        return due[:_AT_ONCE]

    def missing(self) -> list[int]:
        """Return the ranks that have not come, as far as is known."""
        has_come = self.attendance.has_come
        come = {rank for rank, note in self.answers.items() if has_come(rank, note.begun, self.wait.number)}
        return [rank for rank in self.others() if rank not in come]

    def holding_up(self) -> list[int]:
        """Return the ranks that have not come, and do not wait for others themselves, as they have said."""
        return [rank for rank in self.missing() if rank in self.answers and not self.answers[rank].seconds > 0]


def report(inquiry: Inquiry, now: float, one_host: bool) -> str:
    """Return who has not come, in words.

    Args:
        inquiry: with the answers.
        now: in seconds of the monotonic clock.
        one_host: all ranks are on this one.
    """
    attendance = inquiry.attendance
    waited = f"Rank {attendance.rank} has waited {seconds_of(now - inquiry.wait.since)} in {attendance.place()}"
    if not attendance.peers:
        missing = absent(attendance.name, attendance.ranks, attendance.rank, one_host)
        if missing is None:
            return f"{waited}. Who has not come is not known: these ranks have not met before. {_ELSEWHERE}"
    else:
        missing = sorted(inquiry.missing())
    if not missing:
        return f"{waited}. All ranks have come: data are on their way, or the network has stopped"
    named = "; ".join(describe(inquiry, rank) for rank in missing[:_NAMED])
    more = f"; and {len(missing) - _NAMED} others do not" if len(missing) > _NAMED else ""
    return f"{waited}: {named}{more}"


_ELSEWHERE = "In a job of Horovod, its own warning of a stall, on rank 0, names them"


def describe(inquiry: Inquiry, rank: int) -> str:
    """Return where a rank is that has not come."""
    attendance, answer = inquiry.attendance, inquiry.answers.get(rank)
    gone = attendance.gone.get(rank)
    if gone is not None:
        return f"rank {rank} has ended: {gone.text}"
    if answer is not None:
        what = f"waits for {seconds_of(answer.seconds)} in" if answer.seconds > 0 else "is in"
        return f"rank {rank}{at_step(answer.local_steps)} does not come: it {what} {answer.text}"
    seen = attendance.last_seen(rank)
    last = "it was not met before" if seen is None else f"it was met last at local step {seen}"
    if not attendance.peers:
        return f"rank {rank} does not come"
    if rank not in attendance.peers:
        return f"rank {rank} may not have come, and cannot be asked; {last}"
    return f"rank {rank} does not answer; {last}"


def at_step(local_steps: int) -> str:
    """Return a local step in words, where it is known."""
    return f" at local step {local_steps}" if local_steps >= 0 else ""


def seconds_of(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> seconds_of(0.25), seconds_of(90.4)
        ('0.2 s', '90 s')
    """
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def position() -> str:
    """Return where the main thread of this process is, in the user's own code where there is some."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _PACKAGE)
    first = frame
    while frame is not None and frame.f_code.co_filename.startswith((*libraries, "<frozen")):
        frame = frame.f_back
    found = frame or first
    if found is None:
        return "no code of Python"
    return f"{found.f_code.co_name}(), {found.f_code.co_filename}:{found.f_lineno}"


_PACKAGE = str(Path(__file__).parents[1])
