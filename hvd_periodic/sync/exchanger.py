"""Strategies of exchange: what synchronous and asynchronous exchange have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.arguments import described
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.agreement import agree, build_on_all
from hvd_periodic.comm.handshake import Record
from hvd_periodic.journal import Journal
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.finite import RAISE, Finite
from hvd_periodic.sync.handshake import Handshake
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.optimizer_state import OptimizerState, OptimizerStateExchange
from hvd_periodic.sync.planner import Plan, Planner, forecast
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.tensor_groups import ExchangeSpec, TensorGroups
from hvd_periodic.sync.warmup import SynchronousWarmup
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.store import Store
from hvd_periodic.version import __version__
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")


@dataclass(frozen=True)
class ExchangeContext(Generic[V]):
    """What an exchange needs to know: what is exchanged, with whom, how far training has come, and when.

    Attributes:
        exchanged: the replica and the algorithm.
        membership: the ranks.
        progress: counters and notes.
        planner: asks the schedule.
        warmup: whether gradients are still averaged.
        handshake: speaks with the other ranks.
        optimizer_state: exchanges the state of local optimizers, if anything does.
        fragments: the parts of the parameters that are exchanged one after another.
        overlap: local steps for which an exchange may be under way, or ``"period"``.
        wire: how messages of the parameters are encoded.
        local_optimizer: the state of the local optimizer, where it is known.
        nonfinite: what becomes of a rank whose replica is not finite.
        audit_every: exchanges after which ranks compare their centers; 0: never.
        center_file: in which an asynchronous center lies, if in one.
        journal: hears of exchanges.
    """

    exchanged: ExchangeSpec[V]
    membership: Membership
    progress: ProgressTracker
    planner: Planner
    warmup: SynchronousWarmup
    handshake: Handshake
    optimizer_state: OptimizerStateExchange[V] | None
    fragments: Sequence[Fragment]
    overlap: int | str = 0
    wire: Wire = Plain()  # noqa: RUF009
    local_optimizer: OptimizerState[V] | None = None
    nonfinite: str = RAISE
    audit_every: int = 0
    center_file: Path | None = None
    journal: Journal = field(default_factory=Journal)


class Exchanger(ABC, Generic[V]):
    """Runs exchanges, and knows where the centers are.

    Args:
        context: what an exchange needs to know.
        place: where the center of the parameters lives, as the user has asked.
        use_locking: whether exchanges in shared memory exclude each other.

    Attributes:
        steps_agree: ranks exchange at the same local steps.
        context: as given.
        tensor_groups: what is exchanged, with the centers.
        finite: looks for what no exchange should spread.
        worker: leads to a center that no rank waits for, if there is one.
    """

    steps_agree: ClassVar[bool]
    context: ExchangeContext[V]
    tensor_groups: TensorGroups[V]
    finite: Finite[V]
    worker: Worker | None = None

    @classmethod
    @abstractmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the algorithm for so many ranks that exchange like this.

        Raises:
            ValueError: it cannot, or its rates make no sense.
        """

    @classmethod
    @abstractmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Raise a ValueError where ranks that exchange like this cannot have such a schedule or policy."""

    @abstractmethod
    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None: ...

    @property
    def placement(self) -> Placement:
        """Where the center of the parameters lives."""
        return self.tensor_groups.parameters.placement

    @property
    @abstractmethod
    def reads_together(self) -> bool:
        """Whether all ranks have to take part where one reads the center."""

    @property
    @abstractmethod
    def shows_loaded(self) -> bool:
        """Whether a center that was loaded can be read before training begins."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Return what all ranks have to agree on."""

    def open(self) -> None:
        """Make the center, where construction has not; all ranks together."""

    def join(self) -> None:
        """Exchange with the ranks that are members now; communicates nothing.

        Centers on every rank stay what they are; where this rank holds another share than before, that is zeros.
        """

    def restart(self) -> None:
        """Set the centers to the values of this rank, wherever they live; all ranks together."""
        self.tensor_groups.reset()

    @abstractmethod
    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return when the first exchange takes place, once ranks have met."""

    def report(self, loss: Any) -> None:
        """Note a loss of this rank; of one that is not finite, tell the others.

        Raises:
            ValueError: NaN or infinity: this rank cannot go on.
        """
        try:
            self.context.progress.report(loss)
        except ValueError as error:
            self.context.handshake.failure = str(error)
            self.tell_failure(error)
            raise

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks that this one fails, where they would wait for it."""

    @abstractmethod
    def exchange(self, leaving: bool = False) -> bool:
        """Exchange; return whether any rank for which this one waits is still training."""

    def land(self) -> None:
        """Let the replica take what is under way."""

    def arrive(self) -> None:
        """Let the centers be what they become by an exchange that is under way."""

    def in_flight(self) -> Any:
        """Return what a checkpoint holds of an exchange that is under way; None for nothing."""
        return None

    def discard(self) -> None:
        """Forget an exchange that is under way."""

    def load_in_flight_exchange(self, saved: Any) -> None:
        """Go on with what :meth:`in_flight` returned."""

    def check_in_flight(self, saved: Any) -> None:
        """Check what :meth:`in_flight` returned.

        Raises:
            ValueError: no exchange can be under way here; or it was of another model.
        """
        if saved is not None:
            raise ValueError(
                "The state was saved while an exchange was under way: load it into an optimizer with overlap > 0, as "
                "the one that saved it"
            )

    def check_alive(self) -> None:
        """Raise a RuntimeError where there is nobody left to leave."""

    @abstractmethod
    def leave(self) -> None:
        """Exchange what is left, so that all ranks end with the same center."""

    @abstractmethod
    def optimizer_state(self) -> Any:
        """Return what a checkpoint holds of the center's optimizer."""

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
        """Use a state that the groups have loaded."""

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on from what every rank has loaded; all ranks together."""

    @abstractmethod
    def loaded_centers(self, state: dict[str, Any] | None) -> list[Store[Any]]:
        """Return the centers that were loaded, whole; none where this rank has shares only."""

    def begin_taking_over(self) -> None:
        """Get ready to have all that another rank has."""

    @abstractmethod
    def optimizer_state_to_give(self, state: dict[str, Any] | None) -> Any:
        """Return the state of the center's optimizer that other ranks are to take over, given what was loaded here."""

    @abstractmethod
    def take_over(self, takeover: TakeoverState) -> None:
        """Give all ranks the workers' vectors and the centers of one of them."""


