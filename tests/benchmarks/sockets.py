"""What a network and the processor behind it leave of training: bare sockets, and an allreduce over them.

No method that hands as many bytes to the kernel can be faster than bare sockets, where messages travel and nothing is
done with them, on the same machine. The allreduce shows how much of the rest a library would save that never polls.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from tests.benchmarks.methods import Begin, Make, Method, Task, local_step, overlapped_by_hand, own_address

CHUNK = 2**20
"""Bytes that are received at once."""


def bare(task: Task, model: nn.Module, period: int, overlap: bool = False) -> Method:
    """Return local steps after which each rank sends the bytes of a ring all-reduce to the next one.

    With overlap, they travel from one exchange to the step before the next. Two threads send and receive, in C; nothing
    is packed, summed or learned.
    """
    optimizer = task.optimizer(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters()) * 2 * (hvd.size() - 1) // hvd.size()
    to_next, from_previous = neighbours()
    message, received = np.ones(nbytes, "u1"), memoryview(np.ones(nbytes, "u1"))
    threads = ThreadPoolExecutor(2)
    in_flight: list[Future[None]] = []
    steps = 0

    def receive() -> None:
        place = 0
        while place < nbytes:
            count = from_previous.recv_into(received[place : place + CHUNK])
            if not count:
                raise ConnectionError("the previous rank has left")
            place += count

    def finish() -> None:
        while in_flight:
            in_flight.pop().result()

    def step() -> None:
        nonlocal steps
        local_step(task, model, optimizer)
        steps += 1
        if steps % period == period - 1:
            finish()
        if steps % period == 0:
            finish()
            in_flight.extend((threads.submit(to_next.sendall, message.data), threads.submit(receive)))
            if not overlap:
                finish()

    def leave() -> None:
        finish()
        threads.shutdown()
        to_next.close()
        from_previous.close()

    return Method(step, finish, bytes_sent=lambda: steps // period * nbytes, leave=leave)


def begin_ring() -> Begin:
    """Return an allreduce in a ring: each rank passes chunks to the next one and adds those of the previous one.

    In n − 1 hops each rank gets the sum of one of n chunks; in n − 1 more, it gets the other sums. One thread sends,
    and another one adds arriving pieces while they are in the cache.
    """
    to_next, from_previous = neighbours()
    sender, receiver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    piece = np.empty(CHUNK // 4, np.float32)

    def receive(into: np.ndarray) -> None:
        if from_previous.recv_into(memoryview(into).cast("B"), into.nbytes, socket.MSG_WAITALL) != into.nbytes:
            raise ConnectionError("the previous rank has left")

    def add(to: np.ndarray) -> None:
        for start in range(0, len(to), len(piece)):
            part = to[start : start + len(piece)]
            receive(piece[: len(part)])
            part += piece[: len(part)]

    def reduce(values: np.ndarray) -> None:
        size, rank = hvd.size(), hvd.rank()
        chunks = np.array_split(values, size)
        for take, first in ((add, rank), (receive, rank + 1)):
            for hop in range(size - 1):
                sent = sender.submit(to_next.sendall, chunks[(first - hop) % size].data)
                take(chunks[(first - hop - 1) % size])
                sent.result()

    def begin(message: torch.Tensor) -> Callable[[], torch.Tensor]:
        summed = message.clone()
        done = receiver.submit(reduce, summed.numpy())

        def wait() -> torch.Tensor:
            done.result()
            return summed

        return wait

    return begin


def neighbours() -> tuple[socket.socket, socket.socket]:
    """Return connections to the next rank and from the previous one."""
    with socket.create_server((own_address(), 0)) as server:
        addresses = hvd.allgather_object(server.getsockname(), name="sockets")
        to_next = socket.create_connection(addresses[(hvd.rank() + 1) % hvd.size()])
        from_previous, _ = server.accept()
    return to_next, from_previous


METHODS: dict[str, Make] = {
    "bare sockets": bare,
    "bare sockets, overlap": partial(bare, overlap=True),
    "averaging, overlap, by hand, ring of sockets": overlapped_by_hand(begin_ring),
}
"""By name."""
