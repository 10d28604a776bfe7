"""Synchronous exchange: all ranks exchange at the same local steps and wait for each other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hvd_periodic.arguments import described
from hvd_periodic.centers import Placement, Replicated
from hvd_periodic.centers.in_flight import InFlightExchange
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.agreement import ADVICE
from hvd_periodic.comm.handshake import Purpose, Record, integers
from hvd_periodic.participation.present import Presence
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, TakeoverState, reset_to_center
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.fragment_plan import DueFragments, FragmentExchange, FragmentPlan, SinceLastSync
from hvd_periodic.sync.handshake import Weight
from hvd_periodic.sync.piggyback import PiggybackedMessages
from hvd_periodic.sync.reporting import report_exchange, with_distance
from hvd_periodic.sync.status import GlobalStatus, LocalStatus, ScheduleState
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

_BYTES_OF_RECORD = 8 * len(integers(Record(0, 0)))


class Synchronous(Exchanger[V]):
    """Exchanges through collectives.

    The user chooses the placement of the parameters' center; centers of statistics are on every rank.
    """

    steps_agree = True
    overlapped: ClassVar[bool] = False
    """Local steps continue while an exchange is in flight."""
    advice = ADVICE
    """What a user may have forgotten where centers differ."""

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
        wire, decay, bounds = context.wire, context.error_decay, context.bounds
        groups = exchanged.groups(tensors, placements, membership, self.overlapped, wire, decay, bounds)
        self.tensor_groups = TensorGroups(groups, exchanged.replica, membership)
        self.piggyback = PiggybackedMessages(self.tensor_groups, exchanged.replica, membership)
        self.presence = Presence.of(exchanged.replica, len(context.fragments))
        self.finite = Finite(self.tensor_groups, membership, context.nonfinite, context.wire, exchanged.replica)
        self._bind()

    def _bind(self) -> None:
        """Bind the outer optimizer, if there is one, to this rank's shard of the center."""
        group = self.tensor_groups.parameters
        if group.total is not None:
            self._outer.bind(group.center, group.total, group.values.layout)

    def join(self) -> None:
        """Exchange with the current members; bind the outer optimizer again if this rank's shard has changed."""
        membership, replica = self.context.membership, self.context.exchanged.replica
        moved = [group.join() for group in self.tensor_groups]
        self.piggyback = PiggybackedMessages(self.tensor_groups, replica, membership)
        if moved[0]:
            self._bind()

    def facts(self) -> dict[str, object]:
        """Return the settings that all ranks must share: synchronous exchange and its options."""
        context = self.context
        return {
            "asynchronous": False,
            "compression": described(context.wire),
            "error_decay": context.error_decay,
            "fragments": len(context.fragments),
            "nonfinite": context.nonfinite,
            "weight": weight_in_words(context.handshake.weight),
            "audit_every": context.audit_every,
            "max_message_norm": context.bounds and context.bounds.message,
            "max_mean_norm": context.bounds and context.bounds.mean,
        }

    def tell_failure(self, error: Exception) -> None:
        """Enter the handshake in which the other ranks wait for this one; they learn of the failure there."""
        try:
            self.context.handshake.meet(Purpose.EXCHANGE)
        except RuntimeError:
            raise error from None

    def exchange(self, leaving: bool = False) -> bool:
        """Exchange with all ranks; return whether any of them is still training.

        The handshake shares the status of every rank, and the messages of small exchanges travel with it. From then on
        all ranks know the same: at which step they are, which fragments are due, and when the next exchange is.
        """
        context, progress, started = self.context, self.context.progress, time.perf_counter()
        purpose = Purpose.LEAVE if leaving else Purpose.EXCHANGE
        with context.exchanged.replica.range("hvd_periodic.exchange"):
            own = self._local_status(purpose)
            expected = self._expected(own, purpose)
            piggyback = None if expected is None else self.piggyback.pack(expected)
            if self.presence is not None:
                piggyback = self.presence.packed(own.notes.seen)
            with context.exchanged.replica.range("hvd_periodic.meeting"):
                records, piggybacks = context.handshake.handshake_with(purpose, own, piggyback)

            agreed = context.handshake.agree(records, own)
            plan = context.planner.next_plan(agreed)
            self._follow(agreed.settings)
            due = self._due(agreed, own)
            if self.presence is not None:
                communicator = context.membership.communicator
                packed, rank = communicator.select(piggybacks), communicator.rank
                due = due.with_presence(self.presence.weights(packed, rank, agreed.weights))
            elif piggyback is not None and agreed.weights is None:
                self.piggyback.deliver(records, piggybacks)
            with context.handshake.remember_failure(own.counters.local_steps):
                sent = _BYTES_OF_RECORD + self._exchange_tensors(agreed, due, own)
                sent += 0 if self.presence is None or piggyback is None else piggyback.nbytes

            next_exchange = agreed.step + plan.next_exchange - agreed.clock.step
            fresh = ScheduleState(updates=own.counters.local_steps - own.counters.skipped_updates)
            exchanged, excluded = bool(due.turns), own.excluded is not None
            seen = [] if self.presence is None or excluded else self.presence.after(own.notes.seen, due.indices)
            notes = fresh if due.completes else own.notes
            notes = replace(notes, memory=plan.memory, since=due.since, seen=seen)
            progress.advance(agreed.step, next_exchange, notes, started, exchanged, excluded, sent)
            context.handshake.notify_followers()
            report_exchange(self, own, context.handshake.ready_at, context.handshake.wait_seconds, due.completes)
            progress.time(agreed.step)
            return agreed.training

    def _local_status(self, purpose: Purpose) -> LocalStatus:
        """Return the status of this rank, with the problem that ends the exchange on all, or with its distance."""
        context = self.context
        own = context.handshake.local_status()
        problem = own.problem or context.exchanged.replica.misfit()
        problem = problem or (self._moved_uncounted() if purpose is Purpose.LEAVE else None)
        not_finite = None if problem else self.finite.problem(own.counters.local_steps)
        if problem or not_finite:
            excluded = not_finite if self.finite.skips else None
            return replace(own, problem=problem or (None if excluded else not_finite), excluded=excluded)
        return with_distance(self, own)

    def _expected(self, own: LocalStatus, purpose: Purpose) -> DueFragments | None:
        """Return the due fragments, assuming that all ranks are as far as this one; None if nothing is piggybacked."""
        failed = own.problem or own.excluded or self.context.handshake.fatal_error
        if purpose is not Purpose.EXCHANGE or failed or not self.piggyback.possible or self.context.warmup.active:
            return None
        counters, size = own.counters, self.context.membership.communicator.size
        pending = counters.local_steps - counters.last_exchange
        passed = SinceLastSync(own.clock.period, pending, counters.gradients)
        return self.turns.due(size, own.clock, own.notes.since, passed, training=True)

    def _due(self, agreed: GlobalStatus, own: LocalStatus) -> DueFragments:
        """Return the due fragments, given the status of all ranks."""
        passed = SinceLastSync(agreed.period, agreed.pending, own.counters.gradients)
        passed = passed if agreed.training or agreed.pending else SinceLastSync()
        communicator = self.context.membership.communicator
        due = self.turns.due(communicator.size, agreed.clock, own.notes.since, passed, agreed.training)
        if agreed.weights is None:
            return due
        return due.with_weight(agreed.weights[communicator.rank]) if any(agreed.weights) else replace(due, turns=[])

    def _follow(self, settings: Any) -> None:
        """Set the hyper-parameters of the center's optimizer to the agreed ones; None: its own."""
        hyperparameters = self.context.exchanged.hyperparameters
        if settings is None and self.overlapped:  # Schedulers step while the exchange is in flight.
            settings = hyperparameters.hyperparameters()
        hyperparameters.follow(settings)

    def _exchange_tensors(self, agreed: GlobalStatus, due: DueFragments, own: LocalStatus) -> int:
        """Exchange the due tensors; return the bytes handed to collectives."""
        context, groups, sent = self.context, self.tensor_groups, 0
        if agreed.left_out:
            reset_to_center(groups, context, own.excluded)
        if not due.turns:
            return 0
        if context.warmup.active:
            groups.restart()
            groups.audit()
        else:
            if due.completes:
                last = due.turns[-1].exchange
                of_all = last if self.presence is None else replace(last, presence={})
                if agreed.states_are_there and context.optimizer_state is not None:
                    sent += context.optimizer_state.exchange(last, due.periods)
                sent += groups.exchange_statistics(of_all)
            sent += sum(self._send(turn, agreed.step, agreed.training) for turn in due.turns)
        self._constrain()
        if context.audit_every and (context.progress.rounds + 1) % context.audit_every == 0:
            groups.audit(self.advice)
            context.differences.compare()
        return sent

    def _constrain(self) -> None:
        """Apply constraints to the parameters and the center, after the center has moved."""
        self.context.exchanged.replica.constrain(self.tensor_groups.parameters.center)

    def _send(self, turn: FragmentExchange, step: int, training: bool) -> int:
        """Exchange a fragment of the parameters at a step; return the bytes handed to collectives."""
        group = self.tensor_groups.parameters
        if not group.limits_mean:
            return group.exchange(turn.exchange, turn.fragment)
        at_once = InFlightExchange(group, turn.exchange, turn.fragment).begin()
        at_once.apply_to_replica(stepped=False)
        return at_once.sent

    def leave(self) -> None:
        """Take part in the exchanges of the others until all are done."""
        while self.exchange(leaving=True):
            pass
        self.tensor_groups.audit()
        self.context.differences.compare()

    def _moved_uncounted(self) -> str | None:
        """Return a message if this rank leaves without any counted step, but its parameters differ from the center."""
        counters = self.context.progress.counters
        if counters.local_steps > 0 or counters.rounds > 0 or self.context.warmup.active:
            return None
        if not self.placement.everywhere or not self.tensor_groups.distance() > 0:
            return None
        return (
            "The parameters have moved, but no step was counted: call step() of the wrapper or the synchronizer; "
            "without any training leave out finalize()"
        )

    @property
    def _outer(self) -> Any:
        return self.context.exchanged.center_optimizer

    def optimizer_state(self) -> Any:
        """Return the state of the center's optimizer, gathered from all ranks if it is sharded."""
        membership, state = self.context.membership, self._outer.state()
        if self.tensor_groups.parameters.total is None:
            return state
        return self.placement.gather(membership.communicator, state, f"{membership.name}.state")

    def check_load(self, state: dict[str, Any], begun: bool) -> None:
        """Check also this rank's part of the state of the center's optimizer."""
        super().check_load(state, begun)
        own = self.placement.select(state["center_optimizer"])
        if own is not None:
            self._outer.check(own)

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of the center's optimizer, or this rank's part."""
        self._load_optimizer_state(state["center_optimizer"])

    def _load_optimizer_state(self, saved: Any) -> None:
        state = self.placement.select(saved)
        if state is not None:
            self._outer.load(state)

    def loaded_centers(self, state: dict[str, Any] | None) -> list[Store[Any]]:
        """Return the loaded centers in full; none if this rank has only shards."""
        stores: list[Store[Any]] = []
        replica, groups = self.context.exchanged.replica, self.tensor_groups.held_alike
        if self.context.warmup.active:  # Statistics differ between ranks during the warmup.
            groups = groups[:1]
        for group in groups:
            if group.center.layout is group.values.layout:
                stores.append(group.center)
            elif state is not None:
                stores.append(replica.new_temporary_store(group.values.layout))
                replica.load(stores[-1], state["vectors"][group.name]["center"])
            else:
                return []
        return stores

    def optimizer_state_to_give(self, state: dict[str, Any] | None) -> Any:
        """Return the state of the center's optimizer; if this rank holds only a part, the loaded state."""
        if self.placement.everywhere:
            return self._outer.state()
        return None if state is None else state["center_optimizer"]

    def take_over(self, takeover: TakeoverState) -> None:
        """Give all ranks one rank's worker vectors, and its centers or their shards of the center it has loaded."""
        for group in self.tensor_groups:
            for store in group.worker.values():
                self.tensor_groups.send_store(store, takeover.send)
            group.error_feedback.reset()
            group.error_feedback.touch()
            if group.placement.everywhere:
                for store in group.center_state.values():
                    self.tensor_groups.send_store(store, takeover.send)
            elif takeover.whole:
                self._share_out(group, takeover)
        if not takeover.is_source and (self.placement.everywhere or takeover.whole):
            self._load_optimizer_state(takeover.optimizer_state)

    def _share_out(self, group: TensorGroup[V], takeover: TakeoverState) -> None:
        """Give all ranks their shards of the center that one rank has loaded."""
        layout, replica = group.values.layout, self.context.exchanged.replica
        held = replica.new_temporary_store(layout) if takeover.is_source else group.values
        for key in group.center_state:
            if takeover.is_source and takeover.state is not None:
                replica.load(held, takeover.state["vectors"][group.name][key])
            for bucket in layout.buckets:
                group.set_shard(key, bucket, takeover.send(held.read(bucket, out=replica.scratch(bucket, 0))))


def weight_in_words(weight: Weight) -> str:
    """Return what ranks have to agree on about their weights."""
    return str(weight.given) if weight.by_work else "not given" if weight.given is None else "given"
