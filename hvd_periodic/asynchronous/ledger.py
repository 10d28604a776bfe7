"""The counts of pushes, and the speeds of workers, that every holder of an asynchronous center keeps with its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.vectors.layout import Bucket


class Ledger:
    """Counts the pushes: of the open window of every bucket, and of every worker; or rounds of several workers.

    Args:
        buckets: number of buckets that are exchanged.
        memory: 64-bit integers, as many as :meth:`size` says.

    Attributes:
        windows: pushes to every bucket since the last window of n pushes was complete (k).
        pushes: pushes of every worker.
        taken: pushes of all workers, or rounds, when each worker last took the center.
        speeds: local steps per second of every worker, as it told at its last push, in float64; 0: not told yet.
        rounds: one integer: rounds of several workers; 0 if each pushes alone.
        group: two integers: the number of the last group of workers that waited for each other's pushes, from 1, and
            how many have joined it.
        opened: one float64: the time, in seconds, when the first of them joined.
    """

    def __init__(self, buckets: int, memory: np.ndarray) -> None:
        self.memory = memory
        workers = (memory.size - buckets - 4) // 3
        places = np.cumsum([buckets, workers, workers, 1, workers, 2])
        self.windows, self.pushes, self.taken, self.rounds, speeds, self.group, opened = np.split(memory, places)
        self.speeds, self.opened = speeds.view(np.float64), opened.view(np.float64)

    @staticmethod
    def size(buckets: int, workers: int) -> int:
        """Return the number of integers."""
        return buckets + 3 * workers + 4

    def begin(self, worker: int, speed: float) -> tuple[int, float]:
        """Count a push of a worker, and note its speed, unless that is 0 (unknown).

        Return its staleness, the pushes of others since the worker took the center; and its speed relative to the
        fastest worker, v_i / max_j v_j, or 0 until all have told theirs.
        """
        staleness = int(self.pushes.sum() - self.taken[worker])
        self.pushes[worker] += 1
        self.take([worker])
        self.speeds[worker] = speed or self.speeds[worker]
        return staleness, float(self.speeds[worker] / self.speeds.max()) if self.speeds.all() else 0.0

    def gather(self, group: int, now: float, grace: float) -> tuple[int, float]:
        """Let a worker that has pushed join the open group, or a new one; or look at the group in which it is.

        A group is open from its first member on for ``grace`` seconds, or until all workers are in it.

        Args:
            group: the number of the group; 0: join.
            now: the time in seconds.
            grace: seconds.

        Returns:
            The number of the group, and the seconds for which it stays open; 0 if it is closed.
        """
        number, members = self.group.tolist()
        left = max(0.0, self.opened[0] + grace - now) if 0 < members < self.pushes.size else 0.0
        if group:
            return group, float(left) if group == number else 0.0
        if left == 0:
            number, members = number + 1, 0
            self.opened[0] = now
        self.group[:] = number, members + 1
        return self.gather(number, now, grace)

    def take(self, workers: Sequence[int]) -> None:
        """Note that workers take the center now."""
        self.taken[list(workers)] = self.rounds[0] or self.pushes.sum()

    def staleness(self, workers: Sequence[int]) -> list[int]:
        """Return the staleness of workers in a round: the rounds since each took the center."""
        return [int(self.rounds[0] - self.taken[worker]) for worker in workers]

    def close(self, workers: Sequence[int]) -> None:
        """Count a round in which some workers move the center, and take it."""
        self.rounds += 1
        self.pushes[list(workers)] += 1
        self.take(workers)

    def save(self) -> dict[str, list[Any]]:
        """Return the counts and speeds as lists."""
        return {name: getattr(self, name).tolist() for name in ("windows", "pushes", "taken", "rounds", "speeds")}

    def load(self, saved: Mapping[str, list[Any]], taking: Sequence[int] = ()) -> None:
        """Set all to what :meth:`save` returned; of another number of workers, only the open windows.

        Args:
            saved: the counts; empty: zeros.
            taking: workers that take the center now.
        """
        for name, counts in saved.items():
            mine = getattr(self, name, None)
            if isinstance(mine, np.ndarray) and mine.size == len(counts):
                mine[:] = counts
        self.take(taking)

    def completes(self, bucket: int, size: int) -> bool:
        """Count a push to a bucket; return whether it completes a window of ``size`` pushes."""
        self.windows[bucket] += 1
        complete = bool(self.windows[bucket] >= size)
        if complete:
            self.windows[bucket] = 0
        return complete


def ledger_bucket(index: int, size: int) -> Bucket:
    """Return the bucket of a ledger."""
    return Bucket(index, "int64", 0, size, 8, ())


def lack(worker: int, own: Mapping[str, Any] | None, known: Mapping[str, Any], workers: int) -> str:
    """Return why what a worker has loaded does not belong to the center; empty if it does.

    Args:
        worker: its rank.
        own: the ledger in the state that it has loaded; None if there is no such state.
        known: the ledger of the center.
        workers: number of workers.
    """
    pushes = known.get("pushes", [])
    if len(pushes) != workers:
        return f"the state is one of {len(pushes)} workers, and there are {workers}"
    if not own:
        return "it has loaded no state"
    if own["worker"] != worker:
        return f"it has loaded the state of rank {own['worker']}"
    if own["pushes"][worker] != pushes[worker]:
        return f"its state is one after {own['pushes'][worker]} pushes, and the center has {pushes[worker]} of them"
    return ""
