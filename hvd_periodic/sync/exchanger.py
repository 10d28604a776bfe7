"""The base of exchange strategies, synchronous and asynchronous."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.arguments import described
from hvd_periodic.asynchronous.rounds import Quorum
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.comm.agreement import agree, build_on_all
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.comm.membership import Membership
from hvd_periodic.journal import Journal
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.participation.present import Presence
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.differences import Differences
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.handshake import Handshake
from hvd_periodic.sync.optimizer_state import OptimizerState, OptimizerStateExchange
from hvd_periodic.sync.planner import Plan, Planner, forecast
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.tensor_groups import ExchangeSpec, TensorGroups
from hvd_periodic.sync.warmup import SynchronousWarmup
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.store import Store
from hvd_periodic.version import __version__
from hvd_periodic.wires.base import Wire

V = TypeVar("V")


@dataclass(frozen=True)
class ExchangeContext(Generic[V]):
    """The collaborators and settings of an exchange.

    Attributes:
        exchanged: the replica and the algorithm.
        membership: the ranks.
        progress: counters and schedule state.
        planner: queries the schedule.
        warmup: whether gradients are still averaged.
        handshake: communicates with the other ranks before data travels.
        optimizer_state: exchanges the state of local optimizers; None if nothing does.
        fragments: the parts of the parameters that are exchanged one after another.
        overlap: number of local steps for which an exchange may be in flight, or ``"period"``.
        wire: encoding of the parameters' messages.
        error_decay: β, the part of what the wire did not send that is added to the next message.
        local_optimizer: the state of the local optimizer; None if unknown.
        nonfinite: policy for a rank whose replica is not finite.
        audit_every: number of exchanges between comparisons of the ranks' centers; 0: never.
        differences: compares the weights that no exchange touches.
        bounds: bounds on norms; None if there are none.
        center_file: file that holds an asynchronous center; None: no file.
        staleness_power: power p of the discount of what is stale.
        quorum: how many ranks a round waits for; None: for all.
        grace: seconds in which an asynchronous worker waits for pushes of others; 0: it waits for nobody.
        journal: records exchanges.
    """

    exchanged: ExchangeSpec[V]
    membership: Membership
    progress: ProgressTracker
    planner: Planner
    warmup: SynchronousWarmup
    handshake: Handshake
    optimizer_state: OptimizerStateExchange[V] | None
    fragments: Sequence[Fragment]
    overlap: int | str
    wire: Wire
    error_decay: float
    local_optimizer: OptimizerState[V] | None
    nonfinite: str
    audit_every: int
    differences: Differences[V]
    bounds: NormBounds | None
    center_file: Path | None
    staleness_power: float
    quorum: Quorum | None
    grace: float
    journal: Journal


class Exchanger(ABC, Generic[V]):
    """Runs exchanges and owns the centers. What has a default here holds where ranks wait for each other.

    Args:
        context: collaborators and settings.
        place: placement of the parameters' center, as requested.
        use_locking: whether exchanges in shared memory wait for each other.

    Attributes:
        steps_agree: whether ranks exchange at the same local steps.
        tensor_groups: the exchanged tensors with their centers.
        finite: checks for non-finite values, which no exchange should spread.
        worker: the connection to an asynchronous center; None in synchronous exchange.
        presence: notes which ``"present"`` parameters have gradients; None if there are none.
    """

    steps_agree: ClassVar[bool]
    context: ExchangeContext[V]
    tensor_groups: TensorGroups[V]
    finite: Finite[V]
    worker: Worker | None = None
    presence: Presence | None = None

    @classmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the variant of the algorithm for this kind of exchange among ``size`` ranks.

        Raises:
            ValueError: the algorithm has no such variant, or its rates make no sense.
        """
        algorithm.check(size)
        return algorithm

    @classmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Raise a ValueError if this kind of exchange does not support the schedule or the policy."""

    @abstractmethod
    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None: ...

    @property
    def placement(self) -> Placement:
        """The placement of the parameters' center."""
        return self.tensor_groups.parameters.placement

    @property
    def reads_together(self) -> bool:
        """Whether reading the center is collective."""
        return self.steps_agree and not self.placement.everywhere

    @property
    def shows_loaded(self) -> bool:
        """Whether a loaded center can be read before training starts."""
        return True

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Return the settings on which all ranks have to agree."""

    def open(self) -> None:
        """Create the center if construction has not; collective."""

    def join(self) -> None:
        """Exchange with the current members from now on; communicates nothing.

        Replicated centers keep their values. If this rank now holds another shard, the shard is filled with zeros.
        """

    def restart(self) -> None:
        """Set the centers to the values of this rank; collective."""
        self.tensor_groups.reset()

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return the plan of the first exchange, given all ranks' records."""
        return self.context.planner.first_plan(records)

    def report(self, loss: Any) -> None:
        """Note a loss of this rank; tell the other ranks if it is not finite.

        Raises:
            ValueError: the loss is NaN or infinite: this rank cannot continue.
        """
        self._note(self.context.progress.report, loss, ValueError)

    def report_examples(self, examples: Any) -> None:
        """Note the examples of a local update; tell the other ranks if they are no number of at least 0.

        Raises:
            TypeError, ValueError: this rank cannot continue.
        """
        self._note(self.context.progress.report_examples, examples, (TypeError, ValueError))

    def _note(
        self, note: Callable[[Any], None], value: Any, fatal: type[Exception] | tuple[type[Exception], ...]
    ) -> None:
        """Note a value of this rank; tell the other ranks if that raises an error that is fatal."""
        try:
            note(value)
        except fatal as error:
            self.context.handshake.fatal_error = str(error)
            self.tell_failure(error)
            raise

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks, if they would wait for this one, that it fails."""

    @abstractmethod
    def exchange(self, leaving: bool = False) -> bool:
        """Exchange; return whether any rank for which this one waits is still training."""

    def land(self) -> None:
        """Apply the exchange in flight to the replica."""

    def wait_and_update_centers(self) -> None:
        """Wait for the exchange in flight and update the centers."""

    def audit(self) -> None:
        """Check on all ranks that their centers are bitwise equal, and compare what no exchange touches; collective."""
        self.context.handshake.check_same_call(Purpose.AUDIT)
        self.wait_and_update_centers()
        self.tensor_groups.audit()
        self.context.differences.compare()

    def in_flight(self) -> Any:
        """Return the state of the exchange in flight for a checkpoint; None if there is none."""
        return None

    def discard(self) -> None:
        """Forget the exchange in flight."""

    def load_in_flight_exchange(self, saved: Any) -> None:
        """Continue the exchange that :meth:`in_flight` returned."""

    def check_in_flight(self, saved: Any) -> None:
        """Check the state of an exchange that :meth:`in_flight` returned.

        Raises:
            ValueError: exchanges are never in flight here; or the exchange belongs to another model.
        """
        if saved is not None:
            raise ValueError(
                "The state was saved while an exchange was in flight: load it into an optimizer with overlap > 0, like "
                "the one that saved it"
            )

    def check_alive(self) -> None:
        """Raise a RuntimeError if the other ranks can no longer be reached."""

    @abstractmethod
    def leave(self) -> None:
        """Exchange the remaining steps, so that all ranks end with the same center."""

    @abstractmethod
    def optimizer_state(self) -> Any:
        """Return the state of the center's optimizer for a checkpoint."""

    def pushes(self) -> Any:
        """Return the counts of pushes to an asynchronous center for a checkpoint; None in synchronous exchange."""
        return None

    def check_load(self, state: dict[str, Any], begun: bool) -> None:
        """Check that a state can be loaded now; change nothing.

        Raises:
            ValueError: the state does not fit.
            RuntimeError: the other ranks would not notice.
        """
        self.check_in_flight(state.get("under_way"))

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of the center's optimizer, if it is on this rank, and the exchange in flight."""

    def has_loaded(self, state: dict[str, Any]) -> None:
        """React to a state that the tensor groups have loaded."""

    def resume(self, state: dict[str, Any] | None) -> None:
        """Resume from the states that all ranks have loaded; collective."""

    def own_optimizer_state(self, saved: Any) -> Any:
        """Return this rank's part of what :meth:`optimizer_state` returned; None if it holds none."""
        return self.placement.select(saved)

    def go_on(self, former: Any, state: dict[str, Any], optimizer_state: Any) -> None:
        """Go on, after ``adopt()``, with vectors that the tensor groups have loaded; collective.

        Args:
            former: what exchanged the former set, of the same class.
            state: the state, with the vectors of the tensor groups.
            optimizer_state: the state of the center's optimizer for this rank; None if there is none.
        """
        if optimizer_state is not None:
            self.context.exchanged.center_optimizer.load(optimizer_state)

    def loaded_centers(self, state: dict[str, Any] | None) -> list[Store[Any]]:
        """Return the loaded centers in full; none if this rank has only shards, or if only the root's counts."""
        return []

    def begin_taking_over(self) -> None:
        """Prepare to take over the state of another rank."""

    def optimizer_state_to_give(self, state: dict[str, Any] | None) -> Any:
        """Return the state of the center's optimizer that others take over, given the state loaded here, if any."""
        return None

    @abstractmethod
    def take_over(self, takeover: TakeoverState) -> None:
        """Give all ranks the worker vectors and the centers of one rank."""


