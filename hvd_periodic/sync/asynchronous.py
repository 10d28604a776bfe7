"""Asynchronous exchange: each rank exchanges with one center on its own clock, without waiting for other ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.centers import Placement, Sharded
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.participation.present import Presence
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.sync.exchanger import ExchangeContext, Exchanger, TakeoverState, reset_to_center
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.planner import Plan, query
from hvd_periodic.sync.reporting import report_exchange, with_distance
from hvd_periodic.sync.status import ScheduleState
from hvd_periodic.sync.tensor_groups import TensorGroups

V = TypeVar("V")


class Asynchronous(Exchanger[V]):
    """Exchanges with a center behind a transport, which holds the centers of statistics too."""

    steps_agree = False
    worker: Worker

    @classmethod
    def suited(cls, algorithm: Algorithm, size: int) -> Algorithm:
        """Return the variant of the algorithm that workers run one after another."""
        return algorithm.asynchronous_variant(size)

    @classmethod
    def check(cls, schedule: Schedule, policy: LocalState) -> None:
        """Raise a ValueError for schedules and policies that need ranks to wait for each other."""
        if schedule.synchronous_until is not None:
            raise ValueError("Asynchronous exchange has no phase in which gradients are averaged: quiet=False")
        if policy.touches:
            raise ValueError(f"`optimizer_state` must be 'local' in asynchronous exchange. Received: {policy}")

    def __init__(self, context: ExchangeContext[V], place: type[Placement], use_locking: bool) -> None:
        membership, exchanged = context.membership, context.exchanged
        self.context = context
        size = membership.communicator.size
        tensors = [kind._replace(algorithm=kind.algorithm.asynchronous_variant(size)) for kind in exchanged.tensors()]
        shared = [ExchangedTensors(kind.values.layout, kind.algorithm) for kind in tensors]
        if context.bounds is not None and tensors[0].algorithm.reads_before:
            tensors[0].algorithm.check(size)  # Workers may read the same center before any of them pushes.
        power = context.staleness_power
        shared[0] = replace(
            shared[0],
            optimized=exchanged.outer is not None,
            staleness_power=power,
            sends_messages=context.bounds is not None,
        )
        outer, sharded = exchanged.center_optimizer, issubclass(place, Sharded)
        self.worker = Worker(membership, exchanged.replica, outer, shared, sharded, use_locking, context.center_file)
        groups = exchanged.groups(tensors, self.worker.placements, membership, bounds=context.bounds)
        self.tensor_groups = TensorGroups(groups, exchanged.replica, membership)
        self.presence = Presence.of(exchanged.replica, fragments=1)
        self.finite = Finite(self.tensor_groups, membership, context.nonfinite, context.wire, exchanged.replica)

    @property
    def shows_loaded(self) -> bool:
        """Whether a loaded center can be read: the worker has finished, and has not resumed training since."""
        return self.worker.finished

    def facts(self) -> dict[str, object]:
        """Return the settings that all ranks must share: asynchronous exchange and its transport."""
        context = self.context
        return {
            "asynchronous": True,
            "staleness_power": context.staleness_power,
            "grace_seconds": context.grace,
            "max_message_norm": context.bounds and context.bounds.message,
            **self.worker.facts(),
        }

    def open(self) -> None:
        """Create the center and connect to it."""
        self.worker.open()

    def restart(self) -> None:
        """Set the center to the root's values."""
        super().restart()
        self.worker.start(list(self.tensor_groups))

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return the plan of this rank's first exchange."""
        clock = Clock(learning_rate=self.context.progress.current_rate())
        return query(self.context.planner.schedule, clock)

    def exchange(self, leaving: bool = False) -> bool:
        """Exchange with the center, independently of the other ranks, except that a worker may wait for a group.

        With a grace, a worker that is not leaving waits for those who push within the grace of the first of its group,
        and takes the center after its last push (arXiv 2401.09135, Algorithm 2).
        """
        context, progress = self.context, self.context.progress
        came, started, sent, missed, waited = time.time(), time.perf_counter(), 0, 0, None
        with context.exchanged.replica.range("hvd_periodic.exchange"):
            own = progress.snapshot()
            step = own.counters.local_steps
            not_finite = self.finite.problem(step)
            excluded = not_finite if self.finite.skips else None
            problem = context.handshake.problem(own, Purpose.EXCHANGE) or (None if excluded else not_finite)
            if problem is not None:
                raise RuntimeError(problem)
            own = own if excluded else with_distance(self, own)
            size, gradients = context.membership.communicator.size, max(own.counters.gradients, 1)
            with context.handshake.remember_failure(step):
                if excluded:
                    self.worker.resume_training()
                    self.worker.transport.take()
                    reset_to_center(self.tensor_groups, context, excluded)
                    self.worker.take(list(self.tensor_groups))  # What it takes may be ahead of the center.
                else:
                    presence = {} if self.presence is None else self.presence.alone(own.notes.seen)
                    speed = 1 / own.step_seconds if own.step_seconds else 0.0
                    exchange = Exchange(
                        size, own.clock.period, gradients, presence=presence, rates=self._rates(), speed=speed
                    )
                    sent = self.worker.exchange(list(self.tensor_groups), exchange)
                    missed = self.worker.transport.missed
                    if context.grace and not leaving:
                        waited = self.worker.wait_for_group(list(self.tensor_groups), context.grace)
                # After the push, at which workers learn how fast they are.
                clock = replace(own.clock, relative_speed=self.worker.transport.relative_speed or None)
                plan = query(context.planner.schedule, clock)
            notes = ScheduleState(memory=plan.memory)
            progress.advance(step, plan.next_exchange, notes, started, not excluded, bool(excluded), sent, missed)
            context.handshake.notify_followers()
            report_exchange(self, own, came, waited)
            progress.time(step)
        return False

    def _rates(self) -> list[float]:
        """Return the learning rates of this worker's tensors, if the algorithm uses them."""
        exchanged = self.context.exchanged
        if exchanged.rates is None or not exchanged.algorithm.uses_learning_rate:
            return []
        return exchanged.rates.of_tensors(len(exchanged.replica.parameters.layout.specs))

    def check_alive(self) -> None:
        """Raise a RuntimeError if Horovod has been shut down, and the center with it."""
        if not self.context.membership.communicator.alive():
            raise RuntimeError("Horovod has been shut down: call finalize() before hvd.shutdown()")

    def leave(self) -> None:
        """Push the remaining steps, then sleep until all ranks have done so.

        All replicas end with the center, if the algorithm hands it out. Rounds of other optimizers do not wait for this
        rank meanwhile.
        """
        with self.context.membership.communicator.call_of_all(self.worker.transport):
            self._leave()

    def _leave(self) -> None:
        counters, uncounted = self.context.progress.counters, self.context.exchanged.replica.uncounted
        if uncounted is not None:
            raise RuntimeError(uncounted)
        if counters.local_steps > counters.last_exchange:
            self.exchange(leaving=True)
        self.finish()
        self.worker.take(list(self.tensor_groups))

    def finish(self) -> None:
        """Sleep until all ranks have come, and compare what no exchange touches with those that live."""
        differences = self.context.differences
        differences.name(self.worker.finish(differences.own()))

    def audit(self) -> None:
        """Compare what no exchange touches, once all ranks have come: there is one center."""
        self.check_alive()
        differences = self.context.differences
        differences.name(self.worker.audit(differences.own()))

    def optimizer_state(self) -> Any:
        """Return the state of the center's optimizer, read through the transport."""
        return self.worker.state()

    def pushes(self) -> dict[str, Any]:
        """Return the counts of pushes, read through the transport."""
        return self.worker.pushes()

    def check_load(self, state: dict[str, Any], begun: bool) -> None:
        """Check also that training is not under way."""
        super().check_load(state, begun)
        if begun and not self.worker.finished and self.context.membership.communicator.size > 1:
            raise RuntimeError(
                "load_state_dict() while ranks train asynchronously: the others would not notice. Load before the "
                "first step; or after finalize() on every rank, or on the root and then call broadcast() on all"
            )
        self.worker.check(state)

    def has_loaded(self, state: dict[str, Any]) -> None:
        """Make the loaded center readable."""
        self.worker.read_from_saved(list(self.tensor_groups), state)

    def resume(self, state: dict[str, Any] | None) -> None:
        """Set the center to the one that the root has loaded."""
        self.worker.resume(list(self.tensor_groups), state)

    def own_optimizer_state(self, saved: Any) -> Any:
        """Return the part that this rank holds: of shared memory, all of it."""
        return self.worker.select(saved) if self.worker.transport.holds_center else None

    def go_on(self, former: Any, state: dict[str, Any], optimizer_state: Any) -> None:
        """Let the root write the center with all that is kept with it, and leave training, as before ``adopt()``.

        Between finalize() and the next push, all buckets have counted the same pushes.
        """
        groups, pushes = list(self.tensor_groups), dict(state["pushes"])
        pushes["windows"] = pushes["windows"][:1] * sum(len(group.values.layout.buckets) for group in groups)
        united = self.worker.united(optimizer_state)
        self.worker.resume(groups, {**state, "center_optimizer": united, "pushes": pushes}, each_its_own=False)
        self.worker.finish()

    def begin_taking_over(self) -> None:
        """Forget the final center of a training that has ended."""
        self.worker.resume_training()

    def take_over(self, takeover: TakeoverState) -> None:
        """Set the center to the root's loaded one, if any; give all ranks the root's worker vectors.

        What the root has not pushed, all ranks have in their replicas then, and the root alone pushes it.
        """
        if takeover.whole:
            self.worker.resume(list(self.tensor_groups), takeover.state, each_its_own=False)
        for group in self.tensor_groups:
            for store in group.worker.values():
                self.tensor_groups.send_store(store, takeover.send)
            if not takeover.is_source:
                group.error_feedback.reset()
                group.remember_taken()
