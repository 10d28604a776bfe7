"""All ranks exchange at the same local steps, and wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import described
from hvd_periodic.centers import Placement, Replicated
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.agreement import ADVICE
from hvd_periodic.comm.handshake import Purpose, Record, integers
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, TakeoverState, failing, reset_to_center
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.fragment_plan import DueFragments, FragmentExchange, FragmentPlan, SinceLastSync
from hvd_periodic.sync.piggyback import PiggybackedMessages, as_integers
from hvd_periodic.sync.planner import Plan
from hvd_periodic.sync.profiling import profiled, profiler_range
from hvd_periodic.sync.reporting import report_exchange, with_distance
from hvd_periodic.sync.status import GlobalStatus, LocalStatus, ScheduleState
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

_BYTES_OF_RECORD = 8 * len(integers(Record(0, 0)))


class Synchronous(Exchanger[V]):
    """Exchanges by collectives.

    The center of the parameters lives where the user has asked, those of statistics on every rank.
    """

    steps_agree = True
    overlapped: ClassVar[bool] = False
    """Local steps continue while an exchange is in flight."""
    advice = ADVICE
    """What a user may have forgotten where centers differ."""

    @classmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the algorithm, whose rates make sense for so many ranks."""
        algorithm.check(size)
        return algorithm

    @classmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Allow all of them."""

    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None:
        membership, exchanged = context.membership, context.exchanged
        self.context = context
        tensors = exchanged.tensors()
        ranks = membership.communicator, membership.root
        placements = [place(*ranks), *(Replicated(*ranks) for _ in tensors[1:])]
        self.turns = FragmentPlan(context.fragments, context.planner.schedule)
        context.wire.check(membership.communicator, place.name)
        if context.wire.lossy and exchanged.algorithm.reduction != "sum":
            raise ValueError(
                f"`compression` is for sums over ranks, and {type(exchanged.algorithm).__name__} takes another "
                f"reduction. Received: compression={context.wire!r}"
            )
        groups = exchanged.groups(tensors, placements, self.overlapped, context.wire, membership.communicator)
        self.tensor_groups = TensorGroups(groups, exchanged.replica, membership)
        self.enclosed = PiggybackedMessages(self.tensor_groups, exchanged.replica, membership)
        self.finite = Finite(self.tensor_groups, membership, context.nonfinite, context.wire, exchanged.replica)
        self._bind()

    def _bind(self) -> None:
        """Make the outer optimizer of this rank's share of the center, if there is one."""
        group = self.tensor_groups.parameters
        if group.total is not None:
            self._outer.bind(group.center, group.total, group.values.layout)

    def join(self) -> None:
        """Let the groups exchange with other ranks, and another optimizer move the center if that has another share."""
        membership, replica = self.context.membership, self.context.exchanged.replica
        moved = [group.join(membership.communicator, membership.root) for group in self.tensor_groups]
        self.enclosed = PiggybackedMessages(self.tensor_groups, replica, membership)
        if moved[0]:
            self._bind()

    @property
    def reads_together(self) -> bool:
        """Whether all ranks have to take part where one reads the center: unless it is on every rank."""
        return not self.placement.everywhere

    @property
    def shows_loaded(self) -> bool:
        """True: the groups hold it."""
        return True

    def facts(self) -> dict[str, object]:
        """Return that all ranks exchange like this."""
        context = self.context
        return {
            "asynchronous": False,
            "compression": described(context.wire),
            "fragments": len(context.fragments),
            "nonfinite": context.nonfinite,
            "weight": "of all ranks alike" if context.handshake.weight.given is None else "of every rank its own",
            "audit_every": context.audit_every,
        }

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return when the first exchange takes place, the same on all ranks."""
        return self.context.planner.first(records)

    def tell_failure(self, error: Exception) -> None:
        """Meet the others, who wait for this rank at their next exchange."""
        try:
            self.context.handshake.meet(Purpose.EXCHANGE)
        except RuntimeError:
            raise error from None

    @profiled("exchange")
    def exchange(self, leaving: bool = False) -> Any:
        """Exchange with all ranks; return whether some of them is still training."""
        context, progress = self.context, self.context.progress
        started, purpose = time.perf_counter(), Purpose.LEAVE if leaving else Purpose.EXCHANGE
        own, problem = context.handshake.local_status()
        problem = problem or context.exchanged.replica.misfit()
        problem = problem or (self._moved_uncounted() if leaving else None)
        not_finite = None if problem else self.finite.problem(own.counters.local_steps)
        left_out = self.finite.skips and not_finite is not None
        problem = problem or (None if left_out else not_finite)
        own = own if problem or left_out else with_distance(self, own)
        foreseen = self._foreseen(own) if purpose is Purpose.EXCHANGE and not (problem or left_out) else None
        messages = [] if foreseen is None else self.enclosed.messages(foreseen)
        with profiler_range(self, "meeting"):
            records, enclosures = context.handshake.handshake_with(
                purpose, problem, as_integers(messages), left_out, own
            )
        agreed = context.handshake.agree(records, own)
        plan = context.planner.following(agreed)
        context.exchanged.hyperparameters.follow(self._followed(agreed.settings))
        due = self._whose_turn(agreed, own)
        if foreseen is not None and agreed.weights is None:
            self.enclosed.deliver(foreseen, messages, records, enclosures)
        takes_place, sent = bool(due.turns) and not agreed.nobody, _BYTES_OF_RECORD
        with failing(context.handshake, own.counters.local_steps):
            if agreed.left_out:
                reset_to_center(self.tensor_groups, context, not_finite if left_out else None)
            if takes_place:
                sent += self._run(agreed, due)
                self._constrain()
                if context.audit_every and (progress.rounds + 1) % context.audit_every == 0:
                    self.tensor_groups.audit(self.advice)
        counters = progress.counters
        progress.counters = replace(
            counters,
            local_steps=agreed.step,
            rounds=counters.rounds + takes_place,
            left_out=counters.left_out + left_out,
            bytes_sent=counters.bytes_sent + sent,
            skipped_updates=counters.skipped_updates + agreed.step - counters.local_steps,
            last_exchange=agreed.step,
            next_exchange=agreed.step + plan.next_exchange - agreed.clock.step,
            gradients=0,
            exchange_seconds=counters.exchange_seconds + time.perf_counter() - started,
        )
        progress.notes = self._noted(own, due, plan)
        context.handshake.have_exchanged()
        report_exchange(
            self, own, lambda: progress.counters, context.handshake.came, context.handshake.waited, due.completes
        )
        progress.time(agreed.step)
        return agreed.training

    def _foreseen(self, own: LocalStatus) -> DueFragments | None:
        """Return whose turn it is if all ranks have come as far as this one; None where data does not travel along."""
        if not self.enclosed.possible or self.context.warmup.equal or self.context.handshake.failure is not None:
            return None
        counters, size = own.counters, self.context.membership.communicator.size
        pending = counters.local_steps - counters.last_exchange
        passed = SinceLastSync(own.clock.period, pending, counters.gradients)
        return self.turns.due(size, own.clock, own.notes.since, passed, training=True)

    def _whose_turn(self, agreed: GlobalStatus, own: LocalStatus) -> DueFragments:
        """Return whose turn it is."""
        passed = SinceLastSync(agreed.period, agreed.pending, own.counters.gradients)
        passed = passed if agreed.training or agreed.pending else SinceLastSync()
        communicator = self.context.membership.communicator
        due = self.turns.due(communicator.size, agreed.clock, own.notes.since, passed, agreed.training)
        return due if agreed.weights is None else due.weighing(agreed.weights[communicator.rank])

    def _noted(self, own: LocalStatus, due: DueFragments, plan: Plan) -> ScheduleState:
        """Return what is kept until the next exchange; losses are of the period that ends."""
        return replace(ScheduleState() if due.completes else own.notes, memory=plan.memory, since=due.noted)

    def _run(self, agreed: GlobalStatus, due: DueFragments) -> Any:
        """Let data travel; return the bytes handed to collectives."""
        context, sent = self.context, 0
        if context.warmup.equal:
            self.tensor_groups.restart()
            self.tensor_groups.audit()
            return 0
        if due.completes:
            last = due.turns[-1].exchange
            if agreed.states_are_there:
                sent += self._exchange_state(last, due.periods)
            sent += self.tensor_groups.exchange_statistics(last)
        return sent + sum(self._send(turn, agreed.step, agreed.training) for turn in due.turns)

    def _constrain(self) -> None:
        """Let parameters and center obey constraints, after the center has moved."""
        self.context.exchanged.replica.constrain(self.tensor_groups.parameters.center)

    def _followed(self, settings: Any) -> Any:
        """Return what the center's optimizer is to follow, given what ranks have agreed on; None: its own."""
        return settings

    def _send(self, turn: FragmentExchange, step: int, training: bool) -> Any:
        """Exchange a fragment of the parameters at a step; return the bytes handed to collectives."""
        return self.tensor_groups.exchange_parameters(turn.exchange, turn.fragment)

    def _exchange_state(self, exchange: Exchange, rounds: Any) -> Any:
        """Exchange the local optimizer's state as its policy asks; return the bytes handed to collectives."""
        context = self.context
        if context.optimizer_state is None:
            return 0
        communicator, name = context.membership.communicator, context.membership.name
        return context.optimizer_state.exchange(communicator, exchange, rounds, name, self._when)

    def _when(self, condition: Any, run: Callable[[], int]) -> Any:
        """Return what ``run`` does where the condition holds, 0 elsewhere."""
        return run() if condition else 0

    def leave(self) -> None:
        """Take part in the exchanges of the others until all are done."""
        while self.exchange(leaving=True):
            pass
        self.tensor_groups.audit()

    def _moved_uncounted(self) -> str | None:
        """Return what is wrong where this rank leaves without any step, but with other parameters than the center."""
        counters = self.context.progress.counters
        if (
            counters.local_steps > 0
            or counters.rounds > 0
            or not self.placement.everywhere
            or self.context.warmup.equal
        ):
            return None
        if not self.tensor_groups.distance() > 0:
            return None
        return (
            "The parameters have moved, but no step was counted: call step() of the wrapper or the synchronizer; "
            "without any training leave out finalize()"
        )

    @property
    def _outer(self) -> Any:
        return self.context.exchanged.center_optimizer

    def optimizer_state(self) -> Any:
        """Return the state of the center's optimizer, of all ranks where each has a part of it."""
        membership, state = self.context.membership, self._outer.state()
        if self.tensor_groups.parameters.total is None:
            return state
        return self.placement.gather(membership.communicator, state, f"{membership.name}.state")

    def check_load(self, state: dict[str, Any], begun: bool) -> None:
        """Load the state of the center's optimizer, of which this rank may have a part."""
        self._load_optimizer_state(state["center_optimizer"])

    def _load_optimizer_state(self, saved: Any) -> None:
        state = self.placement.select(saved)
        if state is not None:
            self._outer.load(state)

    def loaded_centers(self, state: dict[str, Any] | None) -> list[Store[Any]]:
        """Return the centers that were loaded, whole; none where this rank has shares only."""
        stores: list[Store[Any]] = []
        replica, groups = self.context.exchanged.replica, self.tensor_groups.held_alike
        for group in (
            groups[:1] if self.context.warmup.equal else groups
        ):  # Statistics differ as long as gradients do not.
            if group.center.layout is group.values.layout:
                stores.append(group.center)
            elif state is not None:
                stores.append(replica.new_temporary_store(group.values.layout))
                replica.load(stores[-1], state["vectors"][group.name]["center"])
            else:
                return []
        return stores

    def optimizer_state_to_give(self, state: dict[str, Any] | None) -> Any:
        """Return the state of the center's optimizer; where this rank has a part of it, what was loaded."""
        if self.placement.everywhere:
            return self._outer.state()
        return None if state is None else state["center_optimizer"]

    def take_over(self, takeover: TakeoverState) -> None:
        """Give all ranks the workers' vectors and the centers of one of them, or their shares of what it has loaded."""
        for group in self.tensor_groups:
            for store in group.worker.values():
                self.tensor_groups.send_store(store, takeover.send)
            group.error_feedback.reset()
            if group.placement.everywhere:
                for store in group.center_state.values():
                    self.tensor_groups.send_store(store, takeover.send)
            elif takeover.whole:
                self._share_out(group, takeover)
        if not takeover.is_giver and (self.placement.everywhere or takeover.whole):
            self._load_optimizer_state(takeover.optimizer_state)

    def _share_out(self, group: TensorGroup[V], takeover: TakeoverState) -> None:
        """Give all ranks their shares of the center that one has loaded."""
        layout, replica = group.values.layout, self.context.exchanged.replica
        held = replica.new_temporary_store(layout) if takeover.is_giver else group.values
        for key in group.center_state:
            if takeover.is_giver and takeover.state is not None:
                replica.load(held, takeover.state["vectors"][group.name][key])
            for bucket in layout.buckets:
                group.set_shard(key, bucket, takeover.send(held.read(bucket, out=replica.scratch(bucket, 0))))
