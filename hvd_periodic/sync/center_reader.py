"""Reads the center: into the model, for checkpoints, and for its distance to the replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.exchanger import Exchanger
from hvd_periodic.sync.startup import Startup

V = TypeVar("V")


class CenterReader(Generic[V]):
    """Gives users read access to the center; does not affect training.

    Args:
        exchanger: knows where the center lives.
        checkpoint: knows whether a center was loaded.
        startup: knows whether training has started.

    Attributes:
        in_center_block: the model holds the center now.
    """

    def __init__(self, exchanger: Exchanger[V], checkpoint: Checkpoint[V], startup: Startup[V]) -> None:
        self._exchanger, self._checkpoint, self._startup = exchanger, checkpoint, startup
        self.in_center_block = False

    def require_outside_center_block(self, method: str) -> None:
        """Raise a RuntimeError inside :meth:`center`, on behalf of a method that makes no sense there."""
        if self.in_center_block:
            raise RuntimeError(
                f"{method}() inside the center() block: the model holds the center there, not this rank's replica. "
                "Leave the block first"
            )

    @contextmanager
    def center(self, begin: Callable[[], object]) -> Iterator[None]:
        """Hold the center in the model inside the block; restore the local values afterwards, also after an error."""
        self.require_outside_center_block("center")
        tracker = self._exchanger.context.membership.communicator.tracker
        with tracker.at("center()"):
            self.get_ready(begin)
        self._startup.assigned.name_others()
        shown = list(self._exchanger.tensor_groups) if self._is_known() else []
        offload = self._exchanger.context.exchanged.replica.offload
        held = [[offload(group.values.read(bucket)) for bucket in group.values.layout.buckets] for group in shown]
        self.in_center_block = True
        try:
            with tracker.at("center()"):
                for group in shown:
                    for bucket in group.values.layout.buckets:
                        group.values.write(bucket, group.fetch(bucket))
                self._settle()
            yield
        finally:
            for group, vectors in zip(shown, held, strict=True):
                for bucket, vector in zip(group.values.layout.buckets, vectors, strict=True):
                    group.values.write(bucket, vector)
            self.in_center_block = False

    def distance(self, begin: Callable[[], object]) -> float:
        """Return ‖x − c‖₂; collective, unless every rank can read the center by itself."""
        with self._exchanger.context.membership.communicator.tracker.at("distance()"):
            self.get_ready(begin)
            found = float(self._exchanger.tensor_groups.distance())
            self._settle()
            return found

    def state_dict(self, begin: Callable[[], object]) -> dict[str, Any]:
        """Return the state for a checkpoint; collective unless the center is on every rank."""
        with self._exchanger.context.membership.communicator.tracker.at("state_dict()"):
            if not self._startup.begun:
                self._require_fit()
                found = self._checkpoint.save_before_training(begin)
            else:
                self.meet_to_read()
                self.follow_equal_replicas()
                found = self._checkpoint.save()
            if self._startup.begun:
                self._settle()
            return found

    def get_ready(self, begin: Callable[[], object]) -> None:
        """Prepare to read the center; if reading is collective, ``begin`` training first."""
        if self._exchanger.reads_together:
            begin()
        self.meet_to_read()
        self._exchanger.wait_and_update_centers()
        self.follow_equal_replicas()

    def meet_to_read(self) -> None:
        """If reading is collective, check that all ranks are about to read the center.

        Raises:
            RuntimeError: some ranks are in another call; or the model has changed and can no longer hold the center.
                Raised on all ranks if reading is collective.
        """
        if self._exchanger.reads_together:
            self._exchanger.context.handshake.check_same_call(Purpose.READ, self.misfit())
        else:
            self._require_fit()

    def _settle(self) -> None:
        """If reading is collective, raise an error if it has failed on another rank of this rank's island."""
        if self._exchanger.reads_together:
            self._exchanger.context.membership.communicator.settle()

    def misfit(self) -> str | None:
        """Return why this rank cannot read the center, or None."""
        return self._exchanger.context.exchanged.replica.misfit()

    def _require_fit(self) -> None:
        misfit = self._exchanger.context.exchanged.replica.misfit()
        if misfit is not None:
            raise RuntimeError(misfit)

    def follow_equal_replicas(self) -> None:
        """Set the center to the replica while all replicas are identical (synchronous warmup)."""
        if self._exchanger.context.warmup.active and not self.in_center_block:
            self._exchanger.tensor_groups.reset()

    def _is_known(self) -> bool:
        """Return whether a center apart from the model can be read; before training starts, only a loaded one."""
        if self._startup.begun or not self._checkpoint.has_loaded():
            return self._startup.begun
        return self._exchanger.shows_loaded