@dataclass(frozen=True)
class TakeoverState:
    """The state that one rank, the source, sends to the others.

    Attributes:
        send: replaces a value with the source's.
        is_source: whether this rank is the source.
        state: the state loaded here, if the center is not on every rank.
        whole: whether the source has loaded such a center in full.
        optimizer_state: state of the source's center optimizer.
    """

    send: Callable[[Any], Any]
    is_source: bool
    state: dict[str, Any] | None
    whole: bool
    optimizer_state: Any


def reset_to_center(groups: TensorGroups[V], context: ExchangeContext[V], problem: str | None) -> None:
    """Reset a rank with a non-finite replica to the centers, and its local optimizer to a new state.

    Collective, unless every rank can read the centers by itself. ``problem`` says what is not finite here; it is None
    on ranks that only help to read the centers.
    """
    for group in groups:
        for bucket in group.values.layout.buckets:
            center = group.fetch(bucket)
            if problem is not None:
                group.start_from(bucket, center)
        if problem is not None:
            group.remember_taken()
    if problem is not None:
        note_exclusion(context, problem)


def note_exclusion(context: ExchangeContext[Any], problem: str) -> None:
    """Give a new state to the local optimizer of a rank that is excluded from an exchange because of a problem."""
    if context.local_optimizer is not None:
        context.local_optimizer.reset()
    text = "Rank %d is excluded from an exchange and reset to the center: %s"
    context.membership.log.warning(text, context.membership.global_rank, problem)


