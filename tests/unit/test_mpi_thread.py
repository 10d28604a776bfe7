"""The thread that runs large collectives of MPI, over a communicator of this file."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_periodic.comm.mpi import _Mover


class Comm:
    """Records calls; one of its collectives fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[threading.Thread] = set()

    def Allreduce(self, buffer: str, op: str) -> None:  # noqa: N802
        self.threads.add(threading.current_thread())
        self.calls.append((buffer, op))

    def Bcast(self, buffer: str) -> None:  # noqa: N802
        raise TypeError(f"no buffer: {buffer}")


def test_collectives_run_in_order_in_one_thread_and_errors_reach_who_waits() -> None:
    comm: Any = Comm()
    mover = _Mover(comm)
    before = threading.active_count()
    mover.end()
    assert threading.active_count() == before, "no thread without a collective"
    mover = _Mover(comm)
    first, failing = mover.begin("Allreduce", "a", op="sum"), mover.begin("Bcast", "b")
    with pytest.raises(TypeError, match="no buffer: b"):
        failing.result(10)
    last = mover.begin("Allreduce", "c", op="max")
    last.result(10)
    assert first.done()
    assert comm.calls == [("a", "sum"), ("c", "max")]
    (thread,) = comm.threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    mover.end()
    thread.join(10)
    assert not thread.is_alive()
