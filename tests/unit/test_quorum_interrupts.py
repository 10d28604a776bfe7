"""Rounds with a quorum and interrupts (Ctrl-C) in the wait: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import PeriodicOptimizer
from tests.covering import covering
from tests.helpers import TIMEOUT_SECONDS, outcomes, run_ranks
from tests.sockets import OverSockets
from tests.unit.test_quorum import COMPRESSED, EVERY, arrays, made, step

SIZE, ROUNDS = 3, 3


@pytest.fixture(params=["window", "service"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rounds in shared memory, and through messages."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", request.param)
    return str(request.param)


class Story:
    """The second round: one rank is interrupted in it, and the others come to it.

    Attributes:
        rank: is interrupted.
        moment: ``early``: before its message is written; ``waiting``: before the others come; ``decided``: when the
            round closes with its message, but the center has not moved; ``closed``: when there is a result; ``taken``:
            when it has taken that, and has not told so.
    """

    def __init__(self, way: str, rank: int, moment: str) -> None:
        self.way, self.rank, self.moment = way, rank, moment
        self.interrupted = threading.Event()
        self.came = [threading.Event() for _ in range(SIZE)]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(SIZE) if rank != self.rank]

    def raising(self, before: bool, when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """Return a wrapper of functions that lets one call be interrupted, before or after it."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                hits = not self.interrupted.is_set() and when(*arguments)
                if hits and before:
                    self.interrupted.set()
                    raise KeyboardInterrupt
                result = function(*arguments)
                if hits:
                    self.interrupted.set()
                    raise KeyboardInterrupt
                return result

            return call

        return wrap

    def interrupts(self, transport: Any) -> AbstractContextManager[Any]:
        """Let the rank be interrupted."""
        waits = self.moment == "waiting"
        if self.moment == "taken":
            tells = self.raising(True, lambda _: transport._result is not None)
            return patch.object(transport, "_agree", tells(transport._agree))
        if self.way == "window":
            names = {"early": "_finish_closing", "waiting": "_close_what_is_due", "decided": "_move_and_tell"}
            name = names.get(self.moment, "_taken")
            return patch.object(transport, name, self.raising(before=True)(getattr(transport, name)))
        if self.rank == transport.root and waits:
            return patch.object(transport, "_while_waiting", self.raising(before=True)(transport._while_waiting))
        if self.rank == transport.root:
            event = transport._hub._closed
            return patch.object(event, "wait", self.raising(before=False)(event.wait))
        answers = self.raising(waits, lambda requests: requests[-1] is transport._under_way[2])
        return patch.object(transport, "_wait", answers(transport._wait))

    def arrivals(self, transport: Any, rank: int) -> AbstractContextManager[Any]:
        """Note when others have come; let them leave the center to the rank that is interrupted, if it is to move it.

        Through messages, the root notes it for all.
        """
        if self.way != "window":
            if rank != transport.root:
                return nullcontext()
            come = transport._hub._come

            def note(worker: int, sent: Any) -> None:
                come(worker, sent)
                self.came[worker].set()

            return patch.object(transport._hub, "_come", note)
        close, move = transport._close_what_is_due, transport._move_and_tell

        def note_and_close(agreed: Any) -> bool:
            self.came[rank].set()
            return bool(close(agreed))

        def wait_and_move(agreed: Any) -> None:
            if self.moment == "decided":
                assert self.interrupted.wait(TIMEOUT_SECONDS)
            move(agreed)

        if rank == self.rank:
            return nullcontext()
        return patch.multiple(transport, _close_what_is_due=note_and_close, _move_and_tell=wait_and_move)


def transport_of(optimizer: PeriodicOptimizer) -> Any:
    exchanger: Any = optimizer.synchronizer.exchanger
    return exchanger.worker.transport


def steps(optimizer: PeriodicOptimizer, xs: dict[str, Any], rank: int, count: int) -> None:
    """Take local steps; exchanges are all by ``sync()``."""
    for _ in range(count):
        step(optimizer, xs, rank)


