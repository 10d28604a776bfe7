"""Ranks as threads that take calls one by one, and that notice without a clock when they would wait for ever."""

from __future__ import annotations

import faulthandler
import linecache
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvd_periodic
from hvd_periodic.comm.threads import ThreadCommunicator

PACKAGE = str(Path(hvd_periodic.__file__).parent)
DOCUMENTED = (ValueError, TypeError, RuntimeError)
UNDOCUMENTED = ("KeyError", "AttributeError", "IndexError", "AssertionError", "UnboundLocalError", "ZeroDivisionError")
OPTIMIZERS = ("/torch/optim/", "/keras/src/optimizers/", "/numpy/sgd.py")
"""Where local optimizers are, in paths of files."""
SECONDS = 120.0
"""After so many, in which ranks compute or wait for something else than each other, all threads say where they are."""


class StuckError(BaseException):
    """A rank waited for ranks that do not come. Not an Exception: code under test must not handle it."""


class InjectedError(Exception):
    """What a user's own code raises."""


@dataclass
class Outcome:
    """What became of a call on a rank: a value, or an exception."""

    call: tuple[str, tuple[Any, ...]]
    value: Any = None
    error: BaseException | None = None

    @property
    def worked(self) -> bool:
        """Whether there was no exception."""
        return self.error is None

    def complaint(self) -> str | None:
        """Return what is wrong with the exception, if it is not one that is documented; None otherwise."""
        error = self.error
        if error is None or isinstance(error, InjectedError):
            return None
        text = "".join(traceback.format_exception(error))
        if isinstance(error, StuckError):
            return f"waits for ever: {text}"
        if not isinstance(error, DOCUMENTED) or any(name in str(error) for name in UNDOCUMENTED):
            return f"no documented error: {text}"
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        local = any(any(own in place for own in OPTIMIZERS) for place in places)
        if local and not any("/outer" in place for place in places):
            return None  # Of the user's own local optimizer.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
        if not last.filename.startswith(PACKAGE) or not raised:
            return f"an error that this package has not raised: {text}"
        return None if str(error) else f"an error that says nothing: {text}"


class Table:
    """Where ranks meet for collectives.

    A rank computes, waits at the table, or has nothing to do. As soon as none computes, :meth:`rest` returns.
    """

    piggyback_limit_bytes = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.waiting: dict[int, tuple[object, ...]] = {}
        self.busy = 0
        self._round = 0
        self._brought: dict[int, tuple[tuple[object, ...], Any]] = {}
        self._results: dict[int, tuple[list[Any], int]] = {}
        self.stuck = False

    def exchange(self, rank: int, call: tuple[object, ...], value: Any) -> list[Any]:
        """Return what all ranks brought to the same call."""
        with self.changed:
            if self.stuck:
                raise StuckError(f"rank {rank} comes to {call}, and others waited elsewhere before")
            self._brought[rank] = (call, value)
            mine = self._round
            if len(self._brought) == self.size:
                self._results[mine] = ([self._brought[r] for r in range(self.size)], self.size)
                self._brought, self._round = {}, mine + 1
                self.busy += len(self.waiting)
                self.waiting = {}
                self.changed.notify_all()
            else:
                self.waiting[rank] = call
                self.busy -= 1
                self.changed.notify_all()
                while mine not in self._results and not self.stuck:
                    self.changed.wait()
                if mine not in self._results:
                    self.busy += 1
                    raise StuckError(f"rank {rank} waits in {call}")
            found, readers = self._results[mine]
            if readers == 1:
                del self._results[mine]
            else:
                self._results[mine] = (found, readers - 1)
        if any(other != call for other, _ in found):
            raise StuckError(f"Ranks wait in different collectives, by rank: {[other for other, _ in found]}")
        return [brought for _, brought in found]

    def rest(self) -> None:
        """Wait until no rank computes.

        Raises:
            AssertionError: that takes too long; with the places of all threads.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self.busy == 0, SECONDS):
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                raise AssertionError(f"A rank computes, or waits, for more than {SECONDS} s; see above where")

    def break_up(self) -> None:
        """Let all who wait fail: nobody will come."""
        with self.changed:
            self.stuck = True
            self.changed.notify_all()


class TableCommunicator(ThreadCommunicator):
    """A rank at a table, which copies share, as processes share what they are connected by."""

    def __init__(self, rank: int, table: Table, limit_bytes: int) -> None:
        super().__init__(rank, table)  # type: ignore[arg-type]
        self.piggyback_limit_bytes = limit_bytes
        _there[rank, id(table)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self.rank, id(self._group))


_there: dict[tuple[int, int], TableCommunicator] = {}


def _find(rank: int, table: int) -> TableCommunicator:
    return _there[rank, table]


class Ranks:
    """Threads, each with a player that makes the calls of one rank.

    Args:
        size: number of ranks.
        player: makes what a rank consists of, given its communicator.
        limit_bytes: bytes of messages that travel with records.
    """

    def __init__(self, size: int, player: Callable[[TableCommunicator], Any], limit_bytes: int = 0) -> None:
        self.size = size
        self._table = Table(size)
        self._calls: list[queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None]] = []
        self.outcomes: list[list[Outcome]] = [[] for _ in range(size)]
        self._threads = []
        for rank in range(size):
            self._calls.append(queue.SimpleQueue())
            table = getattr(player, "table", TableCommunicator)
            communicator = table(rank, self._table, limit_bytes)
            thread = threading.Thread(target=self._work, args=(rank, communicator, player), daemon=True)
            self._threads.append(thread)
            thread.start()

    def play(self, call: str, *arguments: Any, on: Collection[int] | None = None) -> dict[int, list[Outcome]]:
        """Let ranks make a call after those that they have not finished yet; return what has become of which."""
        on = range(self.size) if on is None else on
        begun = {rank: len(self.outcomes[rank]) for rank in range(self.size)}
        with self._table.changed:
            self._table.busy += sum(rank not in self._table.waiting for rank in on)
        for rank in on:
            self._calls[rank].put((call, arguments))
        self._table.rest()
        return {rank: found[begun[rank] :] for rank, found in enumerate(self.outcomes)}

    @property
    def waiting(self) -> dict[int, tuple[object, ...]]:
        """Ranks that wait for others, and where."""
        return dict(self._table.waiting)

    def end(self) -> None:
        """Let the threads end."""
        self._table.break_up()
        for calls in self._calls:
            calls.put(None)
        for thread in self._threads:
            thread.join(SECONDS)
        for rank in range(self.size):
            del _there[rank, id(self._table)]

    def _work(self, rank: int, communicator: TableCommunicator, make: Callable[[TableCommunicator], Any]) -> None:
        player = make(communicator)
        while (given := self._calls[rank].get()) is not None:
            name, arguments = given
            try:
                outcome = Outcome(given, getattr(player, name)(*arguments))
            except BaseException as error:
                outcome = Outcome(given, error=error)
            with self._table.changed:
                self.outcomes[rank].append(outcome)
                if self._calls[rank].empty():
                    self._table.busy -= 1
                    self._table.changed.notify_all()
