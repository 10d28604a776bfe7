"""Counts local steps, and exchanges when one is due."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.arguments import require_int
from hvd_periodic.centers import placement_of
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.comm.base import Communicator
from hvd_periodic.journal import Journal
from hvd_periodic.journal.files import requested_folder
from hvd_periodic.local_state import LocalStateLike, as_local_state
from hvd_periodic.options import PathLike, WeightLike
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.outer.per_fragment import CloneableOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.schedules.conversion import as_schedule
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.center_reader import CenterReader
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, check_agreement
from hvd_periodic.sync.finite import RAISE, SKIP, as_nonfinite
from hvd_periodic.sync.fragment_plan import by_fragments
from hvd_periodic.sync.gradients import Gradients
from hvd_periodic.sync.handshake import Handshake, Weight
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.optimizer_state import OptimizerState, state_exchange
from hvd_periodic.sync.overlapped import Overlapped, as_overlap
from hvd_periodic.sync.planner import Planner
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.reporting import new_journal, to_counts
from hvd_periodic.sync.startup import CallPoint, Startup, warn_of_former
from hvd_periodic.sync.status import Counters
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


class ReplicaSynchronizer(Generic[V]):
    """Runs one algorithm on one replica, whenever its schedule says so.

    Construction is local; :meth:`start` is the first call that communicates, and gives all ranks the root's values.
    Until the first step other values may be loaded, into the model or as a state: :meth:`begin` then finds out which
    rank has loaded which. Every rank calls :meth:`prepare_gradients` before each local update, :meth:`step` once per
    iteration, and :meth:`finalize` at the end.

    Args:
        replica: the parameters of this rank, as a front end provides them.
        algorithm: what an exchange computes.
        schedule: when to exchange: a schedule, a function of the clock, or local steps.
        communicator: with whom.
        root: the rank, within the communicator, whose values all start from.
        name: prefix of the names of its collectives. Default: the communicator's next unique name, which all ranks have
            to draw equally often.
        center: where the center of the parameters lives: ``"replicated"`` on every rank; ``"root"``, on the root alone;
            ``"sharded"``, one n-th of it on every rank. The last two make :meth:`center`, :meth:`distance` and
            :meth:`state_dict` collective: all ranks call them. Statistics are replicated always.
        asynchronous: exchange with one center, on the root, without waiting for other ranks. The center is then in
            shared memory where all ranks are on one host; otherwise on the root, or with ``center="sharded"`` one n-th
            of it on every rank. :meth:`center`, :meth:`distance` and :meth:`state_dict` are not collective.
        use_locking: whether asynchronous exchanges in shared memory exclude each other; without it, additions that
            collide may be lost.
        outer: an optimizer of the framework that moves the center, for algorithms that take one.
        rates: the learning rates of the local optimizer, for algorithms that ask for them.
        optimizer_state: what becomes of the local optimizer's state at an exchange.
        local_optimizer: that state, for policies that touch it.
        overlap: local steps for which an exchange may be under way, or ``"period"``.
        compression: how the messages of the parameters travel.
        fragments: in how many parts, one after another within a period.
        nonfinite: what becomes of a rank whose replica is not finite: ``"raise"``, ``"skip"`` or ``"ignore"``.
        weight: how much this rank counts in means over ranks; None: all alike.
        audit_every: exchanges after which ranks compare their centers; 0: never.
        timeout_seconds: for which a rank waits for others in one place; None: for ever.
        center_file: in which an asynchronous center lies, which outlives the job.
        run_log: folder of the run log; None: that of the environment, if there is one; False: none.
        journal: hears of exchanges. Default: a new one.

    Attributes:
        exchangers: the strategies of exchange, synchronous and asynchronous.
        gradients_type, checkpoint_type, center_reader_type: further classes that a front end may replace by its own.
        cuts_tensors: an outer optimizer can have parts of tensors.
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
        ValueError: hyper-parameters that make no sense for so many ranks, or an unknown ``center``.
        RuntimeError: asynchronous exchange is not possible between these ranks.
    """

    exchangers: tuple[type[Exchanger[Any]], type[Exchanger[Any]]] = (Synchronous, Asynchronous)
    gradients_type: ClassVar[type[Gradients[Any]]] = Gradients
    checkpoint_type: ClassVar[type[Checkpoint[Any]]] = Checkpoint
    center_reader_type: ClassVar[type[CenterReader[Any]]] = CenterReader
    cuts_tensors: ClassVar[bool] = True

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
        fragments: int = 1,
        nonfinite: str = RAISE,
        weight: WeightLike = None,
        audit_every: int = 0,
        timeout_seconds: float | None = None,
        center_file: PathLike | None = None,
        run_log: PathLike | bool | None = None,
        journal: Journal | None = None,
    ) -> None:
        wire, overlaps = as_wire(compression), as_overlap(overlap) != 0
        require_int(fragments, "`fragments`", minimum=1)
        require_int(audit_every, "`audit_every`", minimum=0)
        counts = Weight(weight)
        if asynchronous:
            _refuse(overlaps, "overlap", overlap, "no rank waits for another")
            _refuse(fragments > 1, "fragments", fragments, "no rank waits for another")
            _refuse(wire.lossy, "compression", compression, "ranks read and write the center itself")
            _refuse(audit_every > 0, "audit_every", audit_every, "there is one center")
            _refuse(weight is not None, "weight", weight, "no mean is taken")
        exchanger = Overlapped if overlaps else self.exchangers[bool(asynchronous)]
        whole_tensors = outer is not None and not self.cuts_tensors
        replica.parameters.layout, cut = cut_into_fragments(replica.parameters.layout, fragments, whole_tensors)
        outer = cast(CloneableOptimizer, outer).per_fragment(cut) if outer is not None and len(cut) > 1 else outer
        self.policy = as_local_state(optimizer_state)
        schedule = by_fragments(as_schedule(schedule, "schedule"), len(cut))
        self.replica, self.exchanged = (
            replica,
            ExchangeSpec(replica, exchanger.suited(algorithm, communicator.size), outer, rates),
        )
        exchanger.check(schedule, self.policy)
        self.algorithm = self.exchanged.algorithm
        if weight is not None and not self.algorithm.takes_mean:
            raise ValueError(
                "`weight` is for algorithms that take the mean over ranks: averaging, DiLoCo, SlowMo, BMUF, and AGN "
                f"with op='average'. Received: {self.algorithm!r}"
            )
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
        self.journal = journal or new_journal(lambda: self.membership, self.run_log)
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
            local_optimizer=reset,
            nonfinite=nonfinite,
            audit_every=audit_every,
            center_file=_as_center_file(center_file, bool(asynchronous)),
            journal=self.journal,
        )
        self.exchanger = exchanger(context, placement_of(center), use_locking)
        self.gradients = self.gradients_type(self.exchanger)
        self.checkpoint = self.checkpoint_type(self.exchanger)
        self.startup = Startup(self.exchanger, self.checkpoint, self.gradients.assigned)
        self.center_reader = self.center_reader_type(self.exchanger, self.checkpoint, self.startup)
        self.handshake.checks += [replica.changes, self.gradients.assigned.name_parameters]
        if self.progress.is_new:
            self.exchanger.tensor_groups.reset()

    def new_progress(self, schedule: Schedule) -> ProgressTracker:
        """Return what keeps the counters; a front end may keep them elsewhere."""
        return ProgressTracker(schedule)

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
        return not self.startup.begun and self.startup.begin(moment)

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
        self.check_state_dict(state)
        self.load_checked(state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the errors that :meth:`load_state_dict` would raise; change nothing."""
        self.center_reader.require_outside_center_block("load_state_dict")
        self.checkpoint.check(state, self.begun)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`check_state_dict` has accepted."""
        self.checkpoint.load(state)
        self.startup.begun = False

    @property
    def tensor_groups(self) -> TensorGroups[V]:
        """What is exchanged: the parameters, and statistics of several kinds, with their centers."""
        return self.exchanger.tensor_groups

    @property
    def counters(self) -> Counters:
        """Steps, rounds, bytes and seconds so far."""
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
        """Returns the learning rate of the local optimizer, for schedules; set where that optimizer is known."""
        return self.progress.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Callable[[], Any] | None) -> None:
        self.progress.learning_rate = learning_rate

    def tell_end(self) -> None:
        """Tell the journal that training is over."""
        self.journal.ended(to_counts(self.counters))

    @property
    def begun(self) -> bool:
        """Whether training has begun, since construction and since a state was loaded."""
        return self.startup.begun

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies and pickles, whose functions would still be those of the original: of its learning rate, say.

        Raises:
            TypeError: always; a front end that can do better overrides this.
        """
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: construct another one on all ranks, and load "
            "into it what state_dict() returns"
        )

    def center_tensors(self) -> list[Any]:
        """Return what this rank holds of the center of the parameters: views, in their order and in its dtype."""
        self.exchanger.arrive()
        return self.tensor_groups.parameters.center.tensors()


def _refuse(given: bool, option: str, received: object, why: str) -> None:
    """Raise a ValueError where an option is given that makes no sense with asynchronous exchange."""
    if given:
        raise ValueError(
            f"`{option}` is for synchronous exchange: with asynchronous=True {why}. Received: {option}={received!r}"
        )


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
