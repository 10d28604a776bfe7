"""Errors that end training in one rank of an island: the other ranks hear of them at once, wherever they wait.

Ranks of an island wait for each other in collectives of the program as well, such as those of
``DistributedDataParallel``, which nothing interrupts, and the process with the error may live on. Therefore the others
close their connections to it, whereupon such collectives fail over Gloo.
"""

from __future__ import annotations

import json
from typing import Any

from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.comm.gloo_connections import close_links, links


class IslandRankError(RuntimeError):
    """Another rank of this island has raised an error, with which the island leaves the job."""


class IslandFailures:
    """Tells the ranks of an island of each other's errors through the store of the rendezvous.

    Args:
        store: the store, over a connection that nothing blocks.
        key: the key of the first error, which no other island uses.
        rank: this rank of the island.
        size: number of ranks of the island.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._others = {f"{key}.{other}" for other in range(size) if other != rank}

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends training here."""
        self._store.compare_set(self._key, "", json.dumps([self._rank, _described(error)]))
        self._store.set(f"{self._key}.{self._rank}", json.dumps(links()))

    def heard(self) -> IslandRankError | None:
        """Return the first error, if it is another rank's; close the connections to all ranks that have told of one."""
        if not self._store.check([self._key]):
            return None
        for key in [key for key in self._others if self._store.check([key])]:
            close_links(json.loads(self._store.get(key)))
            self._others.remove(key)
        rank, text = json.loads(self._store.get(self._key))
        if rank == self._rank:
            return None
        return IslandRankError(
            f"Rank {rank} of this island has raised an error, so the island has left the job: {text}"
        )

    def cause(self, error: BaseException) -> IslandRankError | None:
        """Return the first error if it is another rank's and may be the cause of an error here; else None.

        Collectives that fail raise a ``RuntimeError``, and waits for other islands a ``TimeoutError``. An error that
        all ranks raise alike has no other cause, nor has that after repeated losses, on which they have agreed.
        """
        caused = isinstance(error, (RuntimeError, TimeoutError))
        if not caused or isinstance(error, (IslandRankError, RanksLostError)):
            return None
        heard = self.heard()
        same = heard is not None and str(heard).endswith(f": {_described(error)}")
        return None if same else heard


def _described(error: BaseException) -> str:
    """Return type and text of an error."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
