"""A communicator that notes when the messages of its rank travel, and how many bytes they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch

from hvd_periodic.comm.horovod import HorovodCommunicator

_LOOK_SECONDS = 2e-4


@dataclass
class Message:
    """What this rank has handed to one collective.

    Attributes:
        collective: what it is, as Horovod names it.
        name: under which ranks agree on it.
        nbytes: handed over.
        begun: when, in seconds of the monotonic clock, which all ranks of one host share.
        arrived: when the result was there.
    """

    collective: str
    name: str
    nbytes: int
    begun: float
    arrived: float = 0.0


class WatchedCommunicator(HorovodCommunicator):
    """All ranks of a Horovod job; the messages of the parameters are noted.

    Args:
        link_bytes_per_second: of a link between ranks that is to be slower than this machine: results are held back
            until such a link would have carried them. None: as fast as it goes.

    Attributes:
        messages: in the order in which they have begun.
    """

    piggyback_limit_bytes = 0  # Small messages travel on their own, too: they are what is looked at.

    def __init__(self, link_bytes_per_second: float | None = None) -> None:
        super().__init__("horovod.torch", None, torch.from_numpy)
        self.messages: list[Message] = []
        self._pace = link_bytes_per_second
        self._free = 0.0
        self._message: Message | None = None

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Note an allreduce."""
        return self._noted(
            "allreduce", buffer, name, lambda: super(WatchedCommunicator, self).allreduce(buffer, name, op)
        )

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Note a broadcast, which the root sends."""
        sent = buffer if self.rank == root else buffer[:0]
        return self._noted(
            "broadcast", sent, name, lambda: super(WatchedCommunicator, self).broadcast(buffer, name, root)
        )

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Note a reduce-scatter."""
        return self._noted(
            "reducescatter", buffer, name, lambda: super(WatchedCommunicator, self).reducescatter(buffer, name)
        )

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Note an all-gather."""
        return self._noted(
            "allgather", buffer, name, lambda: super(WatchedCommunicator, self).allgather(buffer, name, out)
        )

    def _noted(self, collective: str, sent: Any, name: str, begin: Callable[[], Any]) -> Any:
        self._message = Message(collective, name, sent.nbytes, time.perf_counter())
        self.messages.append(self._message)
        try:
            return begin()
        finally:
            self._message = None

    def _begun(self, handle: Any) -> Callable[[], Any]:
        """Look aside when the result is there; return what waits for it."""
        message = self._message
        finish = super()._begun(handle)
        if message is None:
            return finish
        due = 0.0
        if self._pace is not None:
            due = self._free = max(message.begun, self._free) + message.nbytes / self._pace

        def look() -> None:
            while not hvd.poll(handle) or time.perf_counter() < due:
                time.sleep(_LOOK_SECONDS)
            message.arrived = time.perf_counter()

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()

        def wait() -> Any:
            watcher.join()
            return finish()

        return wait
