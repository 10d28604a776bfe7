"""Exchanges that travel during local steps: training does not wait for the wire."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.arguments import require_int
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.under_way import UnderWay
from hvd_periodic.sync.course import Setting
from hvd_periodic.sync.synchronous import Synchronous

V = TypeVar("V")

PERIOD = "period"
"""As ``overlap``: an exchange is taken just before the next one begins."""


def as_overlap(overlap: Any) -> int | None:
    """Return for how many local steps an exchange is under way; None for a whole period.

    Raises:
        TypeError, ValueError: neither an int of at least 0 nor ``"period"``.

    Example:
        >>> as_overlap(3), as_overlap("period")
        (3, None)
    """
    if overlap == PERIOD:
        return None
    if isinstance(overlap, str):
        raise ValueError(f"`overlap` must be an int >= 0 or {PERIOD!r}. Received: {overlap!r}")
    return require_int(overlap, "`overlap`", minimum=0)


class Overlapped(Synchronous[V]):
    """Exchanges begin at one step, and the replica takes them d local steps later, or before the next one.

    An exchange that begins at step s is taken at step min(s + d, next exchange), before anything else of that step's
    exchange. Elastic averaging pulls at s already, by the center that is here: its trajectory is that without overlap.
    Algorithms that hand out the center take it by ``catch_up``, so that no local progress is lost. The last exchange,
    after which no rank trains on, does not overlap with anything.
    """

    lasting = True

    def __init__(self, setting: Setting[V], place: type[Placement], use_locking: bool) -> None:
        if not place.everywhere:
            raise ValueError(
                f"`overlap` needs center='replicated': with center={place.name!r} an exchange first reads the center "
                f"from other ranks, and training would wait for that. Received: overlap={setting.overlap!r}"
            )
        super().__init__(setting, place, use_locking)
        self._under_way: list[UnderWay[V]] = []
        self._due: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Wait for what is under way before it is copied: a copy has nothing to wait for."""
        self.arrive()
        return self.__dict__

    def facts(self) -> dict[str, object]:
        """Return that all ranks exchange like this."""
        return super().facts() | {"overlap": self.setting.overlap}

    def exchange(self, leaving: bool = False) -> Any:
        """Take what is under way, then exchange."""
        self.land()
        return super().exchange(leaving)

    def has_to_land(self) -> bool:
        """Return whether so many local steps have been counted since the exchange began."""
        return self._due is not None and self.setting.ledger.local_steps >= self._due

    def arrive(self) -> None:
        """Wait for what is under way, and move the centers; the replica takes it when that is due."""
        started = time.perf_counter()
        waits = any(group.pending for group in self._under_way)
        for group in self._under_way:
            group.arrive()
        if waits:
            self.setting.ledger.add(exchange_seconds=time.perf_counter() - started)

    def land(self) -> None:
        """Let the replica take what is under way."""
        self.arrive()
        under_way, self._under_way, self._due = self._under_way, [], None
        for group in under_way:
            group.land()

    def begin_taking_over(self) -> None:
        """Take what is under way, before others take over what comes of it."""
        self.land()

    def check_load(self, state: dict[str, Any], begun: bool) -> None:
        """Wait for what is under way, which what is loaded replaces."""
        self.arrive()
        super().check_load(state, begun)

    def under_way(self) -> Any:
        """Return what is left to be taken, for a checkpoint."""
        self.arrive()
        saved = {group.group.name: group.save(self.setting.exchanged.replica) for group in self._under_way}
        left = {name: state for name, state in saved.items() if state is not None}
        return {"due": self._due, "groups": left} if left else None

    def load_under_way(self, saved: Any) -> None:
        """Go on with what was under way when a state was saved."""
        membership, replica = self.setting.membership, self.setting.exchanged.replica
        groups = {} if saved is None else saved["groups"]
        self._under_way = [
            UnderWay.load(groups[group.name], group, membership.communicator, membership.name, replica)
            for group in self.tensor_groups
            if group.name in groups
        ]
        self._due = None if saved is None else saved["due"]

    def _send(self, exchange: Exchange, step: int, training: bool) -> Any:
        """Let an exchange begin at a step; where nobody trains on, let it end as well."""
        if not training:
            return super()._send(exchange, step, training)
        membership, overlap = self.setting.membership, as_overlap(self.setting.overlap)
        self._under_way = [
            UnderWay(group, membership.communicator, exchange, membership.name).begin() for group in self.tensor_groups
        ]
        self._due = None if overlap is None else step + overlap
        return sum(group.sent for group in self._under_way)