def trained(communicator: Communicator, name: str, story: Story, interrupts: bool) -> list[Any]:
    """Return replica, center and counts after three rounds; in the second, one rank takes another step."""
    communicator = OverSockets(cast(ThreadCommunicator, communicator)) if story.way == "tcp" else communicator
    xs, rank = arrays(), communicator.rank
    optimizer = made(communicator, name, xs, period=1000, quorum=2)
    exchanger: Any = optimizer.synchronizer.exchanger
    exchanger.replay([range(SIZE)] * ROUNDS)
    communicator.allgather_object(None, "replayed")
    steps(optimizer, xs, rank, 2)
    optimizer.synchronizer.sync()
    steps(optimizer, xs, rank, 2)
    communicator.allgather_object(None, "second")
    takes_back = story.moment in ("early", "waiting")
    with story.arrivals(transport_of(optimizer), rank) if interrupts else nullcontext():
        communicator.allgather_object(None, "patched")
        if rank != story.rank:
            assert not interrupts or not takes_back or story.interrupted.wait(TIMEOUT_SECONDS)
            optimizer.synchronizer.sync()
        else:
            if interrupts:
                with story.interrupts(transport_of(optimizer)), pytest.raises(KeyboardInterrupt):
                    optimizer.synchronizer.sync()
                if takes_back:
                    assert all(story.came[other].wait(TIMEOUT_SECONDS) for other in story.others)
            elif not takes_back:
                optimizer.synchronizer.sync()
            steps(optimizer, xs, rank, 1)
            if takes_back:
                optimizer.synchronizer.sync()
    steps(optimizer, xs, rank, 2)
    optimizer.synchronizer.sync()
    with optimizer.center():
        center = [x.copy() for x in xs.values()]
    counters = optimizer.synchronizer.counters
    return [*(x.copy() for x in xs.values()), *center, counters.rounds, counters.local_steps]


MOMENTS = [("window", moment) for moment in ("early", "waiting", "decided", "closed", "taken")]
MOMENTS += [(way, moment) for way in ("service", "tcp") for moment in ("waiting", "closed")]


@pytest.mark.parametrize(("at", "rank", "name"), covering(MOMENTS, [0, 1], [*EVERY, *COMPRESSED], together=2), ids=str)
def test_an_interrupt_takes_the_message_back_or_lets_the_round_count(
    at: tuple[str, str], rank: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as without the interrupt, with the step in the round before which or after which it was."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", "window" if at[0] == "window" else "service")
    story = Story(at[0], rank, at[1])
    found = run_ranks(SIZE, lambda communicator: trained(communicator, name, story, interrupts=True))
    assert story.interrupted.is_set()
    expected = run_ranks(SIZE, lambda communicator: trained(communicator, name, story, interrupts=False))
    for here, there in zip(found, expected, strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("moment", ["waiting", "closed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_in_finalize(way: str, rank: int, moment: str) -> None:
    """Before the last round closes, the rank calls finalize() again; afterwards it has left already."""
    story = Story(way, rank, moment)

    def work(communicator: Communicator) -> Sequence[Any]:
        xs, own = arrays(), communicator.rank
        optimizer = made(communicator, "diloco", xs, quorum=2)
        steps(optimizer, xs, own, 3)
        communicator.allgather_object(None, "stepped")
        if own != rank:
            assert moment != "waiting" or story.interrupted.wait(TIMEOUT_SECONDS)
            optimizer.finalize()
        else:
            with story.interrupts(transport_of(optimizer)), pytest.raises(KeyboardInterrupt):
                optimizer.finalize()
            if moment == "waiting":
                optimizer.finalize()
        return [*xs.values(), optimizer.synchronizer.counters.rounds]

    found = run_ranks(SIZE, work)
    assert found[0][-1] == 2
    for each in found:
        for here, there in zip(each, found[0], strict=True):
            np.testing.assert_array_equal(here, there)


def test_after_a_second_interrupt_all_are_told(way: str) -> None:
    """It may have come at any point: nobody knows whether the round counts."""
    story = Story(way, 1, "waiting")

    def work(communicator: Communicator) -> None:
        xs, rank = arrays(), communicator.rank
        optimizer = made(communicator, "diloco", xs, quorum=2)
        transport = transport_of(optimizer)
        steps(optimizer, xs, rank, 3)
        if rank == 1:
            again = patch.object(transport, "_take_back", side_effect=KeyboardInterrupt)
            with story.interrupts(transport), again, pytest.raises(KeyboardInterrupt):
                optimizer.synchronizer.sync()
        assert story.interrupted.wait(TIMEOUT_SECONDS)
        for _ in range(2):  # The first round of the others may close with the message that was not taken back.
            optimizer.synchronizer.sync()

    texts = [str(each) for each in outcomes(SIZE, work)]
    assert texts[1].startswith("An interrupt has ended the previous exchange of this rank halfway"), texts
    for other in (0, 2):
        assert texts[other].startswith("Rank 1 cannot go on: An interrupt has ended the previous exchange"), texts
