"""Exchange with a quorum: rounds close without those who are late, who take part in the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import described
from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors
from hvd_periodic.asynchronous.meeting import Meeting, Round
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.centers import Placement
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.comm.base import DifferentCallsError
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, note_exclusion
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.planner import Plan, agreed_clock, query
from hvd_periodic.sync.reporting import report_exchange, with_distance
from hvd_periodic.sync.status import LocalStatus, ScheduleState
from hvd_periodic.sync.synchronous import weight_in_words
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.encoded import Encoded

V = TypeVar("V")


class WithQuorum(Asynchronous[V]):
    """Exchanges in rounds, with one center.

    Every worker comes with what it has, and waits for the close of a round. With A, those who are in it, and h_i, what
    worker i last took from the center:

        averaging, DiLoCo, SlowMo, BMUF   ḡ = Σ_A w_i (h_i − x_i) / Σ_A w_i ;  one outer step ;  x_i, h_i ← c
        AGN                               a = Σ_A a_i/τ_i, or the mean over A ;  one outer step ;  x_i ← c, a_i ← 0
        elastic averaging                 d_i = x_i − c ;  x_i ← x_i − α d_i ;  c ← c + α Σ_A d_i

    Sums run in the order of ranks. w_i = (1, or the worker's ``weight``) (1 + s_i)^−p, where s_i is the number of
    rounds that closed since it took h_i. Workers that are not in A keep all they have. The mean over those who take
    part is as in Decoupled DiLoCo, arXiv 2604.21428. A worker that is excluded as it is not finite is in the
    round without a message: x_i, h_i ← c. With compression, d_i is what arrives of x_i − c: a worker sees c before
    it encodes the difference, and again if a round has closed in the meantime.
    """

    @classmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the algorithm itself."""
        algorithm.check(size)
        if algorithm.reduction != "sum":
            raise ValueError(
                f"`quorum` is for sums over ranks, and {type(algorithm).__name__} takes another reduction: "
                f"{algorithm.reduction!r}"
            )
        return algorithm

    @classmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Raise a ValueError for schedules and policies that need all ranks at every step or exchange."""
        if schedule.synchronous_until is not None:
            raise ValueError(
                "`quorum` cannot begin with a phase in which gradients are averaged over all ranks. Received: "
                f"{schedule!r}"
            )
        if policy.touches:
            raise ValueError(f"`optimizer_state` must be 'local' with a quorum. Received: {policy}")

    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None:
        membership, exchanged, quorum = context.membership, context.exchanged, context.quorum
        self.context = context
        tensors, size = exchanged.tensors(), membership.communicator.size
        for number, kind in enumerate(tensors):
            if kind.algorithm.reduction != "sum":  # A maximum must not fall; what is the root's is refused.
                tensors[number] = kind._replace(algorithm=kind.algorithm.asynchronous_variant(size))
        shared = [ExchangedTensors(kind.values.layout, kind.algorithm) for kind in tensors]
        bounds = context.bounds or NormBounds()
        _check_wire(context.wire, exchanged.algorithm, bounds)
        bounds_own = context.wire.lossy and exchanged.algorithm.uses_error_feedback
        algorithm, optimized, power = exchanged.algorithm, exchanged.outer is not None, context.staleness_power
        keeps_taken = algorithm.reads_before and algorithm.reads_after
        shared[0] = replace(
            shared[0],
            optimized=optimized,
            staleness_power=power,
            sends_messages=keeps_taken,
            bounds=bounds._replace(message=None) if bounds_own else context.bounds,
            wire=context.wire,
        )
        outer = exchanged.center_optimizer
        self.worker = Worker(membership, exchanged.replica, outer, shared, False, use_locking, quorum=quorum)
        groups = exchanged.groups(
            tensors,
            self.worker.placements,
            membership,
            wire=context.wire,
            error_decay=context.error_decay,
            bounds=NormBounds(message=bounds.message) if bounds_own and bounds.message is not None else None,
            keeps_taken=keeps_taken,
        )
        self.tensor_groups = TensorGroups(groups, exchanged.replica, membership)
        self.finite = Finite(self.tensor_groups, membership, context.nonfinite, context.wire, exchanged.replica)

    def facts(self) -> dict[str, object]:
        """Return the settings that all ranks must share."""
        context = self.context
        return {
            "asynchronous": False,
            "nonfinite": context.nonfinite,
            "weight": weight_in_words(context.handshake.weight),
            "staleness_power": context.staleness_power,
            "compression": described(context.wire),
            "error_decay": context.error_decay,
            "max_message_norm": context.bounds and context.bounds.message,
            "max_mean_norm": context.bounds and context.bounds.mean,
            **self.worker.facts(),
        }

    def replay(self, members: Sequence[Sequence[int]]) -> None:
        """Let the next rounds close with exactly these workers each; to be called on all ranks, before they begin.

        The run log of an earlier training has them, as ``members``.
        """
        self._meeting.replay(members)

    def go_on(self, former: WithQuorum[V], state: dict[str, Any], optimizer_state: Any) -> None:
        """Go on as in asynchronous exchange; the rounds that are still to be replayed are those of the former set."""
        super().go_on(former, state, optimizer_state)
        self._meeting.replay(former._meeting.replayed())

    @property
    def _meeting(self) -> Meeting:
        return cast(Meeting, self.worker.transport)

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return the plan of the first exchange, given all ranks' records."""
        return Exchanger.first_plan(self, records)

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks, as they come to a round."""
        self._meeting.fail(str(error))

    def exchange(self, leaving: bool = False) -> bool:
        """Take part in the round that is open when this rank comes, or, if it is leaving, in the last one.

        Return whether somebody in that round still trains.

        Raises:
            RuntimeError: this rank cannot go on, or no round closes any more.
            KeyboardInterrupt: in the wait for the round. This rank has taken back its message: it goes on as if it had
                not come. If the round closed with it nevertheless, it has taken the result; leaving, it raises later.
        """
        context, progress = self.context, self.context.progress
        came, started = time.time(), time.perf_counter()
        purpose = Purpose.LEAVE if leaving else Purpose.EXCHANGE
        with context.exchanged.replica.range("hvd_periodic.exchange"):
            own = self._status(purpose)
            step, size = own.counters.local_steps, context.membership.communicator.size
            with context.handshake.remember_failure(step):
                record = context.handshake.record(own, purpose)
                self._meeting.introduce(record)
                gradients = max(own.counters.gradients, 1)
                exchange = Exchange(size, max(own.clock.period, 1), gradients, rates=self._rates())
                excluded, counts = own.excluded is not None, record.weight != 0
                sent = self.worker.exchange(list(self.tensor_groups), exchange, left_out=excluded, counts=counts)
                if own.excluded is not None:
                    note_exclusion(context, own.excluded)
            closed = self._meeting.round
            plan = self._plan(own, closed, leaving)
            notes = ScheduleState(memory=plan.memory, updates=step - own.counters.skipped_updates)
            missed = closed.staleness
            progress.advance(step, plan.next_exchange, notes, started, closed.moved, excluded, sent, missed)
            context.handshake.notify_followers()
            ranks = context.membership.communicator.global_ranks
            members = [ranks[member] for member in closed.members]
            report_exchange(self, own, came, self._meeting.waited, True, closed.number, members, closed.norms)
            progress.time(step)
            self._meeting.conclude()
        if not leaving:
            self._meeting.raise_interrupt()
        return any(record.training for record in closed.records)

    def _status(self, purpose: Purpose) -> LocalStatus:
        """Return the status of this rank.

        Raises:
            RuntimeError: this rank cannot go on; the others learn of it.
        """
        context = self.context
        own = context.handshake.local_status()
        problem = own.problem or context.handshake.problem(own, purpose)
        not_finite = None if problem else self.finite.problem(own.counters.local_steps)
        if not_finite is not None and self.finite.skips:
            return replace(own, excluded=not_finite)
        problem = problem or not_finite
        if problem is not None:
            self._meeting.fail(problem)
            raise RuntimeError(problem)
        return with_distance(self, own)

    def _plan(self, own: LocalStatus, closed: Round, leaving: bool) -> Plan:
        """Return this rank's plan: at its own steps, by what those who were in the round know."""
        clock, schedule = agreed_clock(closed.records, own.clock), self.context.planner.schedule
        try:
            return query(schedule, clock)
        except RuntimeError:
            if not leaving:
                raise
            return Plan(clock.step + max(clock.period, 1), clock.memory)  # No answer for the end of training.

    def _leave(self) -> None:
        """Take part in the last round, with all ranks that have not died; all leave with the same center."""
        uncounted = self.context.exchanged.replica.uncounted
        if uncounted is not None:
            raise RuntimeError(uncounted)
        try:
            try:
                while self.exchange(leaving=True):  # In a replayed round, among others that train.
                    pass
            except DifferentCallsError:
                self.worker.wait_for_all(Purpose.LEAVE)  # All ranks learn of it.
                raise
            self.context.membership.communicator.give_up(self._meeting.round.given_up)
            self.finish()
        except DifferentCallsError:
            self._meeting.apart(False)
            raise
        self.worker.take(list(self.tensor_groups))
        self._meeting.raise_interrupt()


def _check_wire(wire: Wire, algorithm: Algorithm, bounds: NormBounds) -> None:
    """Raise a ValueError for a lossy wire if workers cannot form messages in bytes before their round closes."""
    if not wire.lossy:
        return
    if not isinstance(wire, Encoded):
        raise ValueError(f"`compression` with `quorum` is for wires of bytes. Received: compression={wire!r}")
    if isinstance(bounds.message, str) and algorithm.uses_error_feedback:
        raise ValueError(
            f"`compression` and max_message_norm={bounds.message!r} can be combined with `quorum` in elastic averaging "
            "only, since the error memory of other algorithms is added to a message that is within its bound, before "
            "the norms of the others are known: pass a number as max_message_norm, or leave out one of them. Received: "
            f"{algorithm!r}, compression={wire!r}"
        )
