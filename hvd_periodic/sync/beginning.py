"""The beginning of training: after construction, and after every load."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.sync.assigned import Assigned
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.course import Course, Legacy
from hvd_periodic.sync.membership import sender
from hvd_periodic.sync.startup import Moment, Standing, Start, decide, replaces
from hvd_periodic.sync.telling import tell_beginning

V = TypeVar("V")


class Beginning(Generic[V]):
    """Lets all ranks begin together, from what one of them has or from what each has.

    Args:
        course: how they will exchange.
        checkpoint: what was loaded.
        assigned: watches weights that only other code changes, from the beginning on.
    """

    def __init__(self, course: Course[V], checkpoint: Checkpoint[V], assigned: Assigned[V]) -> None:
        self._course, self._checkpoint, self._setting = course, checkpoint, course.setting
        self.assigned = assigned
        self.begun = False
        """Whether training has begun, since construction and since a state was loaded."""

    def start(self, begin: Callable[[], object]) -> None:
        """Give all ranks the root's values; where a state was loaded already, ``begin`` from it."""
        together = self._setting.membership.together
        found = together.gather((self._checkpoint.has_loaded(), uuid.uuid4().hex[:16]), "run").values()
        if any(loaded for loaded, _ in found):
            begin()
            return
        _, self._checkpoint.run = next(iter(found))
        self._course.tensor_groups.give_values()
        self._course.restart()

    def begin(self, moment: Moment) -> bool:
        """Find out on all ranks who has what, and begin; return whether this rank takes over other parameters."""
        course, setting, checkpoint = self._course, self._setting, self._checkpoint
        membership = setting.membership
        records = setting.meeting.meet(Purpose.START)
        standings = membership.together.gather(self._standing(moment), "start")
        averaging = self._averaging([standing.local_steps for standing in standings.values()])
        everyone = membership.communicator.handshake_group
        root = everyone.global_ranks[membership.first]
        start = decide(standings, root, averaging, asynchronous=not course.steps_agree)
        if start is Start.ANEW:
            self._begin_anew(different=len({standing.replica for standing in standings.values()}) > 1)
        elif start is Start.AS_CONSTRUCTED:  # A copy made before training holds the statistics of its own rank.
            course.tensor_groups.give_statistics()
        elif start is Start.FROM_ROOT:
            self._take_over(everyone, membership.first, membership.name)
        elif start is Start.AS_LOADED:
            course.resume(checkpoint.state)
        checkpoint.forget()
        self._plan_first_round(records)
        setting.ledger.begin()
        self.begun = True
        self._tell()
        giver = root if start is Start.FROM_ROOT else membership.global_root
        return replaces(start, standings, membership.global_rank, giver, averaging)

    def broadcast(self) -> None:
        """Give all ranks what the root has."""
        self.take_from(self._setting.membership.first)

    def take_from(self, giver: int) -> None:
        """Give all ranks what one of them has."""
        setting, membership = self._setting, self._setting.membership
        setting.meeting.come_for(Purpose.BROADCAST, setting.exchanged.replica.changes())
        together = membership.together
        steps = set(together.gather(setting.ledger.local_steps, "steps").values())
        if self._averaging(list(steps)) and len(steps) > 1:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which broadcast() does "
                f"not bring: load the state on every rank. Received: states of steps {sorted(steps)}"
            )
        self._take_over(membership.communicator.handshake_group, giver, membership.name)
        if together.group is not None:
            self._take_over(together.group, together.group_root, together.group_name)
        self._checkpoint.forget()
        if setting.ledger.local_steps == 0:
            self._plan_first_round(setting.meeting.meet(Purpose.START))
        setting.ledger.time(setting.ledger.local_steps)
        self.begun = True
        self._tell()

    def _tell(self) -> None:
        """Tell the journal, and what watches weights, that training begins, or goes on from other counters."""
        self.assigned.remember()
        tell_beginning(self._course, self._setting.ledger.counters)

    def start_from_center(self, state: Mapping[str, Any] | None = None) -> None:
        """Let this rank go on from the center, which it has taken over with the counters, by a replica of its own.

        Args:
            state: in which the center is, where no rank has the whole of it.
        """
        replica = self._setting.exchanged.replica
        self._course.discard()
        for group in self._course.tensor_groups:
            center = group.center
            if state is not None:
                center = replica.new_temporary_store(group.values.layout)
                replica.load(center, state["vectors"][group.name]["center"])
            for bucket in group.values.layout.buckets:
                group.start_from(bucket, center.read(bucket))
            group.error_feedback.reset()
        self._forget_work()

    def start_anew(self) -> None:
        """Let this rank, which has the counters of others, go on with its replica as the center."""
        self._course.discard()
        self._course.restart()
        self._forget_work()

    def take_center_from(self, giver: int) -> None:
        """Give the ranks that exchange the center of one of them, which is on every rank; replicas stay."""
        course, membership = self._course, self._setting.membership
        communicator, name = membership.communicator, f"{membership.name}.center"
        optimizer_state = communicator.broadcast_object(
            course.optimizer_state_to_give(None), f"{name}.optimizer", giver
        )
        send = sender(communicator, name, giver)
        for group in course.tensor_groups:
            for store in group.center_state.values():
                course.tensor_groups.send_store(store, send)
        if communicator.rank != giver:
            self._setting.exchanged.center_optimizer.load(optimizer_state)

    def _forget_work(self) -> None:
        """Forget what the counters of another rank say of its own work."""
        ledger = self._setting.ledger
        ledger.counters = replace(ledger.counters, gradients=0, exchange_seconds=0.0, bytes_sent=0)
        ledger.notes = replace(ledger.notes, loss_sum=0.0, losses=0)

    def _averaging(self, steps: Sequence[int]) -> bool:
        """Return whether gradients are averaged over ranks that are at such steps, in groups of them at least."""
        return self._setting.membership.together.any(self._setting.membership.in_groups) or max(steps) < (
            self._setting.phase.until or 0
        )

    def _plan_first_round(self, records: Sequence[Record]) -> None:
        """Ask the schedule for the first time: with the learning rate of now, which construction may not have seen."""
        ledger = self._setting.ledger
        if ledger.local_steps > 0:
            return
        plan = self._course.first_plan(records)
        ledger.counters = replace(ledger.counters, next_exchange=plan.next_exchange)
        ledger.notes = replace(ledger.notes, memory=plan.memory)

    def _begin_anew(self, different: bool) -> None:
        """Start from the root's parameters, which may have been loaded since construction."""
        if different:
            if self._setting.membership.is_root:
                log = self._setting.membership.log
                log.warning("The parameters of the ranks differ at the first step: all take over the root's")
            self._course.tensor_groups.give_values()
        self._course.restart()
        self._course.tensor_groups.give_statistics()

    def _standing(self, moment: Moment) -> Standing:
        """Return where this rank stands, for the others."""
        counters, checkpoint, groups = self._setting.ledger.counters, self._checkpoint, self._course.tensor_groups
        membership = self._setting.membership
        loaded = checkpoint.has_loaded()
        return Standing(
            loaded,
            counters.local_steps,
            (counters.last_exchange, counters.next_exchange),
            checkpoint.run if loaded else "",
            groups.digest(self._course.loaded_centers(checkpoint.state)) if loaded else "",
            groups.replica_digest(),
            moment,
            checkpoint.failure,
            min(membership.communicator.global_ranks) if membership.in_step else 0,
        )

    def _take_over(self, communicator: Communicator, root: int, name: str) -> None:
        """Give the ranks of a communicator all that one of them has."""
        course, checkpoint, ledger = self._course, self._checkpoint, self._setting.ledger
        placement, is_root = course.placement, communicator.rank == root
        course.begin_taking_over()
        send = sender(communicator, f"{name}.broadcast", root)
        known, state = checkpoint.has_loaded() or ledger.local_steps > 0, checkpoint.state
        optimizer_state = course.optimizer_state_to_give(state)
        mine = (ledger.counters, ledger.notes, checkpoint.run, known, state is not None, optimizer_state)
        gathered = communicator.broadcast_object(mine, f"{name}.progress", root)
        counters, notes, checkpoint.run, known, whole, optimizer_state = gathered
        if known and communicator is self._setting.membership.together.group and not placement.everywhere:
            raise RuntimeError(
                f"With center={placement.name!r}, ranks that average their gradients hold other parts of the "
                "center: load the state on every rank"
            )
        course.tensor_groups.send_values(send)
        if not is_root:
            ledger.counters, ledger.notes = counters, notes
        if known:
            course.take_over(Legacy(send, is_root, state, whole, optimizer_state))
        else:  # The parameters may have been loaded since construction.
            course.restart()
