"""Who takes part in each round of an exchange with a quorum."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.ranks import named, titled

SHARE = 0.1
"""Default of the grace: a fraction of the time from the last close to the arrival that completes the quorum."""


_SETS = ("_leaving", "_apart", "_gone", "_out")
_VALUES = ("_closed", "_last_sign", "_repeated", "failure")
"""Names of attributes: sets of workers, and numbers and a text."""

GAP = 1.0
"""Seconds between two questions after which a clock was not asked because its process was stopped."""


class AwakeClock:
    """The time, in seconds, for which a process has not been stopped, if it asks all the time.

    Example:
        >>> clock = AwakeClock()
        >>> clock() <= clock()
        True
    """

    def __init__(self) -> None:
        self._asked, self._stopped = time.monotonic(), 0.0

    def __call__(self) -> float:
        """Return the time."""
        now = time.monotonic()
        self._stopped += max(0.0, now - self._asked - GAP)
        self._asked = now
        return now - self._stopped


@dataclass(frozen=True)
class Quorum:
    """How many workers a round waits for.

    Attributes:
        size: q, the number of workers after whose arrival a round stays open only for the grace.
        grace: g, seconds from the arrival of the q-th worker to the close of the round; None: a tenth of the time from
            the last close to that arrival.
    """

    size: int
    grace: float | None = None


class Rounds:
    """Decides when a round closes, and with whom; knows neither messages nor tensors.

    A round closes when all workers have come, or ``grace`` seconds after the q-th came, with all that came by then. Who
    comes later takes part in the next one. The first round waits for all. A worker that is apart, leaving or gone is
    not waited for: q is at most the number of the others. Once all that are not gone are leaving, one round closes with
    all of them.

    Args:
        workers: global ranks of the workers, for messages; here, they are numbered from 0.
        quorum: how many of them a round waits for.
        timeout: returns the seconds for which workers wait for a missing one; None: for ever.
        now: returns the time in seconds. Default: an :class:`AwakeClock`, so that a root that was stopped receives what
            has come meanwhile before it finds somebody late.

    Attributes:
        failure: why no round will close any more; None as long as rounds close.
        replayed: the workers of the first rounds, which close with exactly these; then the quorum counts again.
        awake_since: the time before which this process was stopped; waiting before it does not count.

    Example:
        >>> clock = 0.0
        >>> rounds = Rounds([0, 1, 2], Quorum(2, grace=0.1), now=lambda: clock)
        >>> for worker in range(3):
        ...     rounds.come(worker)
        >>> rounds.members()
        [0, 1, 2]
        >>> rounds.close([0, 1, 2])
        >>> for clock, worker in ((1.0, 0), (1.05, 1)):
        ...     rounds.come(worker)
        >>> rounds.members()
        >>> clock = 1.2
        >>> rounds.members()
        [0, 1]
    """

    def __init__(
        self,
        workers: Sequence[int],
        quorum: Quorum,
        timeout: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._ranks, self._quorum, self._timeout, self._now = workers, quorum, timeout, now or AwakeClock()
        self._came: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._apart: set[int] = set()
        self._gone: set[int] = set()
        self._out: set[int] = set()
        self._calls: Counter[int] = Counter()
        self._closed: float | None = None
        self._last_sign = self._now()
        self.failure: str | None = None
        self.replayed: list[list[int]] = []
        self._repeated = 0
        self.awake_since = -math.inf

    def come(self, worker: int, leaving: bool = False) -> None:
        """Note that a worker waits for the close of a round; if it is leaving, for that of the last one."""
        self._came[worker] = self._last_sign = self._now()
        self._apart.discard(worker)
        self._out.discard(worker)
        if leaving:
            self._leaving.add(worker)
        if worker in self._gone:
            self.fail(f"Rank {self._ranks[worker]} came after the others had ended without it")

    def apart(self, worker: int, starts: bool) -> None:
        """Note that a worker is in another call from now on, in which it waits for all others, or no longer.

        All workers make the same calls, and end them all: of two, the one that has ended fewer is in the earlier call.
        A finalize() that has met others in another call is one of these calls as well.
        """
        self._last_sign = self._now()
        self._calls[worker] += not starts
        (self._apart.add if starts else self._apart.discard)(worker)

    def stay_out(self, worker: int, starts: bool) -> None:
        """Note that a worker comes to no round from now on, though it lives, or again.

        Its process ends without finalize(), or it is in adopt(), during which rounds must not wait for it. When it
        comes again, it is in no other call either: others that see it come may already wait for it in finalize().
        """
        self._last_sign = self._now()
        if starts:
            self._out.add(worker)
        else:
            self._out.discard(worker)
            self._apart.discard(worker)

    def gone(self, workers: Iterable[int]) -> None:
        """Note that workers will not come again."""
        for worker in workers:
            self._gone.add(worker)
            self._came.pop(worker, None)
            for each in (self._leaving, self._apart, self._out):
                each.discard(worker)

    def fail(self, text: str) -> None:
        """Let no round close any more; the first reason counts."""
        self.failure = self.failure or text

    @property
    def still_replayed(self) -> list[list[int]]:
        """The workers of the rounds that are still to be replayed."""
        return self.replayed[self._repeated :]

    @property
    def waiting(self) -> list[int]:
        """The workers that wait for the close of a round."""
        return sorted(self._came)

    @property
    def given_up(self) -> list[int]:
        """The workers that will not come again."""
        return sorted(self._gone)

    def members(self) -> list[int] | None:
        """Return the workers with which a round closes now; None if it stays open, or if no round closes any more."""
        now = self._now()  # A clock that has to be asked all the time.
        if self.failure is not None:
            return None
        if self.still_replayed:
            members = [worker for worker in self.still_replayed[0] if worker not in self._gone]
            return members if self._came.keys() >= set(members) else None
        absent = self._leaving | self._apart | self._gone | self._out
        expected = [worker for worker in range(len(self._ranks)) if worker not in absent]
        present = [worker for worker in expected if worker in self._came]
        if len(present) == len(expected):
            return present or (None if self._apart else self.waiting or None)
        size = min(self._quorum.size, len(expected))
        if self._closed is None or len(present) < size:
            return self._after_timeout(present, expected)
        complete = max(sorted(self._came[worker] for worker in present)[size - 1], self._closed)
        grace = SHARE * (complete - self._closed) if self._quorum.grace is None else self._quorum.grace
        return present if now - max(complete, self.awake_since) >= grace else None

    def in_vain(self) -> dict[int, str]:
        """Return the workers that wait in finalize() for one in a call such as save(), which waits for all; and why."""
        found = {}
        for leaving in sorted(self._leaving & self._came.keys()):
            ahead = [worker for worker in sorted(self._apart) if self._calls[worker] >= self._calls[leaving]]
            if ahead:
                one, other = titled([self._ranks[ahead[0]]]), named([self._ranks[leaving]])
                found[leaving] = (
                    f"{one} is in save() or another call that all ranks make, and {other} in finalize(): all ranks "
                    "must make the same calls in the same order"
                )
        return found

    def _after_timeout(self, present: Sequence[int], expected: Sequence[int]) -> list[int] | None:
        """Fail if workers have waited too long; if all of these are leaving, go on without the missing ones."""
        timeout = self._timeout()
        if timeout is None or not self._came or self._now() - max(self._last_sign, self.awake_since) < timeout:
            return None
        missing = [worker for worker in expected if worker not in present]
        if present or not self._leaving:
            waiting, late = (named(self._ranks[worker] for worker in each) for each in (self._came, missing))
            who = f"{waiting} waited for {late} longer than timeout_seconds={timeout:g}"
            self.fail(f"A round with quorum={self._quorum.size} did not close: {who}")
            return None
        self.gone(missing)
        return self.members()

    def dismiss(self, workers: Iterable[int]) -> None:
        """Note that workers do not wait any more, without a round: they may come again."""
        for worker in workers:
            self._came.pop(worker, None)
            self._leaving.discard(worker)

    def close(self, members: Sequence[int]) -> None:
        """Note that a round closes with some workers, which do not wait any more."""
        for worker in members:
            self._came.pop(worker, None)  # It may have died since its message came.
            self._leaving.discard(worker)
        self._repeated += bool(self.still_replayed)
        self._closed = self._last_sign = self._now()

    def save(self) -> dict[str, Any]:
        """Return all that changes, but for the rounds to replay, as lists and numbers, for :meth:`load`."""
        sets = {name: sorted(getattr(self, name)) for name in _SETS}
        return {
            **sets,
            "_came": list(self._came.items()),
            "_calls": list(self._calls.items()),
            **{name: getattr(self, name) for name in _VALUES},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` returned."""
        for name in _SETS:
            setattr(self, name, set(saved[name]))
        self._came, self._calls = dict(saved["_came"]), Counter(dict(saved["_calls"]))
        for name in _VALUES:
            setattr(self, name, saved[name])
