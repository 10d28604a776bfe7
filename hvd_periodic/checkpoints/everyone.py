"""All ranks of a training, also where they exchange on several levels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvd_periodic.comm.together import Together

T = TypeVar("T")


class Everyone:
    """Tells all ranks of a training what each of them has to say, in as many hops as there are levels.

    Args:
        levels: the ranks that train together with this one, of the innermost optimizer first.
        root: the global rank that all start from.

    Attributes:
        rank: this one, counted over the job.
        root: as given.
        levels: sets of global ranks, innermost first, which tell whether a training goes on among the same ranks.
        from_any_thread: a thread may talk to other ranks while training does.
    """

    def __init__(self, levels: Sequence[Together], root: int) -> None:
        self._levels: list[Together] = []
        self.levels: list[list[int]] = []
        self.root = root
        outermost = levels[-1].exchanging
        self.rank = outermost.global_rank
        for level in levels:
            ranks = [each.global_ranks for each in (level.group, level.exchanging) if each is not None]
            if any(members not in self.levels for members in ranks):
                self.levels += [members for members in ranks if members not in self.levels]
                self._levels.append(level)
        self.from_any_thread = all(
            each.from_any_thread for level in levels for each in (level.group, level.exchanging) if each is not None
        )

    @property
    def is_root(self) -> bool:
        """Whether all start from this rank."""
        return self.rank == self.root

    @property
    def among(self) -> str:
        """A text that is the same where this rank trains among the same ranks."""
        return hashlib.sha256(json.dumps([self.rank, self.levels]).encode()).hexdigest()[:16]

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank. Collective."""
        known = {self.rank: value}
        for level in self._levels:
            heard = level.gather(known, f"checkpoint.{name}")
            known = {rank: said for part in heard.values() for rank, said in part.items()}
        return dict(sorted(known.items()))

    def attempt(self, name: str, work: Callable[[], T]) -> dict[int, T]:
        """Return what the work of all ranks has come to; where it fails on one, raise on all. Collective.

        Raises:
            Exception: what ``work`` raised on this rank.
            RuntimeError: it succeeded here and failed elsewhere; cites the first error.
        """
        failure: Exception | None = None
        done: Any = None
        try:
            done = work()
        except Exception as error:
            failure = error
        told = self.gather((done, failure and f"{type(failure).__name__}: {failure}"), name)
        if failure is not None:
            raise failure
        failed = {rank: report for rank, (_, report) in told.items() if report}
        if failed:
            rank, report = next(iter(failed.items()))
            raise RuntimeError(f"The checkpoint failed on rank {rank} ({len(failed)} of {len(told)} ranks): {report}")
        return {rank: value for rank, (value, _) in told.items()}
