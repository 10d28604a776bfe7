"""One order on all ranks for the exchanges that one run of a session starts at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Condition
from typing import ClassVar

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.membership import Membership

Turn = Callable[[], AbstractContextManager[None]]
"""Returns a ``with`` block, the turn of one optimizer, which begins when all ranks are ready for its exchange."""

_PATIENCE_SECONDS = 600.0
"""How long a rank waits for the exchange of another of its optimizers, for which other ranks are ready."""

_GIVES_UP = -1
"""Replaces the number of an optimizer when a rank has waited for that long."""


class SessionTurns:
    """Makes all ranks run the exchanges of several optimizers in the same order.

    Independent operations of a session start in any order, which may differ between ranks, and a rank that exchanges
    keeps a thread of the session. Before each exchange, ranks therefore tell each other which optimizer is ready. If
    they differ, the optimizer with the smallest number goes first, and the others wait for its exchange on their rank.
    A session with one thread cannot start another exchange meanwhile: there, one optimizer must depend on the other.

    Attributes:
        constructed: number of optimizers constructed for these ranks; a single optimizer asks no other rank.
    """

    _of_ranks: ClassVar[dict[tuple[int, ...], SessionTurns]] = {}

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._condition = Condition()
        self._busy = False
        self._done: dict[int, int] = {}
        self.constructed = 0

    @classmethod
    def of(cls, membership: Membership) -> Turn:
        """Return the turn of an optimizer among the optimizers of the same ranks."""
        ranks = membership.communicator.global_ranks
        turns = cls._of_ranks.setdefault(tuple(ranks), cls(membership.communicator))
        turns.constructed += 1
        return partial(turns.turn, membership.number)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for the turn of an optimizer; it lasts until the ``with`` block ends."""
        self.begin(number)
        try:
            yield
        finally:
            self.end(number)

    def begin(self, number: int) -> None:
        """Wait until all ranks are ready for the exchange of this optimizer."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: not self._busy)
                self._busy = True
            if self.constructed == 1 or self._communicator.size == 1:
                return
            numbers = self._numbers_of_all(number)
            first = min(numbers)
            if first == max(numbers):
                return
            with self._condition:
                done = self._done.get(first, 0)
                self._end()
                waits = number != first
                if waits and not self._condition.wait_for(partial(self._has_exchanged, first, done), _PATIENCE_SECONDS):
                    number = _GIVES_UP

    def _numbers_of_all(self, number: int) -> list[int]:
        """Return, by rank, the number of the optimizer that is ready to exchange.

        Raises:
            RuntimeError: a rank has waited too long for the exchange of another optimizer; on all ranks.
        """
        try:
            numbers: list[int] = self._communicator.gather_integers(np.array([number]), "hvd_periodic.turn").tolist()
            if _GIVES_UP in numbers:
                raise RuntimeError(
                    "Ranks waited for exchanges of different optimizers. Run the train ops of the same optimizers on "
                    "all ranks; give the session a thread for each (inter_op_parallelism_threads), or give one train "
                    "op a control dependency on the other"
                )
        except Exception:
            with self._condition:
                self._end()
            raise
        return numbers

    def _has_exchanged(self, number: int, before: int) -> bool:
        return self._done.get(number, 0) > before

    def end(self, number: int) -> None:
        """End the turn of an optimizer, so that the other exchanges of this rank proceed."""
        with self._condition:
            self._done[number] = self._done.get(number, 0) + 1
            self._end()

    def _end(self) -> None:
        self._busy = False
        self._condition.notify_all()
