"""Compares, between ranks, the weights that no exchange touches: nothing may differ silently."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from hvd_periodic.comm.membership import Membership
from hvd_periodic.ranks import named
from hvd_periodic.replica import Replica

V = TypeVar("V")

_WARNINGS = 10
"""Maximum number of warnings of one comparison; the last one names all others."""


class Differences(Generic[V]):
    """Warns, once for each, about weights that no exchange touches and that differ between ranks.

    These are frozen parameters and the buffers that are ``"local"`` although the user has not asked for this. The root
    broadcasts them at the start; afterwards code of the user may change them differently on each rank.

    Args:
        replica: knows the weights.
        membership: the ranks.
    """

    def __init__(self, replica: Replica[V], membership: Membership) -> None:
        self._replica, self._membership = replica, membership
        self._told: set[str] = set()

    def compare(self) -> None:
        """Compare digests of the weights, 32 bytes per rank if all are equal; the root warns. Collective."""
        found = list(self._different())
        new = [(name, ranks) for name, ranks in found if name not in self._told]
        self._told.update(name for name, _ in new)
        if not self._membership.is_root:
            return
        shown = new if len(new) <= _WARNINGS else new[: _WARNINGS - 1]
        for name, ranks in shown:
            self._membership.log.warning(
                "Weight %r, which no exchange touches, differs between ranks: %s. %s",
                name,
                ranks,
                self._replica.advice_on_difference(name),
            )
        if len(shown) < len(new):
            self._membership.log.warning(
                "So do %d other weights that no exchange touches: %s",
                len(new) - len(shown),
                ", ".join(repr(name) for name, _ in new[len(shown) :]),
            )

    def _different(self) -> Iterator[tuple[str, str]]:
        """Yield the weights that differ, with the ranks that differ from the first; names are this rank's.

        If all ranks have equally many weights, these are paired by position, as their names may differ; otherwise by
        name, without those that some rank does not have.
        """
        communicator, name = self._membership.communicator, f"{self._membership.name}.unexchanged"
        digests = self._replica.digests()
        own = b"".join(digests.values())
        if len(set(communicator.allgather_object(hashlib.sha256(own).digest(), name))) == 1:
            return
        of_ranks = communicator.allgather_object(list(digests.items()), f"{name}.weights")
        if len(set(map(len, of_ranks))) > 1:
            common = set.intersection(*(set(dict(of_rank)) for of_rank in of_ranks))
            of_ranks = [sorted(item for item in of_rank if item[0] in common) for of_rank in of_ranks]
        for (weight, _), *of_weight in zip(of_ranks[communicator.rank], *of_ranks, strict=True):
            found = zip(communicator.global_ranks, (digest for _, digest in of_weight), strict=True)
            different = [rank for rank, digest in found if digest != of_weight[0][1]]
            if different:
                yield weight, f"{named(different)} from rank {communicator.global_ranks[0]}"
