"""The contract of messages between two ranks, for any implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_periodic.comm.transports import Arrival, Messages

SIZES = [0, 1, 7, 300_000]
DTYPES = ["float32", "float64", "int64", "uint8", "bool"]


def check_messages(make: Callable[[], Messages], size: int, meet: Callable[[], object]) -> None:
    """Run the contract; collective, on all ranks.

    Args:
        make: returns new messages; collective.
        size: number of ranks.
        meet: waits for all ranks.
    """
    for check in (check_every_type, check_order, check_both_directions, check_any_source):
        messages = make()
        check(messages, [rank for rank in range(size) if rank != messages.rank])
        meet()
        assert messages.next(lambda tag: np.empty(1)) is None
        messages.close()


def values(rank: int, tag: int, size: int, dtype: str = "float64") -> np.ndarray:
    """Return what a rank sends as a message."""
    return (np.arange(size) % 50 + 10 * rank + tag).astype(dtype)


def next_of(messages: Messages, allocate: Callable[[int], np.ndarray]) -> Arrival:
    """Wait for the next message from any rank."""
    while (arrival := messages.next(allocate)) is None:
        messages.pause(1e-3)
    return arrival


def check_every_type(messages: Messages, others: list[int]) -> None:
    """Every dtype and size arrives as it is, in an array of that dtype and size; a request says when."""
    cases = [(dtype, size) for dtype in DTYPES for size in SIZES]
    for tag, (dtype, size) in enumerate(cases):
        sent = [messages.send(values(messages.rank, tag, size, dtype), other, tag) for other in others]
        for other in others:
            found = np.zeros(size, dtype)
            messages.receive(found, other, tag).wait()
            assert (found == values(other, tag, size, dtype)).all()
        for request in sent:
            request.wait()
            assert request.done()


def check_order(messages: Messages, others: list[int]) -> None:
    """Messages of one rank arrive in order; those that are waited for pass by next()."""
    for other in others:
        for number in range(20):
            messages.send(np.array([number]), other, 1 + number % 2)
        messages.send(np.arange(3.0), other, 3)
    seen: dict[int, list[int]] = {other: [] for other in others}
    while any(len(numbers) < 20 for numbers in seen.values()):
        arrival = next_of(messages, lambda tag: np.empty(1, np.int64))
        number = int(arrival.data[0])
        assert arrival.tag == 1 + number % 2
        seen[arrival.source].append(number)
        if number == 19:
            last = np.empty(3)
            messages.receive(last, arrival.source, 3).wait()
            assert last.tolist() == [0, 1, 2]
    assert all(numbers == list(range(20)) for numbers in seen.values())


def check_both_directions(messages: Messages, others: list[int]) -> None:
    """All send more than connections hold before anyone receives."""
    count = 600_000
    sent = [messages.send(values(messages.rank, 0, count), other, 5) for other in others]
    found = {other: np.empty(count) for other in others}
    received = [messages.receive(out, other, 5) for other, out in found.items()]
    for request in (*received, *sent):
        request.wait()
    for other, out in found.items():
        assert (out == values(other, 0, count)).all()


def check_any_source(messages: Messages, others: list[int]) -> None:
    """Each rank answers what it is asked, and waits for its own answers."""
    answers = {other: np.empty(2, np.int64) for other in others}
    received = [messages.receive(out, other, 8) for other, out in answers.items()]
    for other in others:
        messages.send(np.array([messages.rank]), other, 7)
    for _ in others:
        arrival = next_of(messages, lambda tag: np.empty(1, np.int64))
        assert (arrival.tag, arrival.data.tolist()) == (7, [arrival.source])
        messages.send(np.array([messages.rank, arrival.source]), arrival.source, 8).wait()
    for request in received:
        request.wait()
    for other, out in answers.items():
        assert out.tolist() == [other, messages.rank]
