"""The parts of training, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm
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
from hvd_periodic.sync.exchanger import ExchangeContext
from hvd_periodic.sync.finite import RAISE, SKIP, as_nonfinite
from hvd_periodic.sync.forms import Forms
from hvd_periodic.sync.fragment_plan import by_fragments
from hvd_periodic.sync.handshake import Handshake
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.optimizer_state import OptimizerState, state_exchange
from hvd_periodic.sync.planner import Planner
from hvd_periodic.sync.reporting import new_journal, to_counts
from hvd_periodic.sync.startup import Startup
from hvd_periodic.sync.status import Counters
from hvd_periodic.sync.tensor_groups import ExchangeSpec, TensorGroups
from hvd_periodic.sync.warmup import SynchronousWarmup
from hvd_periodic.wires.compression import Compression

V = TypeVar("V")


class Parts(Generic[V]):
    """What a synchronizer steers; each part is one file.

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
        forms: makes the parts of which a front end has a form of its own.

    Attributes:
        exchanged, membership, ledger, planner, phase, meeting, course, beginning, checkpoint, view, gradients, journal:
            the parts: what is exchanged, with whom, how far, when, whether it has begun to differ, what ranks say to
            each other, how they exchange, from what they begin, what is saved, how the center is read, what algorithms
            see, who hears of exchanges.

    Raises:
        ValueError: hyper-parameters that make no sense for so many ranks, or an unknown ``center``.
        RuntimeError: asynchronous exchange is not possible between these ranks.
    """

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
        forms: Forms = Forms(),  # noqa: B008
    ) -> None:
        exchanger, wire = forms.exchanger(bool(asynchronous), overlap), forms.wire(bool(asynchronous), compression)
        cut = forms.fragments(bool(asynchronous), fragments, replica.parameters, outer is not None)
        outer = cast(CloneableOptimizer, outer).per_fragment(cut) if outer is not None and len(cut) > 1 else outer
        self.policy, planned = (
            as_local_state(optimizer_state),
            by_fragments(as_schedule(schedule, "schedule"), len(cut)),
        )
        self.exchanged = ExchangeSpec(replica, exchanger.suited(algorithm, communicator.size), outer, rates)
        exchanger.check(planned, self.policy)
        self.replica, self.algorithm = replica, self.exchanged.algorithm
        self.membership = Membership(communicator, root, communicator.unique_name() if name is None else name)
        state = state_exchange(self.policy, local_optimizer, replica, self.membership)
        self.progress = forms.progress(planned)
        self.planner = Planner(planned, self.membership)
        self.warmup = SynchronousWarmup(self.planner, self.progress)
        hyperparameters = self.exchanged.hyperparameters
        counts = forms.weight(bool(asynchronous), weight, self.algorithm)
        self.handshake = Handshake(self.membership, self.progress, self.planner, hyperparameters, state, counts)
        known = self.membership, self.progress, self.planner, self.warmup, self.handshake
        communicator.tracker.limit(timeout_seconds)
        audits = forms.audits(bool(asynchronous), audit_every)
        local = local_optimizer if as_nonfinite(nonfinite) == SKIP else None
        if local is not None:
            local.learn_start()
        self.run_log = requested_folder(run_log)
        self.journal = journal or new_journal(lambda: self.membership, self.run_log)
        kept = forms.center_file(bool(asynchronous), center_file), self.journal
        context = ExchangeContext(self.exchanged, *known, state, cut, overlap, wire, local, nonfinite, audits, *kept)
        self.exchanger = exchanger(context, placement_of(center), use_locking)
        self.gradients = forms.gradients(self.exchanger)
        self.checkpoint = forms.checkpoint(self.exchanger)
        self.startup = Startup(self.exchanger, self.checkpoint, self.gradients.assigned)
        self.center_reader = forms.view(self.exchanger, self.checkpoint, self.startup)
        self.handshake.checks += [replica.changes, self.gradients.assigned.name_parameters]
        if self.progress.is_new:
            self.exchanger.tensor_groups.reset()

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