def check_agreement(exchanger: Exchanger[Any], policy: LocalState) -> None:
    """Check that all ranks have the same settings.

    Raises:
        ValueError: settings differ; raised on all ranks.
    """
    membership = exchanger.context.membership
    membership.communicator.check()
    facts = build_on_all(membership.communicator, membership.name, lambda: facts_of(exchanger, policy))
    agree(membership.communicator, membership.name, facts)
    if membership.group is not None:
        agree(membership.group, membership.group_name, facts)


def facts_of(exchanger: Exchanger[Any], policy: LocalState) -> dict[str, object]:
    """Return what all ranks must have alike, by readable name."""
    exchanged = exchanger.context.exchanged
    facts = {"version": __version__} | settings_of(exchanger, policy)
    return {**facts, **exchanged.replica.facts(), **exchanged.hyperparameters.settings()}


def settings_of(exchanger: Exchanger[Any], policy: LocalState) -> dict[str, object]:
    """Return the settings of exchanges, on which all ranks must agree, by readable name."""
    context, exchanged = exchanger.context, exchanger.context.exchanged
    schedule = context.planner.schedule
    return {
        "algorithm": exchanged.algorithm,
        "schedule": described(schedule),
        "first exchanges": forecast(schedule, 8),
        "root rank": context.membership.root,
        "quorum and grace_seconds": context.quorum,
        "place of the center": exchanger.placement.name,
        **exchanger.facts(),
        "center optimizer": exchanged.center_optimizer.name,
        "optimizer_state": policy,
        "timeout_seconds": context.membership.communicator.tracker.timeout,
    }
