"""The strategies of exchange in sessions: Python runs the core's strategies while the session waits."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

from hvd_periodic.algorithms import Exchange
from hvd_periodic.centers.by_range import ByRange
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.fragment_plan import DueFragments
from hvd_periodic.sync.overlapped import Overlapped
from hvd_periodic.sync.status import GlobalStatus, LocalStatus
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store


class SessionSynchronous(Synchronous[Any]):
    """Checks at the first exchange that all ranks started with the same centers; nothing else checks this."""

    def _exchange_tensors(self, agreed: GlobalStatus, due: DueFragments, own: LocalStatus) -> int:
        if due.turns and self.context.progress.rounds == 0 and not self.context.warmup.active:
            self.tensor_groups.audit(self.advice)
        return super()._exchange_tensors(agreed, due, own)


class SessionOverlapped(SessionSynchronous, Overlapped[Any]):
    """Keeps an exchange in flight between two steps of the session that began it.

    Attributes:
        turn: waits until all ranks exchange with this optimizer; an exchange in flight is applied outside of turns.
    """

    turn: Turn = nullcontext

    def land(self) -> None:
        """Apply the exchange in flight to the replica; discard one that an earlier session began."""
        progress = self.context.progress
        if self._begun != progress.counters.last_exchange:
            self.drop()
        super().land()
        progress.landing = None  # A checkpoint may have restored the step of another session.

    def drop(self) -> None:
        """Wait for the exchange in flight and forget it; the center, which has other values now, does not move."""
        for pending in chain(*(part.pending for part in self._in_flight)):
            pending.wait()
        self._in_flight = []

    def tell_failure(self, error: Exception) -> None:
        """Enter the handshake in which the other ranks wait for this one, in the turn in which they do."""
        with self.turn():
            super().tell_failure(error)


class SessionAsynchronous(Asynchronous[Any]):
    """Keeps a copy of the parameters' center in variables of the session.

    Attributes:
        as_left: the variables that hold the center as it was after this rank's last push.
    """

    as_left: Store[Any] | None = None

    def keep(self, as_left: Store[Any]) -> None:
        """Keep the center in these variables."""
        self.as_left, self.worker.on_pull = as_left, self._keep

    def take_statistics(self) -> None:
        """Set the statistics to those of the final center, for which a graph has no other variables."""
        for group in self.tensor_groups.statistics:
            if group.name != FROM_ROOT:
                group.take_center(Exchange(self.context.membership.communicator.size, period=1))

    def _keep(self, group: TensorGroup[Any], bucket: Bucket, center: Any, exchange: Exchange) -> None:
        if group is not self.tensor_groups.parameters or self.as_left is None:
            return
        algorithm, replica = group.algorithm, self.context.exchanged.replica
        space = replica.space
        if not algorithm.reads_after:
            message, _ = algorithm.message(space, group.values.read(bucket), {}, center, exchange)
            if exchange.presence:
                message = ByRange(algorithm, replica, group.values.layout).weighed(bucket, message, exchange)
            center = algorithm.move(space, {"center": center}, message, exchange)["center"]
        self.as_left.write(bucket, center)
