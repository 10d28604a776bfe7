"""Exchanges that are in flight during local steps, so that training does not wait for the network."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import asdict, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.arguments import require_int
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.in_flight import InFlightExchange
from hvd_periodic.centers.saved_vectors import check_names
from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.journal.base import Counters
from hvd_periodic.sync.exchanger import ExchangeContext
from hvd_periodic.sync.fragment_plan import FragmentExchange
from hvd_periodic.sync.synchronous import Synchronous

V = TypeVar("V")

logger = logging.getLogger("hvd_periodic")

PERIOD = "period"
"""Value of ``overlap`` for which an exchange is applied just before the next one begins."""


def as_overlap(overlap: Any) -> int | None:
    """Return the number of local steps for which an exchange is in flight; None for a whole period.

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
    """Exchanges begin at one step and are applied to the replica d local steps later, or before the next exchange.

    An exchange that begins at step s is applied at step min(s + d, next exchange), before that step's own exchange.
    Elastic averaging pulls at s already, with the local copy of the center: its trajectory is the same as without
    overlap. Algorithms that publish the center apply it with ``catch_up``, so that no local progress is lost.
    Statistics, which are small, are waited for: applied late, they would overwrite the additions of local steps. The
    last exchange, after which no rank trains, is not overlapped.

    Ranks may read the center, and so update it, at different steps: the update uses the learning rates of step s.
    """

    overlapped = True

    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None:
        if not place.everywhere:
            raise ValueError(
                f"`overlap` needs center='replicated': with center={place.name!r} an exchange first reads the center "
                f"from other ranks, and training would wait for that. Received: overlap={context.overlap!r}"
            )
        super().__init__(context, place, use_locking)
        if context.membership.is_root and context.membership.communicator.busy_waits:
            logger.warning(
                "While messages travel, Open MPI spins on the cores that train: start the job with mpirun --mca "
                "mpi_yield_when_idle 1, or export OMPI_MCA_mpi_yield_when_idle=1"
            )
        self._in_flight: list[InFlightExchange[V]] = []
        self._begun = 0
        self._counted_before: Counters | None = None

    def facts(self) -> dict[str, object]:
        """Return the settings that all ranks must share, including ``overlap``."""
        return super().facts() | {"overlap": self.context.overlap}

    def exchange(self, leaving: bool = False) -> bool:
        """Apply the exchange in flight, then exchange."""
        # After a failure, the handshake reports it to the other ranks.
        if self.context.handshake.fatal_error is None:
            self.land()
        before = self.context.progress.counters
        training = super().exchange(leaving)
        self._counted_before = before
        return training

    def wait_and_update_centers(self) -> None:
        """Wait for the exchange in flight and update the centers; it is applied to the replica when due.

        Raises:
            RuntimeError: an exchange has failed, so that the center is in no readable state.
        """
        if not self._in_flight:
            return
        context, started = self.context, time.perf_counter()
        if context.handshake.fatal_error is not None:
            raise RuntimeError(context.handshake.fatal_error)
        if not any(part.pending for part in self._in_flight):
            return
        try:
            profiled = context.exchanged.replica.range("hvd_periodic.arrive")
            with context.handshake.remember_failure(self._begun), profiled:
                for part in self._in_flight:
                    part.wait_and_update_center()
                self._constrain()
        except Exception:
            self._uncount()
            raise
        context.membership.communicator.settle()
        context.progress.add(exchange_seconds=time.perf_counter() - started)

    def _uncount(self) -> None:
        """Undo the count of the exchange in flight, which was counted when it began and has failed."""
        progress, before = self.context.progress, self._counted_before
        if before is not None:  # It is None for an exchange from a loaded state.
            kept = {name: getattr(before, name) for name in _OF_EXCHANGES}
            progress.counters = replace(progress.counters, **kept)

    def land(self) -> None:
        """Apply the exchange in flight to the replica; on failure, tell the other ranks, which would wait."""
        try:
            self._land()
        except RanksLostError:  # They hear of it as this one did.
            raise
        except Exception as error:
            self.tell_failure(error)
            raise

    def _land(self) -> None:
        context = self.context
        with context.exchanged.replica.range("hvd_periodic.land"):
            self.wait_and_update_centers()
            if not self._in_flight:
                return
            started = time.perf_counter()
            with context.handshake.remember_failure(self._begun):
                misfit = context.exchanged.replica.misfit()
                if misfit is not None:
                    raise RuntimeError(misfit)
                for part in self._in_flight:
                    part.apply_to_replica(context.progress.local_steps > self._begun)
                self._constrain()
            self._forget()
            context.handshake.notify_followers()
            context.progress.add(exchange_seconds=time.perf_counter() - started)

    def discard(self) -> None:
        """Wait for the exchange in flight and forget it."""
        if self.context.handshake.fatal_error is None:
            self.wait_and_update_centers()
        self._forget()

    def _forget(self) -> None:
        self._in_flight, self.context.progress.landing = [], None

    def restart(self) -> None:
        """Set the centers to the values of this rank, after discarding the exchange in flight."""
        self.discard()
        super().restart()

    def begin_taking_over(self) -> None:
        """Apply the exchange in flight before another rank takes over the result."""
        self._land()

    def load(self, state: dict[str, Any]) -> None:
        """Discard the exchange in flight, which that of the state replaces."""
        self.discard()
        super().load(state)
        self.load_in_flight_exchange(state.get("under_way"))

    def in_flight(self) -> Any:
        """Return the exchange that is not yet applied, for a checkpoint."""
        self.wait_and_update_centers()
        snapshot = self.tensor_groups.parameters.snapshot
        if not self._in_flight or snapshot is None:
            return None
        return {
            "begun": self._begun,
            "due": self.context.progress.landing,
            "fragments": [(part.fragment.index, asdict(part.exchange)) for part in self._in_flight],
            "snapshot": self.context.exchanged.replica.save(snapshot),
        }

    def check_in_flight(self, saved: Any) -> None:
        """Check the exchange that was in flight when a state was saved."""
        group = self.tensor_groups.parameters
        if saved is not None:
            check_names(f"snapshot of the {group.name}", group.values.layout, saved["snapshot"])

    def load_in_flight_exchange(self, saved: Any) -> None:
        """Continue the exchange that was in flight when a state was saved."""
        group = self.tensor_groups.parameters
        self._forget()
        self._counted_before = None
        if saved is not None and group.snapshot is not None:
            self._begun, self.context.progress.landing = saved["begun"], saved["due"]
            self.context.exchanged.replica.load(group.snapshot, saved["snapshot"])
            self._in_flight = [
                InFlightExchange(group, Exchange(**exchange), self.turns.fragments[i])
                for i, exchange in saved["fragments"]
            ]

    def _constrain(self) -> None:
        """Apply constraints once nothing is in flight, since messages in flight refer to the center as it is."""
        if not any(part.pending for part in self._in_flight):
            super()._constrain()

    def _send(self, turn: FragmentExchange, step: int, training: bool) -> int:
        """Begin the exchange of a fragment; complete it as well if no rank continues training."""
        if not training:
            return super()._send(turn, step, training)
        membership, overlap = self.context.membership, as_overlap(self.context.overlap)
        used = membership.communicator.namespace, membership.name
        twin = _SENDING.get(used)
        if twin is not None and twin is not self:
            twin.wait_and_update_centers()
        _SENDING[used] = self
        with self.context.exchanged.replica.range("hvd_periodic.begin"):
            part = InFlightExchange(self.tensor_groups.parameters, turn.exchange, turn.fragment).begin()
        self._in_flight.append(part)
        self._begun, self.context.progress.landing = step, None if overlap is None else step + overlap
        return part.sent


_OF_EXCHANGES = ("rounds", "bytes_sent", "last_exchange", "next_exchange", "left_out")

_SENDING: WeakValueDictionary[tuple[Hashable, str], Overlapped[Any]] = WeakValueDictionary()
"""Last user of each collective name: of an optimizer and its copies, only one can have an exchange in flight."""
