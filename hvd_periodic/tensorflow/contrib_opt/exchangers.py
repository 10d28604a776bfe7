"""Exchanges of sessions: as in the core, run by Python while the session waits."""

from __future__ import annotations

from typing import Any

from hvd_periodic.algorithms import Exchange
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.fragment_plan import DueFragments, FragmentExchange
from hvd_periodic.sync.status import GlobalStatus, LocalStatus
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store


class SessionSynchronous(Synchronous[Any]):
    """Checks at the first exchange that all ranks have started with the same centers: nothing else does.

    Attributes:
        as_read: the variables that hold the center of the parameters as this rank read it last, if there are some that
            are no state of the algorithm.
    """

    as_read: Store[Any] | None = None

    def keep(self, as_read: Store[Any] | None, center: Store[Any]) -> None:
        """Keep the center as it is read in these variables from now on; those of the center itself are its state."""
        self.as_read = as_read

    def kept(self) -> list[Store[Any]]:
        """Return what an exchange writes besides the state of the algorithm."""
        return [] if self.as_read is None else [self.as_read]

    def _exchange_tensors(self, agreed: GlobalStatus, due: DueFragments, own: LocalStatus) -> int:
        if due.turns and self.context.progress.rounds == 0 and not self.context.warmup.active:
            self.tensor_groups.audit(self.advice)
        return super()._exchange_tensors(agreed, due, own)

    def _send(self, turn: FragmentExchange, step: int, training: bool) -> int:
        if self.as_read is not None:
            for bucket in turn.fragment.buckets:
                self.as_read.write(bucket, self.tensor_groups.parameters.center.read(bucket))
        return super()._send(turn, step, training)


class SessionAsynchronous(Asynchronous[Any]):
    """Keeps the center of the parameters in variables of the session.

    Attributes:
        as_read, as_left: the variables that hold it as this rank read it last, and as it was after its own push.
    """

    as_read: Store[Any] | None = None
    as_left: Store[Any] | None = None

    def keep(self, as_read: Store[Any] | None, center: Store[Any]) -> None:
        """Keep the center in these variables from now on."""
        self.as_read, self.as_left, self.worker.on_pull = as_read, center, self._keep

    def kept(self) -> list[Store[Any]]:
        """Return what an exchange writes besides the state of the algorithm."""
        return [store for store in (self.as_read, self.as_left) if store is not None]

    def _keep(self, group: TensorGroup[Any], bucket: Bucket, center: Any, exchange: Exchange) -> None:
        if group is not self.tensor_groups.parameters:
            return
        if self.as_read is not None:
            self.as_read.write(bucket, center)
        if self.as_left is None:
            return
        algorithm, space = group.algorithm, self.context.exchanged.replica.space
        if not algorithm.reads_after:
            message, _ = algorithm.message(space, group.values.read(bucket), {}, center, exchange)
            center = algorithm.move(space, {"center": center}, message, exchange)["center"]
        self.as_left.write(bucket, center)
