"""Counts local steps, and exchanges when one is due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.sync.exchanger import check_agreement
from hvd_periodic.sync.parts import Parts
from hvd_periodic.sync.startup import CallPoint, warn_of_former

V = TypeVar("V")

_AVERAGED_UNTIL_NOW = (
    "They were to average all gradients until now: did they start alike, and does hvd.DistributedOptimizer average "
    "those of all variables?"
)


class ReplicaSynchronizer(Parts[V]):
    """Runs one algorithm on one replica, whenever its schedule says so.

    Construction, with the arguments of :class:`~hvd_periodic.sync.parts.Parts`, is local; :meth:`start` is the first
    call that communicates, and gives all ranks the root's values. Until the first step others may be loaded, into the
    model or as a state: :meth:`begin` then finds out who has what. Every rank calls :meth:`prepare_gradients` before
    each local update, :meth:`step` once per iteration, and :meth:`finalize` at the end.
    """

    def average_within(self, group: Communicator | None) -> None:
        """Take notice of the ranks that average their gradients with this one at every step, before :meth:`start`.

        They agree, start and are restored like this one; those that exchange do so anyway.
        """
        if group is not None:
            self.membership.average_within(group, throughout=self.warmup.until is None)

    def start(self) -> None:
        """Check that all ranks are about to do the same; give all the root's values, or begin from what was loaded.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: as :meth:`begin`.
        """
        warn_of_former(self)
        self.check_agreement()
        self.startup.start(self.begin)

    def check_agreement(self) -> None:
        """Check that all ranks are about to do the same; for asynchronous exchange, make the center.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: asynchronous exchange is not possible, as the job was launched.
        """
        check_agreement(self.exchanger, self.policy)
        self.exchanger.open()

    def begin(self, moment: CallPoint = CallPoint.BEFORE_UPDATE) -> bool:
        """Begin training, if it has not begun since construction or since a state was loaded: all ranks together.

        The ranks find out who has what:

        - nobody has loaded a state: all start from what is now in the model of the root;
        - every rank has loaded its own, or all the same one: they go on exactly from there;
        - the root has, and others have not: all take over its parameters, center, counters, and state of the center's
          optimizer.

        Args:
            moment: what this rank can say of its model. Where all have changed theirs already, they started from what
                :meth:`start` gave them.

        Returns:
            Whether this rank took over other parameters, so that gradients which it has are of none that it holds.

        Raises:
            RuntimeError: the states of ranks do not belong together; ranks wait in different places; all are at the
                end, and have trained without counting a step; one cannot go on. On all ranks.
        """
        return not self.begun and self.startup.begin(moment)

    def report(self, loss: Any) -> None:
        """Tell schedules the loss of this rank; before the step that it belongs to, at every one or now and then.

        At an exchange, the mean over ranks of what they have reported since the last one is the ``loss`` of the clock.

        Args:
            loss: a number: a float, or a tensor or array without dimensions.

        Raises:
            TypeError: no number.
            ValueError: NaN or infinity. The other ranks get an error where they exchange next; this one waits for them.

        Example:
            >>> import numpy as np
            >>> from hvd_periodic.numpy import SGD, ModelAverageOptimizer
            >>> x = np.ones(2)
            >>> optimizer = ModelAverageOptimizer(SGD(0.1), {"x": x}, lambda clock: 2 if clock.loss is None else 3)
            >>> for step in range(5):
            ...     optimizer.synchronizer.report(x @ x)
            ...     optimizer.step({"x": 2 * x})
            >>> optimizer.synchronizer.counters.last_exchange
            5
        """
        self.exchanger.report(loss)

    def prepare_gradients(self) -> None:
        """Show the local gradients to the algorithm; call it before every local update.

        EASGD with ρ > 0 adds its elastic term to them, AGN accumulates them. The first call begins training, see
        :meth:`begin`: gradients of parameters that are replaced there are discarded.

        Raises:
            RuntimeError: called inside ``center()``; or as :meth:`begin`.
        """
        self.center_reader.require_outside_center_block("step")
        if self.begin():
            self.replica.discard_gradients()
        self.gradients.prepare()

    def step(self, updated: bool = True) -> bool:
        """Count one iteration and exchange if one is due; call it after every iteration, on all ranks.

        Args:
            updated: whether the local update ran; an iteration without it counts as well, so that ranks agree.

        Returns:
            Whether an exchange took place.

        Raises:
            RuntimeError: called inside ``center()``; after an update whose gradients the algorithm needed and was not
                shown; or as :meth:`sync`.
        """
        self.center_reader.require_outside_center_block("step")
        self.gradients.check(updated)
        self.begin(CallPoint.AFTER_UPDATE if updated else CallPoint.BEFORE_UPDATE)
        due = self.progress.count(updated)
        self.warmup.on_end(self.restart_center)
        if due:
            self.sync()
        elif self.progress.is_landing_due:
            self.land()
        return bool(due)

    def sync(self) -> None:
        """Exchange now, on all ranks, whatever the schedule says.

        Raises:
            RuntimeError: the parameters changed since construction, or ranks are at different steps; on all ranks.
        """
        self.center_reader.require_outside_center_block("sync")
        self.begin(CallPoint.AFTER_UPDATE)
        self.exchanger.exchange()

    def land(self) -> None:
        """Let the replica take an exchange that is under way; call it before other weights are put into the model."""
        self.center_reader.require_outside_center_block("land")
        self.exchanger.land()

    def finalize(self) -> None:
        """Leave training: exchange what is left, so that all ranks end with the same center.

        Ranks may arrive after different numbers of steps: one that is done takes part in the exchanges of the others.
        If nobody has stepped since the last one, none takes place. Training may go on, from the most steps of a rank.

        In asynchronous training each rank pushes what is left, and waits, asleep, until all have: the center is final
        then. Ranks of groups wait for those of all groups: the first process that ends would take Horovod from all.

        Raises:
            RuntimeError: the centers of the ranks differ; on all ranks.
        """
        self.leave()
        self.membership.communicator.wait_for_job()

    def leave(self) -> None:
        """Do what :meth:`finalize` does among the ranks that exchange."""
        self.center_reader.require_outside_center_block("finalize")
        self.exchanger.check_alive()
        self.begin(CallPoint.END)
        self.exchanger.leave()
        self.handshake.have_left()
        self.tell_end()

    def audit(self) -> None:
        """Check on all ranks that they hold the same center, to the bit; each what it holds of it for all.

        Raises:
            RuntimeError: they do not; names the ranks. Or other ranks have come for something else.
        """
        self.center_reader.audit()

    def restart_center(self) -> Any:
        """Let exchanges begin: set the center to the parameters, which have to be the same on all ranks.

        Raises:
            RuntimeError: the parameters are not the same.
        """
        self.exchanger.discard()
        self.tensor_groups.restart()
        self.tensor_groups.audit(_AVERAGED_UNTIL_NOW)

    def broadcast(self) -> None:
        """Give all ranks the root's parameters, buffers, center, counters and schedule position.

        It restores training when a checkpoint was loaded on the root only; the state of the local optimizer is not part
        of it. Where gradients are averaged in groups, each takes over the values of its first rank before.

        Raises:
            RuntimeError: called inside ``center()``; or a state was loaded on some ranks only, where gradients are
                averaged, so that local optimizers have to be in the same state.
        """
        self.center_reader.require_outside_center_block("broadcast")
        self.startup.broadcast()

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center variables in the model inside the block, the local values again after it, come what may.

        Buffers that are averaged at exchanges take the values of the last one. Before the first step the center is what
        the model holds. Where the center is not on every rank, all ranks have to enter the block.

        Raises:
            RuntimeError: blocks are nested.
        """
        with self.center_reader.center(self.begin):
            yield

    def distance(self) -> float:
        """Return ‖x − c‖₂, the distance of this rank's parameters to the center.

        Nothing is communicated where the center is on every rank; otherwise all ranks have to ask.
        """
        return self.center_reader.distance(self.begin)

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to continue exactly, except the parameters and the local optimizer.

        It holds copies, in tensors, dicts, lists and numbers only; the whole center, wherever that lives. Where it is
        not on every rank, all ranks have to call this, once training has begun.
        """
        return self.center_reader.state_dict(self.begin)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned: on every rank its own, or all the same; or on the root alone.

        The first step afterwards finds out who has loaded what, see :meth:`begin`. The next exchange takes place where
        the saved schedule put it, those after it where this one does.

        Raises:
            ValueError: the state belongs to another algorithm, another model or another version.
            RuntimeError: called inside ``center()``; or in the middle of asynchronous training, which other ranks would
                not notice.
        """
        self.center_reader.require_outside_center_block("load_state_dict")
        self.checkpoint.load(state, self.begun)
        self.startup.begun = False
