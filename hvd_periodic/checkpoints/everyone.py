"""All ranks of a training, even if they exchange on several levels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvd_periodic.comm.together import Together

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of some work on this rank, which all ranks must know.

    Attributes:
        done: the result, if the work succeeded.
        failure: the error, if it failed.
    """

    done: T | None
    failure: Exception | None

    @classmethod
    def of(cls, work: Callable[[], T]) -> Outcome[T]:
        """Return the outcome of some work."""
        try:
            return cls(work(), None)
        except Exception as error:
            return cls(None, error)

    @property
    def told(self) -> tuple[T | None, str | None]:
        """The message to the other ranks: the result, or the error in words."""
        return self.done, None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def on_all(self, told: Mapping[int, Any]) -> dict[int, T]:
        """Return the results of all ranks by rank, given the messages of all.

        Raises:
            Exception: the work failed on this rank; the error itself.
            RuntimeError: it succeeded here but failed elsewhere; cites the first error.
        """
        if self.failure is not None:
            raise self.failure
        failed = {rank: report for rank, (_, report) in told.items() if report}
        if failed:
            rank, report = next(iter(failed.items()))
            raise RuntimeError(f"The checkpoint failed on rank {rank} ({len(failed)} of {len(told)} ranks): {report}")
        return {rank: value for rank, (value, _) in told.items()}


class Everyone:
    """Gathers values from all ranks of a training, in as many hops as there are levels.

    Args:
        levels: the ranks that train together with this one, for each optimizer, innermost first.
        root: the global rank from which all ranks start.

    Attributes:
        rank: the global rank of this process.
        root: as given.
        levels: sets of global ranks, innermost first, which show whether training resumes among the same ranks.
        one_level: all ranks take part in an exchange of the outermost optimizer.
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
        self.one_level = len(levels) == 1

    @property
    def is_root(self) -> bool:
        """Whether all ranks start from this one."""
        return self.rank == self.root

    @property
    def among(self) -> str:
        """A text that is equal whenever this rank trains among the same ranks."""
        return hashlib.sha256(json.dumps([self.rank, self.levels]).encode()).hexdigest()[:16]

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank. Collective."""
        known = {self.rank: value}
        for level in self._levels:
            heard = level.gather(known, f"checkpoint.{name}")
            known = {rank: said for part in heard.values() for rank, said in part.items()}
        return dict(sorted(known.items()))

    def attempt(self, name: str, work: Callable[[], T]) -> dict[int, T]:
        """Return the results of some work on all ranks; if it fails on one, raise on all. Collective.

        Raises:
            Exception: as :meth:`Outcome.on_all`.
        """
        outcome = Outcome.of(work)
        return outcome.on_all(self.gather(outcome.told, name))

    def alive(self) -> bool:
        """Return whether the ranks can still reach each other."""
        return all(
            each.alive() for level in self._levels for each in (level.group, level.exchanging) if each is not None
        )