@dataclass(frozen=True)
class TakeoverState:
    """What one rank gives to others.

    Attributes:
        send: replaces a value by that of the rank which gives.
        is_giver: this is that rank.
        state: what was loaded here, where the center is not on every rank.
        whole: the giver has loaded the whole of such a center.
        optimizer_state: of the giver's center.
    """

    send: Callable[[Any], Any]
    is_giver: bool
    state: dict[str, Any] | None
    whole: bool
    optimizer_state: Any


def reset_to_center(groups: TensorGroups[V], context: ExchangeContext[V], problem: str | None) -> None:
    """Let this rank start from the centers, with a new state of its local optimizer, where its replica is not finite.

    All ranks together, unless every rank can read the centers by itself.

    Args:
        groups: what is exchanged.
        context: of the exchange.
        problem: what is not finite here; None on ranks that only help to read the centers.
    """
    membership = context.membership
    for group in groups:
        for bucket in group.values.layout.buckets:
            center = group.fetch(membership.communicator, bucket, membership.name)
            if problem is not None:
                group.start_from(bucket, center)
    if problem is None:
        return
    if context.local_optimizer is not None:
        context.local_optimizer.reset()
    tell(membership, problem)


def tell(membership: Membership, problem: str) -> None:
    """Say in the log that this rank is left out."""
    rank = membership.communicator.global_rank
    membership.log.warning("Rank %d is left out of an exchange, and starts again from the center: %s", rank, problem)


def check_agreement(exchanger: Exchanger[Any], policy: LocalState) -> None:
    """Check that all ranks are about to do the same.

    Raises:
        ValueError: ranks differ; raised on all of them.
    """
    membership = exchanger.context.membership
    membership.communicator.check()
    facts = build_on_all(membership.communicator, membership.name, lambda: facts_of(exchanger, policy))
    agree(membership.communicator, membership.name, facts)
    if membership.all_ranks.group is not None:
        agree(membership.all_ranks.group, membership.all_ranks.group_name, facts)


def facts_of(exchanger: Exchanger[Any], policy: LocalState) -> dict[str, object]:
    """Return what all ranks must agree on, by readable name."""
    context, exchanged = exchanger.context, exchanger.context.exchanged
    schedule = context.planner.schedule
    return {
        "version": __version__,
        "algorithm": exchanged.algorithm,
        "schedule": described(schedule),
        "first exchanges": forecast(schedule, 8),
        "root rank": context.membership.root,
        "place of the center": exchanger.placement.name,
        **exchanger.facts(),
        "center optimizer": exchanged.center_optimizer.name,
        "optimizer_state": policy,
        "timeout_seconds": context.membership.communicator.tracker.timeout,
        **exchanged.replica.facts(),
        **exchanged.hyperparameters.settings(),
    }
