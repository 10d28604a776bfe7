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
from hvd_periodic.comm.handshake import Purpose, Record, integers
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.exchanger import Course, Legacy, Setting, failing, start_again
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.fragment_plan import Due, Since, Turn, Turns
from hvd_periodic.sync.piggyback import Enclosed, as_integers
from hvd_periodic.sync.planner import Plan
from hvd_periodic.sync.profiling import range_of, ranged
from hvd_periodic.sync.reporting import measured, tell
from hvd_periodic.sync.status import Agreement, Notes, Standpoint
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

_BYTES_OF_RECORD = 8 * len(integers(Record(0, 0)))


class Synchronous(Course[V]):
    """Exchanges by collectives.

    The center of the parameters lives where the user has asked, those of statistics on every rank.
    """

    steps_agree = True
    overlapped: ClassVar[bool] = False
    """Local steps continue while an exchange is in flight."""

    @classmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the algorithm, whose rates make sense for so many ranks."""
        algorithm.check(size)
        return algorithm

    @classmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Allow all of them."""

    def __init__(self, setting: Setting[V], place: type[Placement], use_locking: bool) -> None:
        membership, exchanged = setting.membership, setting.exchanged
        self.setting = setting
        tensors = exchanged.tensors()
        ranks = membership.communicator, membership.root
        placements = [place(*ranks), *(Replicated(*ranks) for _ in tensors[1:])]
        self.turns = Turns(setting.fragments, setting.planner.schedule)
        setting.wire.check(membership.communicator, place.name)
        if setting.wire.lossy and exchanged.algorithm.reduction != "sum":
            raise ValueError(
                f"`compression` is for sums over ranks, and {type(exchanged.algorithm).__name__} takes another "
                f"reduction. Received: compression={setting.wire!r}"
            )
        groups = exchanged.groups(tensors, placements, self.overlapped, setting.wire, membership.communicator)
        self.tensor_groups = TensorGroups(groups, exchanged.replica, membership)
        self.enclosed = Enclosed(self.tensor_groups, exchanged.replica, membership)
        self.finite = Finite(self.tensor_groups, membership, setting.nonfinite, setting.wire, exchanged.replica)
        self._bind()

    def _bind(self) -> None:
        """Make the outer optimizer of this rank's share of the center, if there is one."""
        group = self.tensor_groups.parameters
        if group.total is not None:
            self._outer.bind(group.center, group.total, group.values.layout)

    def join(self) -> None:
        """Let the groups exchange with other ranks, and another optimizer move the center if that has another share."""
        membership, replica = self.setting.membership, self.setting.exchanged.replica
        moved = [group.join(membership.communicator, membership.root) for group in self.tensor_groups]
        self.enclosed = Enclosed(self.tensor_groups, replica, membership)
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
        setting = self.setting
        return {
            "asynchronous": False,
            "compression": described(setting.wire),
            "fragments": len(setting.fragments),
            "nonfinite": setting.nonfinite,
            "weight": "of all ranks alike" if setting.meeting.weight.given is None else "of every rank its own",
            "audit_every": setting.audit_every,
        }

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return when the first exchange takes place, the same on all ranks."""
        return self.setting.planner.first(records)

    def tell_failure(self, error: Exception) -> None:
        """Meet the others, who wait for this rank at their next exchange."""
        try:
            self.setting.meeting.meet(Purpose.EXCHANGE)
        except RuntimeError:
            raise error from None

    @ranged("exchange")
    def exchange(self, leaving: bool = False) -> Any:
        """Exchange with all ranks; return whether some of them is still training."""
        setting, ledger = self.setting, self.setting.ledger
        started, purpose = time.perf_counter(), Purpose.LEAVE if leaving else Purpose.EXCHANGE
        own, problem = setting.meeting.standpoint()
        problem = problem or setting.exchanged.replica.misfit()
        problem = problem or (self._moved_uncounted() if leaving else None)
        not_finite = None if problem else self.finite.problem(own.counters.local_steps)
        left_out = self.finite.skips and not_finite is not None
        problem = problem or (None if left_out else not_finite)
        own = own if problem or left_out else measured(self, own)
        foreseen = self._foreseen(own) if purpose is Purpose.EXCHANGE and not (problem or left_out) else None
        messages = [] if foreseen is None else self.enclosed.messages(foreseen)
        with range_of(self, "meeting"):
            records, enclosures = setting.meeting.meet_with(purpose, problem, as_integers(messages), left_out, own)
        agreed = setting.meeting.agree(records, own)
        plan = setting.planner.following(agreed)
        setting.exchanged.hyperparameters.follow(self._followed(agreed.settings))
        due = self._whose_turn(agreed, own)
        if foreseen is not None and agreed.weights is None:
            self.enclosed.deliver(foreseen, messages, records, enclosures)
        takes_place, sent = bool(due.turns) and not agreed.nobody, _BYTES_OF_RECORD
        with failing(setting.meeting, own.counters.local_steps):
            if agreed.left_out:
                start_again(self.tensor_groups, setting, not_finite if left_out else None)
            if takes_place:
                sent += self._run(agreed, due)
                self._constrain()
                if setting.audit_every and (ledger.rounds + 1) % setting.audit_every == 0:
                    self.tensor_groups.audit()
        counters = ledger.counters
        ledger.counters = replace(
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
        ledger.notes = self._noted(own, due, plan)
        setting.meeting.have_exchanged()
        tell(self, own, lambda: ledger.counters, setting.meeting.came, setting.meeting.waited, due.completes)
        ledger.time(agreed.step)
        return agreed.training

    def _foreseen(self, own: Standpoint) -> Due | None:
        """Return whose turn it is if all ranks have come as far as this one; None where data does not travel along."""
        if not self.enclosed.possible or self.setting.phase.equal or self.setting.meeting.failure is not None:
            return None
        counters, size = own.counters, self.setting.membership.communicator.size
        pending = counters.local_steps - counters.last_exchange
        passed = Since(own.clock.period, pending, counters.gradients)
        return self.turns.due(size, own.clock, own.notes.since, passed, training=True)

    def _whose_turn(self, agreed: Agreement, own: Standpoint) -> Due:
        """Return whose turn it is."""
        passed = Since(agreed.period, agreed.pending, own.counters.gradients)
        passed = passed if agreed.training or agreed.pending else Since()
        communicator = self.setting.membership.communicator
        due = self.turns.due(communicator.size, agreed.clock, own.notes.since, passed, agreed.training)
        return due if agreed.weights is None else due.weighing(agreed.weights[communicator.rank])

    def _noted(self, own: Standpoint, due: Due, plan: Plan) -> Notes:
        """Return what is kept until the next exchange; losses are of the period that ends."""
        return replace(Notes() if due.completes else own.notes, memory=plan.memory, since=due.noted)

    def _run(self, agreed: Agreement, due: Due) -> Any:
        """Let data travel; return the bytes handed to collectives."""
        setting, sent = self.setting, 0
        if setting.phase.equal:
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
        self.setting.exchanged.replica.constrain(self.tensor_groups.parameters.center)

    def _followed(self, settings: Any) -> Any:
        """Return what the center's optimizer is to follow, given what ranks have agreed on; None: its own."""
        return settings

    def _send(self, turn: Turn, step: int, training: bool) -> Any:
        """Exchange a fragment of the parameters at a step; return the bytes handed to collectives."""
        return self.tensor_groups.exchange_parameters(turn.exchange, turn.fragment)

    def _exchange_state(self, exchange: Exchange, rounds: Any) -> Any:
        """Exchange the local optimizer's state as its policy asks; return the bytes handed to collectives."""
        setting = self.setting
        if setting.optimizer_state is None:
            return 0
        communicator, name = setting.membership.communicator, setting.membership.name
        return setting.optimizer_state.exchange(communicator, exchange, rounds, name, self._when)

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
        counters = self.setting.ledger.counters
        if counters.local_steps > 0 or counters.rounds > 0 or not self.placement.everywhere or self.setting.phase.equal:
            return None
        if not self.tensor_groups.distance() > 0:
            return None
        return (
            "The parameters have moved, but no step was counted: call step() of the wrapper or the synchronizer; "
            "without any training leave out finalize()"
        )

    @property
    def _outer(self) -> Any:
        return self.setting.exchanged.center_optimizer

    def optimizer_state(self) -> Any:
        """Return the state of the center's optimizer, of all ranks where each has a part of it."""
        membership, state = self.setting.membership, self._outer.state()
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
        replica, groups = self.setting.exchanged.replica, self.tensor_groups.held_alike
        for group in (
            groups[:1] if self.setting.phase.equal else groups
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

    def take_over(self, legacy: Legacy) -> None:
        """Give all ranks the workers' vectors and the centers of one of them, or their shares of what it has loaded."""
        for group in self.tensor_groups:
            for store in group.worker.values():
                self.tensor_groups.send_store(store, legacy.send)
            group.error_feedback.reset()
            if group.placement.everywhere:
                for store in group.center_state.values():
                    self.tensor_groups.send_store(store, legacy.send)
            elif legacy.whole:
                self._share_out(group, legacy)
        if not legacy.is_giver and (self.placement.everywhere or legacy.whole):
            self._load_optimizer_state(legacy.optimizer_state)

    def _share_out(self, group: TensorGroup[V], legacy: Legacy) -> None:
        """Give all ranks their shares of the center that one has loaded."""
        layout, replica = group.values.layout, self.setting.exchanged.replica
        held = replica.new_temporary_store(layout) if legacy.is_giver else group.values
        for key in group.center_state:
            if legacy.is_giver and legacy.state is not None:
                replica.load(held, legacy.state["vectors"][group.name][key])
            for bucket in layout.buckets:
                group.set_shard(key, bucket, legacy.send(held.read(bucket, out=replica.scratch(bucket, 0))))
