"""Counts local steps, and runs an exchange when one is due."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.arguments import refuse_asynchronous, refuse_with_quorum, require_int
from hvd_periodic.centers import placement_of
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.norm_bounds import NormBounds, as_norm_bounds
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.membership import Membership
from hvd_periodic.journal import Journal
from hvd_periodic.journal.base import Counters
from hvd_periodic.journal.files import requested_folder
from hvd_periodic.local_state import LocalStateLike, as_local_state
from hvd_periodic.options import PathLike, WeightLike
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.outer.per_fragment import CloneableOptimizer
from hvd_periodic.participation import policies_of
from hvd_periodic.participation.base import Setting
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.schedules.conversion import as_schedule
from hvd_periodic.sync.adoption import Successor, adopt
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.center_reader import CenterReader
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.combinations import (
    as_error_decay,
    as_grace,
    as_quorum,
    as_staleness_power,
    check_bounds,
    check_outer,
    check_schedule,
    check_weight,
)
from hvd_periodic.sync.differences import Differences
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, check_agreement
from hvd_periodic.sync.finite import RAISE, SKIP, as_nonfinite
from hvd_periodic.sync.fragment_plan import by_fragments
from hvd_periodic.sync.gradients import Gradients
from hvd_periodic.sync.handshake import Handshake, Weight
from hvd_periodic.sync.optimizer_state import OptimizerState, state_exchange
from hvd_periodic.sync.overlapped import Overlapped, as_overlap
from hvd_periodic.sync.planner import Planner
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.quorum import WithQuorum
from hvd_periodic.sync.reporting import new_journal
from hvd_periodic.sync.startup import CallPoint, Startup, warn_of_former
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.sync.tensor_groups import ExchangeSpec, TensorGroups
from hvd_periodic.sync.warmup import SynchronousWarmup
from hvd_periodic.vectors.fragments import cut_into_fragments
from hvd_periodic.wires import as_wire
from hvd_periodic.wires.compression import Compression

V = TypeVar("V")

_AVERAGED_UNTIL_NOW = (
    "They were to average all gradients until now: did they start alike, and does hvd.DistributedOptimizer average "
    "those of all variables?"
)


class Exchangers(NamedTuple):
    """Strategies of exchange: ranks wait for each other, or do not, or exchanges are in flight during local steps.

    With a quorum, ranks wait for some of the others.
    """

    synchronous: type[Exchanger[Any]] = Synchronous
    asynchronous: type[Exchanger[Any]] = Asynchronous
    overlapped: type[Exchanger[Any]] = Overlapped
    quorum: type[Exchanger[Any]] = WithQuorum


class ReplicaSynchronizer(Generic[V]):
    """Runs the exchanges of one replica by one algorithm and one schedule.

    Construction is local. :meth:`start` is the first call that communicates; it gives all ranks the root's values.
    Other values may be loaded until the first step, into the model or as a state: :meth:`begin` then finds out which
    rank has loaded which. Every rank calls :meth:`prepare_gradients` before each local update, :meth:`step` once per
    iteration, and :meth:`finalize` at the end.

    Args:
        replica: the parameters of this rank, as a front end provides them.
        algorithm: the computation of an exchange.
        schedule: when to exchange: a schedule, a function of the clock, or a number of local steps.
        communicator: the ranks that exchange.
        root: the rank, within the communicator, from whose values all start.
        name: prefix of the names of collectives. Default: the communicator's next unique name; all ranks must request
            equally many.
        center: where the center of the parameters lives: ``"replicated"`` on every rank; ``"root"``, on the root alone;
            ``"sharded"``, one n-th of it on every rank. The last two make :meth:`center`, :meth:`distance` and
            :meth:`state_dict` collective: all ranks must call them. Statistics are always replicated.
        asynchronous: exchange with one center, on the root, without waiting for other ranks. The center is then in
            shared memory where all ranks are on one host; otherwise on the root, or with ``center="sharded"`` one n-th
            of it on every rank. :meth:`center`, :meth:`distance` and :meth:`state_dict` are not collective.
        use_locking: whether asynchronous exchanges in shared memory wait for each other; without it, those that
            collide are computed again.
        outer: an optimizer of the framework that moves the center, for algorithms that take one.
        rates: the learning rates of the local optimizer, for algorithms that ask for them.
        optimizer_state: policy for the local optimizer's state at an exchange.
        local_optimizer: access to that state, for policies that change it.
        overlap: local steps during which an exchange may be in flight, or ``"period"``.
        compression: encoding of the messages of the parameters.
        error_decay: part of what a message did not send that is added to the next one.
        fragments: number of parts of the parameters that are exchanged one after another within a period.
        nonfinite: policy for a rank whose replica is not finite: ``"raise"``, ``"skip"`` or ``"ignore"``.
        weight: weight of this rank in means over ranks: a number, a function, or its work, ``"steps"`` or
            ``"examples"``; None: all ranks count equally.
        audit_every: exchanges after which ranks compare their centers; 0: never.
        max_message_norm: largest norm of this rank's messages, or ``"median"``; None: no bound.
        max_mean_norm: largest norm of the mean by which the center steps; None: no bound.
        timeout_seconds: seconds for which a rank waits for the others in one call; None: no limit.
        center_file: file that holds an asynchronous center and outlives the job.
        staleness_power: power of the discount of stale pushes, in asynchronous exchange, and of members of a round.
        quorum: number of ranks that a round waits for; None: all.
        grace_seconds: seconds that a round stays open after these have come; None: a tenth of the time they took; or in
            asynchronous exchange, those in which workers wait for each other's pushes; None: 0.
        run_log: folder of the run log; None: the folder that the environment names, if any; False: no log.
        journal: notifies listeners of exchanges. Default: a new journal.

    Attributes:
        exchangers: the strategies of exchange.
        gradients_type, checkpoint_type, center_reader_type: further classes that a front end may replace by its own.
        cuts_tensors: an outer optimizer can have parts of tensors.
        commits_hold_sets: commits of elastic jobs hold which parameters are trained.
        exchanged: the replica and the algorithm.
        membership: the ranks.
        progress: counters, and the state of the schedule.
        planner: asks the schedule.
        warmup: whether all gradients are still averaged.
        handshake: exchanges small records with the other ranks.
        exchanger: the strategy of exchange that this synchronizer uses.
        startup: agrees with the other ranks on the values to start from.
        checkpoint: saves and loads the state.
        center_reader: shows the center.
        gradients: shows gradients to the algorithm.
        journal: notifies listeners of exchanges.

    Raises:
        ValueError: the number of ranks does not allow the hyper-parameters, or ``center`` is unknown.
        RuntimeError: asynchronous exchange is not possible between these ranks.
    """

    exchangers: Exchangers = Exchangers()
    gradients_type: ClassVar[type[Gradients[Any]]] = Gradients
    checkpoint_type: ClassVar[type[Checkpoint[Any]]] = Checkpoint
    center_reader_type: ClassVar[type[CenterReader[Any]]] = CenterReader
    cuts_tensors: ClassVar[bool] = True
    commits_hold_sets: ClassVar[bool] = False

    def __init__(
        self,
        replica: Replica[V],
        algorithm: Algorithm,
        schedule: int | Schedule | Callable[[Clock], int],
        communicator: Communicator,
        root: int = 0,
        name: str | None = None,
        center: str = "replicated",
        asynchronous: bool = False,
        use_locking: bool = True,
        outer: OuterOptimizer | None = None,
        rates: LearningRates | None = None,
        optimizer_state: LocalStateLike = "local",
        local_optimizer: OptimizerState[V] | None = None,
        overlap: int | str = 0,
        compression: Any = Compression.none,
        error_decay: float = 1.0,
        fragments: int = 1,
        nonfinite: str = RAISE,
        weight: WeightLike = None,
        audit_every: int = 0,
        max_message_norm: float | str | None = None,
        max_mean_norm: float | None = None,
        timeout_seconds: float | None = None,
        center_file: PathLike | None = None,
        staleness_power: float = 0.0,
        quorum: int | None = None,
        grace_seconds: float | None = None,
        run_log: PathLike | bool | None = None,
        journal: Journal | None = None,
    ) -> None:
        wire, overlaps = as_wire(compression), as_overlap(overlap) != 0
        require_int(fragments, "`fragments`", minimum=1)
        require_int(audit_every, "`audit_every`", minimum=0)
        counts, bounds = Weight(weight), as_norm_bounds(max_message_norm, max_mean_norm)
        if asynchronous:
            refuse_asynchronous(overlaps, "overlap", overlap, "no rank waits for another")
            refuse_asynchronous(fragments > 1, "fragments", fragments, "no rank waits for another")
            refuse_asynchronous(wire.lossy, "compression", compression, "ranks read and write the center itself")
            refuse_asynchronous(error_decay != 1, "error_decay", error_decay, "no part of a message is left unsent")
            refuse_asynchronous(audit_every > 0, "audit_every", audit_every, "there is one center")
            refuse_asynchronous(weight is not None, "weight", weight, "no mean is taken")
            if isinstance(max_message_norm, str):
                raise ValueError(
                    "`max_message_norm` must be a number with asynchronous=True, as no rank knows the norms of others. "
                    f"Received: max_message_norm={max_message_norm!r}"
                )
            refuse_asynchronous(max_mean_norm is not None, "max_mean_norm", max_mean_norm, "no mean is taken")
        schedule = as_schedule(schedule, "schedule")
        check_schedule(schedule, bool(asynchronous))
        refuse_with_quorum(
            quorum,
            asynchronous=(asynchronous, bool(asynchronous)),
            overlap=(overlap, overlaps),
            fragments=(fragments, fragments > 1),
            audit_every=(audit_every, audit_every > 0),
            center=(center, center == "sharded"),
        )
        needed = as_quorum(quorum, None if asynchronous else grace_seconds, algorithm, communicator, outer is not None)
        exchanger = self.exchangers.asynchronous if asynchronous else self.exchangers.synchronous
        exchanger = self.exchangers.overlapped if overlaps else exchanger
        exchanger = exchanger if needed is None else self.exchangers.quorum
        self.policy = as_local_state(optimizer_state)
        variant = exchanger.suited(algorithm, communicator.size)
        setting = Setting(
            replica,
            variant,
            asynchronous,
            quorum,
            center,
            wire,
            fragments,
            self.policy,
            local_optimizer,
            bounds,
            schedule,
        )
        policies = policies_of(replica)
        for policy in policies:
            policy.check(setting)
            replica.parameters.layout = policy.layout(replica)
        whole_tensors = outer is not None and not self.cuts_tensors
        replica.parameters.layout, cut = cut_into_fragments(replica.parameters.layout, fragments, whole_tensors)
        outer = cast(CloneableOptimizer, outer).per_fragment(cut) if outer is not None and len(cut) > 1 else outer
        schedule = by_fragments(schedule, len(cut))
        self.replica = replica
        check_outer(outer is not None, algorithm, variant)
        power = as_staleness_power(staleness_power, variant, bool(asynchronous), quorum is not None)
        self.exchanged = ExchangeSpec(replica, variant, outer, rates)
        exchanger.check(schedule, self.policy)
        self.algorithm = self.exchanged.algorithm
        check_weight(counts, self.algorithm, replica, fragments)
        decay = as_error_decay(error_decay, wire, self.algorithm)
        check_bounds(bounds, self.algorithm, communicator.size)
        self.membership = Membership(communicator, root, communicator.unique_name() if name is None else name)
        state = state_exchange(self.policy, local_optimizer, replica, self.membership)
        self.progress = self.new_progress(schedule)
        self.planner = Planner(schedule, self.membership)
        self.warmup = SynchronousWarmup(self.planner, self.progress)
        follower = self.exchanged.hyperparameters
        self.handshake = Handshake(self.membership, self.progress, self.planner, follower, state, counts)
        communicator.tracker.limit(timeout_seconds)
        reset = local_optimizer if as_nonfinite(nonfinite) == SKIP else None
        if reset is not None:
            reset.learn_start()
        self.run_log = requested_folder(run_log)
        self.journal = journal or new_journal(self.membership, self.run_log)
        context = ExchangeContext(
            self.exchanged,
            self.membership,
            self.progress,
            self.planner,
            self.warmup,
            self.handshake,
            optimizer_state=state,
            fragments=cut,
            overlap=overlap,
            wire=wire,
            error_decay=decay,
            local_optimizer=reset,
            nonfinite=nonfinite,
            audit_every=audit_every,
            differences=Differences(replica, self.membership),
            bounds=bounds,
            center_file=_as_center_file(center_file, bool(asynchronous)),
            staleness_power=power,
            quorum=needed,
            grace=as_grace(grace_seconds, variant) if asynchronous else 0.0,
            journal=self.journal,
        )
        self.exchanger = exchanger(context, placement_of(center), use_locking)
        self.gradients = self.gradients_type(self.exchanger)
        self.checkpoint = self.checkpoint_type(self.exchanger)
        self.startup = Startup(self.exchanger, self.checkpoint, self.gradients.assigned)
        self.center_reader = self.center_reader_type(self.exchanger, self.checkpoint, self.startup)
        self.handshake.checks += [replica.changes, self.gradients.assigned.name_parameters]
        self.handshake.checks += [partial(policy.problem, setting) for policy in policies]
        if self.progress.is_new:
            self.exchanger.tensor_groups.reset()

    def construct(self, replica: Replica[V], **arguments: Any) -> None:
        """Construct this object again, for another replica; without communication."""
        ReplicaSynchronizer.__init__(self, replica, **arguments)

    def new_progress(self, schedule: Schedule) -> ProgressTracker:
        """Return what keeps the counters; a front end may keep them elsewhere."""
        return ProgressTracker(schedule)

    def average_within(self, group: Communicator | None) -> None:
        """Include ranks that average their gradients with this one at every step; to be called before :meth:`start`.

        These ranks agree, start and are restored together with the ranks that exchange.
        """
        if group is not None:
            self.membership.average_within(group, throughout=self.warmup.until is None)

    def start(self) -> None:
        """Check that all ranks have the same settings; give all the root's values, or begin from the loaded state.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: as :meth:`begin`.
        """
        warn_of_former(self)
        self.check_agreement()
        self.startup.start(self.begin)

    def check_agreement(self) -> None:
        """Check that all ranks have the same settings; for asynchronous exchange, create the center.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: the launcher of the job does not allow asynchronous exchange.
        """
        check_agreement(self.exchanger, self.policy)
        self.exchanger.open()

    def begin(self, call_point: CallPoint = CallPoint.BEFORE_UPDATE) -> bool:
        """Begin training unless it has begun since construction and since a state was loaded; collective.

        The ranks find out which of them have loaded a state:

        - none: all start from the parameters that are now in the model of the root;
        - all, each its own or all the same one: they continue exactly from there;
        - the root, but not all others: all take over its parameters, center, counters, and state of the center's
          optimizer.

        Args:
            call_point: the point at which this rank begins. If all have changed their models already, they started from
                the values that :meth:`start` gave them.

        Returns:
            Whether this rank took over other parameters, so that its gradients are not those of its parameters.

        Raises:
            RuntimeError: the loaded states do not belong together; ranks are in different calls; all are at the end
                and have trained without counting a step; or a rank cannot continue. Raised on all ranks.
        """
        if self.startup.begun:
            return False
        found = self.startup.begin(call_point)
        self.membership.communicator.settle()
        return found

    def report(self, loss: Any) -> None:
        """Report the loss of this rank to the schedule, before the step to which it belongs; not necessarily at each.

        At an exchange, the ``loss`` of the clock is the mean over ranks of the losses reported since the last one.

        Args:
            loss: a number: a float, or a tensor or array without dimensions.

        Raises:
            TypeError: ``loss`` is not a number.
            ValueError: NaN or infinity. This rank waits for the others, which raise an error at their next exchange.

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
        """Show the local gradients to the algorithm; to be called before every local update.

        EASGD with ρ > 0 adds its elastic term to the gradients, AGN accumulates them. The first call begins training as
        :meth:`begin` does, and discards the gradients if that replaces the parameters.

        Raises:
            RuntimeError: called inside ``center()``; or as :meth:`begin`.
        """
        self.center_reader.require_outside_center_block("step")
        if self.begin():
            self.replica.discard_gradients()
        self.gradients.prepare()

    def step(self, updated: bool = True, examples: Any = None) -> bool:
        """Count one iteration, and exchange if an exchange is due; to be called after every iteration, on all ranks.

        Args:
            updated: whether the local update ran; iterations without it count as well, so that ranks agree.
            examples: the number of examples of the update, or tokens, for ``weight="examples"``; ignored without
                update.

        Returns:
            Whether an exchange took place.

        Raises:
            TypeError, ValueError: ``examples`` is not a number of at least 0; the other ranks raise an error at their
                next exchange.
            RuntimeError: called inside ``center()``; after an update whose gradients the algorithm needed but was not
                shown; or as :meth:`sync`.
        """
        self.center_reader.require_outside_center_block("step")
        self.gradients.check(updated)
        self.begin(CallPoint.AFTER_UPDATE if updated else CallPoint.BEFORE_UPDATE)
        if examples is not None and updated:
            self.exchanger.report_examples(examples)
        due = self.progress.count(updated)
        if self.local_steps == self.warmup.until:
            self.restart_center()
        if due:
            self.sync()
        elif self.progress.is_landing_due:
            self.land()
        return bool(due)

    def sync(self) -> None:
        """Exchange now, on all ranks, independently of the schedule.

        Raises:
            RuntimeError: the parameters changed since construction, or ranks are at different steps; on all ranks.
        """
        self.center_reader.require_outside_center_block("sync")
        self.begin(CallPoint.AFTER_UPDATE)
        self.exchanger.exchange()
        self.membership.communicator.settle()

    def land(self) -> None:
        """Apply the exchange in flight to the replica; to be called before other weights are put into the model."""
        self.center_reader.require_outside_center_block("land")
        self.exchanger.land()
        self.membership.communicator.settle()

    def finalize(self) -> None:
        """Leave training: exchange the last local steps, so that all ranks end with the same center.

        Ranks may call it after different numbers of steps: a rank that is done takes part in the exchanges of the
        others. No exchange takes place if no rank has stepped since the last one. Training may continue afterwards,
        from the largest number of steps.

        In asynchronous training each rank pushes its last local steps and sleeps until all have done so; the center is
        final then. Ranks of groups wait for the ranks of all groups, since the first process that ends shuts down
        Horovod for all.

        Raises:
            RuntimeError: the centers of the ranks differ; on all ranks.
        """
        self.leave()
        self.membership.communicator.wait_for_job()

    def leave(self) -> None:
        """Do as :meth:`finalize`, without waiting for ranks of other groups."""
        self.center_reader.require_outside_center_block("finalize")
        self.exchanger.check_alive()
        self.begin(CallPoint.END)
        self.exchanger.leave()
        self.membership.communicator.settle()
        if self.handshake.background_save is not None:
            self.handshake.background_save.complete()
        self.journal.ended(self.counters)

    def adopt(self, successor: Callable[[], Successor[V]]) -> None:
        """Go on with another set of parameters: of those that stay, all is kept; collective. See :mod:`.adoption`.

        Args:
            successor: returns the replica of the new set, with what depends on it.

        Raises:
            RuntimeError: called inside ``center()``; this kind of training cannot adopt; or other ranks are in another
                call.
            TypeError, ValueError: the new set is refused, or differs between ranks; on all ranks. Training goes on with
                the old one.
        """
        adopt(self, successor)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of construction that do not depend on the replica."""
        context, membership, worker = self.exchanger.context, self.membership, self.exchanger.worker
        quorum = context.quorum
        bounds = context.bounds or NormBounds()
        return {
            "algorithm": self.exchanged.algorithm,
            "schedule": self.planner.schedule,
            "communicator": membership.communicator,
            "root": membership.requested_root,
            "name": membership.name,
            "center": self.exchanger.placement.name if worker is None else worker.place,
            "asynchronous": worker is not None and quorum is None,
            "use_locking": worker is None or worker.use_locking,
            "optimizer_state": self.policy,
            "overlap": context.overlap,
            "compression": context.wire,
            "error_decay": context.error_decay,
            "fragments": len(context.fragments),
            "nonfinite": context.nonfinite,
            "weight": self.handshake.weight.given,
            "audit_every": context.audit_every,
            "max_message_norm": bounds.message,
            "max_mean_norm": bounds.mean,
            "timeout_seconds": membership.communicator.tracker.timeout,
            "center_file": context.center_file,
            "staleness_power": context.staleness_power,
            "quorum": None if quorum is None else quorum.size,
            "grace_seconds": (context.grace or None) if quorum is None else quorum.grace,
            "run_log": self.run_log or False,
        }

    def audit(self) -> None:
        """Check that all ranks hold the same center, bit by bit, and compare the weights that no exchange touches.

        Collective. Of weights that differ, the root warns, once for each. In asynchronous training and with a quorum
        there is one center, and ranks compare these weights only, without the ranks that have died.

        Raises:
            RuntimeError: centers differ, the message names the ranks; or other ranks are in another call.
        """
        self.exchanger.audit()
        self.membership.communicator.settle()

    def restart_center(self) -> Any:
        """Set the center to the parameters, which must be equal on all ranks, when a synchronous warmup ends.

        Raises:
            RuntimeError: the parameters differ.
        """
        self.exchanger.discard()
        self.tensor_groups.restart()
        self.tensor_groups.audit(_AVERAGED_UNTIL_NOW)
        self.membership.communicator.settle()

    def broadcast(self) -> None:
        """Give all ranks the root's parameters, buffers, center, counters and schedule position.

        It restores training when a checkpoint was loaded on the root only, except for the state of the local optimizer.
        If gradients are averaged within groups, each group first takes over the values of its first rank.

        Raises:
            RuntimeError: called inside ``center()``; or a state was loaded on some ranks only although gradients are
                averaged, which requires equal states of local optimizers.
        """
        self.center_reader.require_outside_center_block("broadcast")
        self.startup.broadcast_from(self.membership.root_among_all)
        self.membership.communicator.settle()

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center variables in the model inside the block; restore the local values after it, also on errors.

        Averaged buffers take their values at the last exchange. Before the first step, the center equals the model. If
        the center is not on every rank, all ranks must enter the block.

        Raises:
            RuntimeError: blocks are nested.
        """
        with self.center_reader.center(self.begin):
            yield

    def distance(self) -> float:
        """Return ‖x − c‖₂, the distance of this rank's parameters to the center.

        It communicates nothing if the center is on every rank, and is collective otherwise.
        """
        return self.center_reader.distance(self.begin)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training needs to continue exactly, without the parameters and the local optimizer.

        It consists of copies, in tensors, dicts, lists and numbers only, and contains the whole center. If the center
        is not on every rank, all ranks must call this once training has begun.
        """
        return self.center_reader.state_dict(self.begin)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`: every rank its own, or all the same one; or the root alone.

        The first step afterwards finds out which ranks have loaded a state, see :meth:`begin`. The saved schedule
        determines the next exchange, the schedule of this synchronizer all later ones.

        Raises:
            ValueError: the state belongs to another algorithm, another model or another version.
            RuntimeError: called inside ``center()``; or during asynchronous training, which other ranks would not
                notice.
        """
        self.check_state_dict(state)
        self.load_checked(state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a state can be loaded; change nothing.

        Raises:
            ValueError, RuntimeError: as :meth:`load_state_dict`.
        """
        self.center_reader.require_outside_center_block("load_state_dict")
        self.checkpoint.check(state, self.begun)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`check_state_dict` has accepted."""
        self.checkpoint.load(state)
        self.startup.begun = False

    @property
    def tensor_groups(self) -> TensorGroups[V]:
        """The exchanged tensors with their centers: the parameters, and several kinds of statistics."""
        return self.exchanger.tensor_groups

    @property
    def counters(self) -> Counters:
        """Steps, exchanges, bytes and seconds so far."""
        return self.progress.counters

    @property
    def local_steps(self) -> int:
        """Iterations so far."""
        return self.progress.local_steps

    @property
    def rounds(self) -> int:
        """Exchanges so far."""
        return self.progress.rounds

    @property
    def learning_rate(self) -> Callable[[], Any] | None:
        """Function that returns the learning rate of the local optimizer, for schedules; None if it is unknown."""
        return self.progress.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Callable[[], Any] | None) -> None:
        self.progress.learning_rate = learning_rate

    @property
    def begun(self) -> bool:
        """Whether training has begun since construction and since a state was loaded."""
        return self.startup.begun

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies and pickles, which would share functions with the original, such as that of the learning rate.

        Raises:
            TypeError: always; a front end may override this.
        """
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: construct another one on all ranks, and load "
            "into it what state_dict() returns"
        )

    def center_tensors(self) -> list[Any]:
        """Return views of this rank's shard of the center of the parameters, in order, in the dtype of the center.

        Complex parameters are pairs of reals, of shape (…, 2).
        """
        self.exchanger.wait_and_update_centers()
        return self.tensor_groups.parameters.center.tensors()


def _as_center_file(center_file: PathLike | None, asynchronous: bool) -> Path | None:
    """Return the absolute path of the file that holds the center, if there is one.

    Raises:
        TypeError: not a path.
        ValueError: exchange is synchronous.
    """
    if center_file is None:
        return None
    if not isinstance(center_file, (str, os.PathLike)):
        raise TypeError(f"`center_file` must be a path, or None. Received: {center_file!r}")
    if not asynchronous:
        raise ValueError(
            "`center_file` is for asynchronous exchange, in which a center moves outside of all replicas: save "
            f"checkpoints of synchronous training. Received: center_file={str(center_file)!r}"
        )
    return Path(center_file).absolute()
