"""What a network and the processor behind it leave of training, where messages travel and nothing is done with them.

No method that hands as many bytes to the kernel can be faster than this one, on the same machine.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor

import horovod.torch as hvd
import numpy as np
from torch import nn

from tests.benchmarks.methods import Method, Task, local_step, own_address

CHUNK = 2**20
"""Bytes that are received at once."""


def around_a_ring(task: Task, model: nn.Module, period: int) -> Method:
    """Return local steps during which each rank sends the bytes of a ring all-reduce to the next one.

    They travel from one exchange to the step before the next, as in an overlapped exchange. Two threads send and
    receive, in C; nothing is packed, summed or learned.
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

    def leave() -> None:
        finish()
        threads.shutdown()
        to_next.close()
        from_previous.close()

    return Method(step, finish, bytes_sent=lambda: steps // period * nbytes, leave=leave)


def neighbours() -> tuple[socket.socket, socket.socket]:
    """Return connections to the next rank and from the previous one."""
    with socket.create_server((own_address(), 0)) as server:
        addresses = hvd.allgather_object(server.getsockname(), name="sockets")
        to_next = socket.create_connection(addresses[(hvd.rank() + 1) % hvd.size()])
        from_previous, _ = server.accept()
    return to_next, from_previous


METHODS = {"bare sockets, overlap": around_a_ring}
"""By name."""
