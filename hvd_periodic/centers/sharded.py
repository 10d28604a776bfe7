"""The center in shards, one on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.saved_states import gather_states
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket, chunk


class Sharded(Placement):
    """Rank k holds the k-th chunk of every bucket: reduce-scatter, move, all-gather."""

    name = "sharded"

    @property
    def holders(self) -> list[int]:
        """All ranks."""
        return list(range(self._size))

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return this rank's chunk of the elements."""
        return chunk(bucket.size, self._rank, self._size)

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """All-gather."""
        return communicator.allgather(share, name, out=out)

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """Reduce-scatter."""
        if op != "sum":
            raise ValueError(f"Only sums can be scattered over ranks. Received: {op!r}")
        return communicator.reducescatter(buffer, name)

    def bytes_to_publish(self, bytes_of_bucket: int) -> int:
        """Return the bytes of this rank's chunk."""
        start, stop = chunk(bytes_of_bucket, self._rank, self._size)
        return stop - start

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return the states of all ranks."""
        return {"sharded": gather_states(communicator, state, name)}

    def united(self, states: Mapping[int, Any]) -> Any:
        """Return the states in rank order."""
        return {"sharded": [states[rank] for rank in sorted(states)]}

    def select(self, saved: Any) -> Any:
        """Return the state of this rank."""
        states = saved.get("sharded") if isinstance(saved, dict) else None
        if saved is not None and (states is None or len(states) != self._size):
            raise ValueError(
                f"The state of the center optimizer was not saved with center='sharded' on {self._size} ranks: load it "
                "with the placement and the number of ranks that it was saved with, or start from the saved center"
            )
        return None if states is None else states[self._rank]
