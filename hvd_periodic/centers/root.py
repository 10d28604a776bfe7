"""The center on the root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_periodic.centers.base import Placement, reduced
from hvd_periodic.centers.saved_states import gather_states
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket


class Root(Placement):
    """The root alone holds the center, and broadcasts it. Horovod has no reduction to one rank, so all ranks reduce."""

    name = "root"

    @property
    def holders(self) -> list[int]:
        """The root."""
        return [self._root]

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return all elements on the root, and none elsewhere."""
        return 0, bucket.size if self._rank == self._root else 0

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Broadcast from the root."""
        return communicator.broadcast(share if self._rank == self._root else out, name, self._root)

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """All-reduce, or broadcast from the root."""
        return reduced(communicator, buffer, name, op, self._root)

    def bytes_to_publish(self, bytes_of_bucket: int) -> int:
        """Return the whole bucket on the root, which sends it."""
        return bytes_of_bucket if self._rank == self._root else 0

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return the root's state on all ranks, so that any of them may save."""
        return gather_states(communicator, state, name)[self._root]

    def select(self, saved: Any) -> Any:
        """Return the whole state on the root, and None elsewhere."""
        saved = super().select(saved)
        return saved if self._rank == self._root else None
