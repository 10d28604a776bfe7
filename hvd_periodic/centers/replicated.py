"""The center on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_periodic.centers.base import Placement, reduced
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket


class Replicated(Placement):
    """Every rank holds the whole center and moves it by the same arithmetic."""

    name = "replicated"
    everywhere = True

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return all elements."""
        return 0, bucket.size

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Return the share, which is the whole bucket."""
        return share

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """All-reduce, or broadcast from the root."""
        return reduced(communicator, buffer, name, op, self._root)
