"""Compares, between ranks, the weights that no exchange touches: nothing may differ silently."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from hvd_periodic.comm.membership import Membership
from hvd_periodic.ranks import named
from hvd_periodic.replica import Replica

V = TypeVar("V")

_NAME, _DIGEST = 16, 32
"""Bytes of the digest of a name, and of that of a weight."""

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
        self._names: list[str] = []

    def compare(self) -> None:
        """Compare digests of the weights, 32 bytes per rank if all are equal; the root warns. Collective."""
        communicator, name = self._membership.communicator, f"{self._membership.name}.unexchanged"
        own = self.own()
        digest = hashlib.sha256(b"".join(digest for _, digest in _rows(own))).digest()  # Names may differ.
        if len(set(communicator.allgather_object(digest, name))) > 1:
            self.name(dict(enumerate(communicator.allgather_object(own, f"{name}.weights"))))

    def own(self) -> bytes:
        """Return the digests of this rank's weights, 48 bytes each, for :meth:`name`."""
        digests = self._replica.digests()
        self._names = list(digests)
        return b"".join(
            hashlib.sha256(name.encode()).digest()[:_NAME] + digest.ljust(_DIGEST, b"\0")
            for name, digest in digests.items()
        )

    def name(self, of_ranks: Mapping[int, bytes]) -> None:
        """Warn about the weights that differ between some ranks, the root, or the first of them if it is not there.

        Args:
            of_ranks: what :meth:`own` has returned on them, by their numbers in the communicator.
        """
        rank, root = self._membership.communicator.rank, self._membership.root
        if not of_ranks or rank != (root if root in of_ranks else min(of_ranks)):
            return
        new = [(name, ranks) for name, ranks in self._different(of_ranks) if name not in self._told]
        self._told.update(name for name, _ in new)
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

    def _different(self, of_ranks: Mapping[int, bytes]) -> Iterator[tuple[str, str]]:
        """Yield the weights that differ, with the ranks that differ from the first; names are this rank's.

        If all ranks have equally many weights, these are paired by position, as their names may differ; otherwise by
        name, without those that some rank does not have.
        """
        communicator = self._membership.communicator
        numbers = sorted(of_ranks)
        ranks = [communicator.global_ranks[number] for number in numbers]
        rows = [_rows(of_ranks[number]) for number in numbers]
        own = rows[numbers.index(communicator.rank)]
        places: list[Sequence[int]] = [range(len(own))] * len(rows)
        if len(set(map(len, rows))) > 1:
            by_name = [{key: place for place, (key, _) in enumerate(of_rank)} for of_rank in rows]
            common = [key for key, _ in own if all(key in of_rank for of_rank in by_name)]
            places = [[of_rank[key] for key in common] for of_rank in by_name]
        for at in zip(*places, strict=True):
            digests = [of_rank[place][1] for of_rank, place in zip(rows, at, strict=True)]
            different = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != digests[0]]
            if different:
                yield self._names[at[numbers.index(communicator.rank)]], f"{named(different)} from rank {ranks[0]}"


def _rows(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the digest of the name, and that of the weight, of each weight."""
    starts = range(0, len(data), _NAME + _DIGEST)
    return [(data[start : start + _NAME], data[start + _NAME : start + _NAME + _DIGEST]) for start in starts]
