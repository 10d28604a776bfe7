"""Messages of asynchronous exchange over MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hvd_periodic.comm.transports import LONG, SHORT, Arrival, Messages, Request

if TYPE_CHECKING:
    from mpi4py import MPI


class MPIMessages(Messages):
    """Messages through mpi4py.

    Args:
        comm: a communicator that nothing else uses; freed at the end.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()

    def send(self, data: np.ndarray, rank: int, tag: int) -> Request:
        """Start to send."""
        return _MPIRequest(self._comm.Isend(data, rank, tag))

    def receive(self, out: np.ndarray, rank: int, tag: int) -> Request:
        """Start to receive into ``out``."""
        return _MPIRequest(self._comm.Irecv(out, rank, tag))

    def next(self, allocate: Callable[[int], np.ndarray]) -> Arrival | None:
        """Return the next message from any rank, or None; wait for the rest of a message that has begun to arrive."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            return None
        data = allocate(status.Get_tag())
        _MPIRequest(message.Irecv(data)).wait()
        return Arrival(status.Get_source(), status.Get_tag(), data)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def alive(self) -> bool:
        """Return whether MPI has not ended."""
        from mpi4py import MPI

        return not MPI.Is_finalized()

    def abort(self) -> None:
        """End all processes of the job."""
        self._comm.Abort(1)

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()


class _MPIRequest:
    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def done(self) -> bool:
        """Return whether the request is complete."""
        return bool(self._request.Test())

    def wait(self) -> None:
        """Poll with sleeps: waiting inside MPI would take a core from ranks that compute."""
        pause = SHORT
        while not self._request.Test():
            time.sleep(pause)
            pause = min(LONG, pause * 1.1)
