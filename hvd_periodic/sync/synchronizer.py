"""Counts local steps, asks the schedule, runs exchanges and keeps their state: the only orchestration."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.algorithms.broadcast import Broadcast
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.algorithms.statistics import Statistics
from hvd_periodic.arguments import outer_name
from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.centers import Placement, Replicated, Sharded, placement_of
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.agreement import agree, audit, build_on_all, join, raise_on_all
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.meeting import Purpose, Record, check, integers, leading, records_of
from hvd_periodic.comm.together import Together
from hvd_periodic.local_state import LocalState, LocalStateLike, as_local_state
from hvd_periodic.outer.framework import Hyperparameters, NoOuterOptimizer, OuterOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.schedules.given import as_schedule
from hvd_periodic.sync.optimizer_state import OptimizerState, OptimizerStateExchange
from hvd_periodic.sync.planning import Notes, Plan, agreed_clock, ask, forecast, foresee, united_clock
from hvd_periodic.sync.startup import Moment, Standing, Start, decide, replaces
from hvd_periodic.vectors.store import Store
from hvd_periodic.version import __version__

V = TypeVar("V")

logger = logging.getLogger("hvd_periodic")

_STATE_VERSION = 1
_STATE_KEYS = {"algorithm", "schedule", "counters", "center_optimizer", "vectors"}


@dataclass(frozen=True)
class Counters:
    """What a synchronizer has done so far, and where it stands in its schedule.

    Attributes:
        local_steps: iterations, whether or not the update ran.
        rounds: exchanges.
        skipped_updates: iterations whose update did not run: overflow under mixed precision, or another rank's while
            this one had run out of data.
        bytes_sent: bytes that this rank handed to collectives in exchanges.
        last_exchange: local steps at the last exchange.
        next_exchange: local steps at which the next exchange is due.
        gradients: gradients accumulated on this rank since the last exchange, for algorithms that use them.
        exchange_seconds: wall time spent in exchanges, waiting for other ranks included.
        pushes_missed: in asynchronous exchange, pushes of other workers between this worker's own, summed over its
            exchanges: the staleness of the center that its replica was pulled to before.
        staleness_max: the most of them at one exchange.
    """

    local_steps: int = 0
    rounds: int = 0
    skipped_updates: int = 0
    bytes_sent: int = 0
    last_exchange: int = 0
    next_exchange: int = 0
    gradients: int = 0
    exchange_seconds: float = 0.0
    pushes_missed: int = 0
    staleness_max: int = 0

    @property
    def staleness_mean(self) -> float:
        """Pushes of other workers per exchange of this one."""
        return self.pushes_missed / max(self.rounds, 1)


@dataclass(frozen=True)
class Standpoint:
    """What one rank knows by itself when it comes to meet the others.

    Attributes:
        counters: its own.
        notes: what it keeps for its schedule.
        learning_rate: of its local optimizer; None where it is unknown.
        step_seconds: seconds per local step since its last exchange; None where there was none.
    """

    counters: Counters
    notes: Notes
    learning_rate: float | None = None
    step_seconds: float | None = None

    @property
    def clock(self) -> Clock:
        """The clock of this rank alone, at an exchange."""
        counters = self.counters
        return Clock(
            step=counters.local_steps,
            round=counters.rounds + 1,
            learning_rate=self.learning_rate,
            step_seconds=self.step_seconds,
            loss=self.notes.loss,
            period=counters.next_exchange - counters.last_exchange,
            memory=self.notes.memory,
        )


@dataclass(frozen=True)
class Agreement:
    """What ranks have learned of each other before an exchange.

    Attributes:
        training: some rank is still training, and not here to finalize.
        step: local steps at which this rank goes on.
        pending: local steps since the last exchange, on the rank with most of them.
        period: local steps that the schedule planned between the last exchange and the next; where some rank is still
            training, for those that are.
        clock: what all have agreed on, for the schedule.
        unforeseen: the schedule could not be asked before, so that ranks have to compare what it says now.
        settings: hyper-parameters for the step of the center optimizer, where those of ranks differ.
        states_are_there: all local optimizers have stepped, or none has: what they keep can be exchanged.
    """

    training: bool
    step: int
    pending: int
    period: int
    clock: Clock
    unforeseen: bool = False
    settings: Any = None
    states_are_there: bool = True


class Synchronizer(Generic[V]):
    """Runs one algorithm on one replica, whenever its schedule says so.

    Construction is local; :meth:`start` is the first call that communicates, and gives all ranks the root's values.
    Until the first step others may be loaded, into the model or as a state: :meth:`begin` then finds out on all ranks
    who has what. Every rank calls :meth:`prepare_gradients` before each local update, :meth:`step` once per iteration,
    and :meth:`finalize` once at the end.

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

    Attributes:
        learning_rate: returns the learning rate of the local optimizer, for schedules; front ends set it where they
            know that optimizer.

    Raises:
        ValueError: hyper-parameters that make no sense for so many ranks, or an unknown ``center``.
        RuntimeError: asynchronous exchange is not possible between these ranks.
    """

    learning_rate: Callable[[], Any] | None = None

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
    ) -> None:
        if asynchronous:
            algorithm = algorithm.one_by_one(communicator.size)
        else:
            algorithm.check(communicator.size)
        if outer is not None and not algorithm.takes_outer_optimizer:
            raise ValueError(f"{type(algorithm).__name__} moves the center by itself and takes no outer optimizer")
        if algorithm.needs_outer_optimizer and outer is None:
            raise ValueError(f"{type(algorithm).__name__} moves the center by an optimizer: pass `{outer_name()}`")
        if algorithm.uses_learning_rate and rates is None:
            raise ValueError(f"{type(algorithm).__name__} needs the learning rate of local steps: pass `optimizer`")
        self.outer: OuterOptimizer = NoOuterOptimizer() if outer is None else outer
        rates = rates if algorithm.uses_learning_rate else None
        self.hyperparameters: Hyperparameters = self.outer if rates is None else rates
        """On which ranks have to agree before they move the center."""
        self.schedule = as_schedule(schedule, "schedule")
        if asynchronous and self.schedule.synchronous_until is not None:
            raise ValueError("Asynchronous exchange has no phase in which gradients are averaged: quiet=False")
        self.replica = replica
        self.algorithm = algorithm
        self.communicator = communicator
        self.root = root
        self.name = communicator.unique_name() if name is None else name
        self.counters = Counters(next_exchange=self._first_exchange())
        self.notes = Notes()
        self._ready_since = time.perf_counter()
        self._timed_since: tuple[float, int] | None = None
        self.together = Together(communicator)
        self.run = ""
        """Names this training among others, in saved states."""
        self._in_groups = False
        self._begun = False
        self._loaded = False
        self._warned = False
        self._prepared = False
        self._failure: str | None = None
        self._inside_center = False
        exchanged: list[tuple[str, Store[V], Algorithm]] = [("parameters", replica.parameters, algorithm)]
        if replica.buffers is not None:
            exchanged.append(("buffers", replica.buffers, Statistics()))
        if replica.integers is not None:
            exchanged.append(("integers", replica.integers, Maximum()))
        if replica.from_root is not None:
            exchanged.append(("from_root", replica.from_root, Broadcast()))
        if asynchronous:
            exchanged = [(part, values, made.one_by_one(communicator.size)) for part, values, made in exchanged]
        place = placement_of(center)
        self.asynchronous: Worker | None = None
        placements: list[Placement] = [place(communicator, root), *[Replicated(communicator, root)] * 3]
        if asynchronous:
            shared = [ExchangedTensors(values.layout, made) for _, values, made in exchanged]
            shared[0] = replace(shared[0], optimized=outer is not None)
            sharded = place is Sharded
            self.asynchronous = Worker(communicator, replica, self.outer, shared, root, sharded, use_locking)
            placements = list(self.asynchronous.placements)
        self.placement = placements[0]
        self.policy = as_local_state(optimizer_state)
        self.optimizer_state = self._state_exchange(self.policy, local_optimizer, root)
        self._restored: dict[str, Any] | None = None
        self.parts = [
            TensorGroup(part, values, made, replica, where, outer if i == 0 else None, rates if i == 0 else None)
            for i, ((part, values, made), where) in enumerate(zip(exchanged, placements, strict=False))
        ]
        if self.parts[0].total is not None and self.asynchronous is None:
            self.outer.bind(self.parts[0].center, self.parts[0].total, self.parts[0].values.layout)
        self._start_state()

    def _state_exchange(
        self, policy: LocalState, local_optimizer: OptimizerState[V] | None, root: int
    ) -> OptimizerStateExchange[V] | None:
        """Return what exchanges the local optimizer's state, if the policy touches it."""
        if not policy.touches:
            return None
        if self.asynchronous is not None:
            raise ValueError(f"`optimizer_state` must be 'local' in asynchronous exchange. Received: {policy}")
        if local_optimizer is None:
            raise ValueError(f"`optimizer_state` needs the local optimizer: pass `optimizer`. Received: {policy}")
        replicated = Replicated(self.communicator, root)
        return OptimizerStateExchange(policy, local_optimizer, self.replica, replicated)

    def _when(self, condition: Any, run: Callable[[], int]) -> Any:
        """Return what ``run`` does where the condition holds, 0 elsewhere."""
        return run() if condition else 0

    def _start_state(self) -> None:
        """Give the state of the algorithm its first value."""
        self.reset_center()

    def reset_center(self) -> None:
        """Set the center to the parameters, and forget what was accumulated."""
        for part in self.parts:
            part.reset()

    def _first_exchange(self) -> int:
        """Return the step of the first exchange as far as it is known now; it is decided when training begins."""
        return foresee(self.schedule, Clock()) or 0

    @property
    def notes(self) -> Notes:
        """What this rank keeps for its schedule."""
        return self._notes

    @notes.setter
    def notes(self, notes: Notes) -> None:
        self._notes = notes

    @property
    def counters(self) -> Counters:
        """Steps, rounds, bytes and seconds so far."""
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = counters
        self._counters_changed()

    def _counters_changed(self) -> None:
        """Let a front end follow the counters, whatever has set them."""

    def _count(self, **increments: float) -> None:
        """Add to counters, by name."""
        now = self.counters
        self.counters = replace(now, **{name: getattr(now, name) + more for name, more in increments.items()})

    @property
    def local_steps(self) -> int:
        """Iterations so far."""
        return self.counters.local_steps

    @property
    def rounds(self) -> int:
        """Exchanges so far."""
        return self.counters.rounds

    @property
    def number(self) -> int:
        """Which optimizer of its ranks this is, as the name says: 1 for the first."""
        last = self.name.rpartition(".")[2]
        return int(last) if last.isdigit() else 0

    @property
    def begun(self) -> bool:
        """Whether training has begun, since construction and since a state was loaded."""
        return self._begun

    @begun.setter
    def begun(self, begun: bool) -> None:
        self._begun = begun
        self._begun_changed()

    def _begun_changed(self) -> None:
        """Let a front end wait for the first local update, or no longer."""

    def average_within(self, group: Any) -> None:
        """Take notice of the ranks that average their gradients with this one at every step, before :meth:`start`.

        They agree, start and are restored like this one; those that exchange do so anyway.
        """
        self._in_groups = group is not None and group.size > 1 and self.synchronous_until is None
        if group is not None and not set(group.global_ranks) <= set(self.communicator.global_ranks):
            self.together.average_within(group)

    @property
    def synchronous_until(self) -> int | None:
        """Local steps during which something else averages the gradients of the ranks that exchange.

        Their replicas are equal so long, and the center is what they are. None if nothing does.
        """
        return self.schedule.synchronous_until

    @property
    def replicas_are_equal(self) -> bool:
        """Whether gradients are still averaged over the ranks that exchange."""
        return self.synchronous_until is not None and self.local_steps < self.synchronous_until

    @property
    def replicas_differ(self) -> bool:
        """Whether gradients have been averaged over the ranks that exchange, and no longer are."""
        return self.synchronous_until is not None and self.local_steps >= self.synchronous_until

    def start(self) -> None:
        """Check that all ranks are about to do the same, then give all the root's values.

        Raises:
            ValueError: ranks differ; raised on all of them.
        """
        self.check_agreement()
        runs = self.together.gather(uuid.uuid4().hex[:16], "run")
        self.run = next(iter(runs.values()))
        self._give_values()
        self._restart()

    def begin(self, moment: Moment = Moment.BEFORE_UPDATE) -> bool:
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
            RuntimeError: the states of ranks do not belong together; a rank cannot go on; ranks wait in different
                places; all are at the end, and have trained without counting a step. On all ranks.
        """
        if self._begun:
            return False
        records = self._meet(Purpose.START)
        standings = self.together.gather(self._standing(moment), "start")
        until = self.synchronous_until or 0
        averaging = self.together.any(self._in_groups) or max(s.local_steps for s in standings.values()) < until
        root = self.communicator.global_ranks[self.root]
        start = decide(standings, root, averaging, asynchronous=self.asynchronous is not None)
        if start is Start.ANEW:
            self._begin_anew(different=len({standing.replica for standing in standings.values()}) > 1)
        elif start is Start.FROM_ROOT:
            self._take_over(self.communicator, self.root, self.name)
        elif self.asynchronous is not None and start is Start.AS_LOADED:
            self.asynchronous.resume(self.parts, self._restored)
        self._restored = None
        self._loaded = False
        if self.local_steps == 0:
            self._plan_first_round(records)
        self._timed_since = self._ready_since, self.local_steps  # The first step has begun before its update.
        self.begun = True
        return replaces(start, standings, self._global_rank, root, averaging)

    def _plan_first_round(self, records: Sequence[Record]) -> None:
        """Ask the schedule for the first time: with the learning rate of now, which construction may not have seen."""
        alone = self.asynchronous is not None
        rate = self._learning_rate() if alone else leading(records).learning_rate
        compare = not alone and not all(record.foreseen for record in records)
        plan = self._asked(Clock(learning_rate=rate), compare)
        self.counters = replace(self.counters, next_exchange=plan.next_exchange)
        self.notes = replace(self.notes, memory=plan.memory)

    @property
    def _global_rank(self) -> int:
        return self.communicator.global_ranks[self.communicator.rank]

    def _begin_anew(self, different: bool) -> None:
        """Start from the root's parameters, which may have been loaded since construction."""
        if different:
            if self.communicator.rank == self.root:
                logger.warning("The parameters of the ranks differ at the first step: all take over the root's")
            self._give_values()
        self._restart()
        for part in self.parts[1:]:  # A forward pass has changed statistics already, on each rank in its way.
            if part.placement.everywhere:
                self._send_store(part.center, _sender(self.communicator, f"{self.name}.{part.name}", self.root))

    def _restart(self) -> None:
        """Set the center to the parameters, wherever it lives; all ranks together."""
        self.reset_center()
        if self.asynchronous is not None:
            self.asynchronous.start(self.parts)

    def _standing(self, moment: Moment) -> Standing:
        """Return where this rank stands, for the others."""
        counters, loaded = self.counters, self._has_loaded()
        center = ""
        if loaded and self.asynchronous is None:
            center = self._digest(self._loaded_centers())
        return Standing(
            loaded,
            counters.local_steps,
            (counters.last_exchange, counters.next_exchange),
            self.run if loaded else "",
            center,
            self._replica_digest(),
            moment,
        )

    def _replica_digest(self) -> str:
        """Return a text that is the same where ranks may train without taking over the root's values."""
        return f"{self._digest([self.parts[0].values])} {self.replica.frozen().hex()}"

    def _has_loaded(self) -> bool:
        return self._loaded

    def _loaded_centers(self) -> list[Store[Any]]:
        """Return the centers that were loaded, whole; none where this rank has shares only."""
        stores: list[Store[Any]] = []
        for part in self.parts if self.together.group is None else self.parts[:1]:
            if part.center.layout is part.values.layout:
                stores.append(part.center)
            elif self._restored is not None:
                stores.append(self.replica.new_temporary_store(part.values.layout))
                self.replica.load(stores[-1], self._restored["vectors"][part.name]["center"])
            else:
                return []
        return stores

    def _digest(self, stores: Iterable[Store[Any]]) -> str:
        """Return a text that is the same where the values are, to the bit; empty of no stores."""
        digest, any_store = hashlib.sha256(), False
        for store in stores:
            any_store = True
            for bucket in store.layout.buckets:
                digest.update(self.replica.to_bytes(store.read(bucket)))
        return digest.hexdigest() if any_store else ""

    def check_agreement(self) -> None:
        """Check that all ranks are about to do the same; for asynchronous exchange, make the center.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: asynchronous exchange is not possible, as the job was launched.
        """
        facts = build_on_all(self.communicator, self.name, self._facts)
        agree(self.communicator, self.name, facts)
        if self.together.group is not None:
            agree(self.together.group, self.together.group_name, facts)
        if self.asynchronous is not None:
            self.asynchronous.open(self.number)

    def report(self, loss: Any) -> None:
        """Tell schedules the loss of this rank; before the step that it belongs to, at every one or now and then.

        At an exchange, the mean of what a rank has reported since the last one is its loss, and the mean of those the
        ``loss`` of the clock that the schedule is asked with.

        Args:
            loss: a number: a float, or a tensor or array without dimensions.

        Raises:
            TypeError: no number.
            ValueError: NaN or infinity. The other ranks get an error where they exchange next; this one waits for them.

        Example:
            >>> import numpy as np
            >>> from hvd_periodic import SGD, ModelAverageOptimizer
            >>> x = np.ones(2)
            >>> optimizer = ModelAverageOptimizer(SGD(0.1), {"x": x}, lambda clock: 2 if clock.loss is None else 3)
            >>> for step in range(5):
            ...     optimizer.synchronizer.report(x @ x)
            ...     optimizer.step({"x": 2 * x})
            >>> optimizer.synchronizer.counters.last_exchange
            5
        """
        value = _number(loss, "The loss that is reported")
        if math.isfinite(value):
            self.notes = self.notes.reported(value)
            return
        self._failure = f"A loss of {value} was reported at step {self.local_steps}"
        error = ValueError(f"{self._failure}: the training has diverged, or report() was given something else")
        if self.asynchronous is None:
            try:
                self._meet(Purpose.EXCHANGE)
            except RuntimeError:
                raise error from None
        raise error

    def _learning_rate(self) -> float | None:
        """Return the learning rate of the local optimizer; None where it is unknown, or no number."""
        return rate_of(None if self.learning_rate is None else self.learning_rate())

    def _time(self) -> None:
        """Measure steps from now on."""
        self._timed_since = (time.perf_counter(), self.local_steps)

    def _step_seconds(self, local_steps: int) -> float | None:
        """Return the seconds per local step since the last exchange, or since construction or loading."""
        if self._timed_since is None or local_steps <= self._timed_since[1]:
            return None
        return (time.perf_counter() - self._timed_since[0]) / (local_steps - self._timed_since[1])

    def _standpoint(self) -> Standpoint:
        """Return what this rank knows by itself."""
        counters = self.counters
        return Standpoint(counters, self.notes, self._learning_rate(), self._step_seconds(counters.local_steps))

    def prepare_gradients(self) -> None:
        """Show the local gradients to the algorithm; call it before every local update.

        EASGD with ρ > 0 adds its elastic term to them, AGN accumulates them, the others do nothing. The first call
        begins training, see :meth:`begin`: gradients of parameters that are replaced there are discarded.

        Raises:
            RuntimeError: called inside ``center()``; or as :meth:`begin`.
        """
        self.refuse_inside_center("step")
        if self.begin():
            self.replica.discard_gradients()
        self._prepared = True
        if self.algorithm.uses_gradients and not self.replicas_are_equal:
            self._show_gradients()

    def _show_gradients(self) -> None:
        self._count(gradients=self.replica.local(self.algorithm, self.parts[0].worker))

    def step(self, updated: bool = True) -> bool:
        """Count one iteration and exchange if one is due; call it after every iteration, on all ranks.

        Args:
            updated: whether the local update ran; an iteration without update counts all the same, so that ranks
                agree on when to exchange.

        Returns:
            Whether an exchange took place.

        Raises:
            RuntimeError: called inside ``center()``; after an update whose gradients the algorithm needed and was not
                shown; or as :meth:`sync`.
        """
        self.begin_step(updated)
        self.begin(Moment.AFTER_UPDATE if updated else Moment.BEFORE_UPDATE)
        self._count(local_steps=1, skipped_updates=not updated)
        if self.local_steps == self.synchronous_until:
            self.restart_center()
        if self.counters.local_steps < self.counters.next_exchange:
            return False
        self.sync()
        return True

    def begin_step(self, updated: bool) -> None:
        """Raise what :meth:`step` raises before it counts."""
        self.refuse_inside_center("step")
        if updated and self.algorithm.uses_gradients and not self._prepared:
            raise RuntimeError(
                f"{type(self.algorithm).__name__} needs every local gradient: call prepare_gradients() before each "
                "local update, then step()"
            )
        self._prepared = False

    def sync(self) -> None:
        """Exchange now, on all ranks, whatever the schedule says.

        Raises:
            RuntimeError: the parameters changed since construction, or ranks are at different steps; on all ranks.
        """
        self.refuse_inside_center("sync")
        self.begin(Moment.AFTER_UPDATE)
        self._run_exchange(leaving=False)

    def finalize(self) -> None:
        """Leave training: exchange what is left, so that all ranks end with the same center.

        Ranks may arrive after different numbers of steps: one that is done takes part in the exchanges of the others,
        with unchanged parameters and no gradients, until all are done. No exchange takes place if nobody has stepped
        since the last one. Training may go on afterwards, from the step count of the rank that did most.

        In asynchronous training each rank pushes what is left, and waits, asleep, until all have: the center is final
        then. Ranks of groups wait for those of all groups: the first process that ends would take Horovod from all.

        Raises:
            RuntimeError: the centers of the ranks differ; on all ranks.
        """
        self.leave()
        self.communicator.wait_for_job()

    def leave(self) -> None:
        """Do what :meth:`finalize` does among the ranks that exchange."""
        self.refuse_inside_center("finalize")
        if self.asynchronous is not None and not self.communicator.alive():
            raise RuntimeError("Horovod has been shut down: finalize() has to come before hvd.shutdown()")
        self.begin(Moment.END)
        if self.asynchronous is not None:
            if self.local_steps > self.counters.last_exchange:
                self._run_exchange(leaving=False)
            self.asynchronous.finish()
            return
        while self._run_exchange(leaving=True):
            pass
        self.audit()

    def audit(self) -> None:
        """Check on all ranks that they hold the same center, to the bit; each what it holds of it for all.

        Raises:
            RuntimeError: they do not; names the ranks.
        """
        # Statistics of groups differ: every place in the groups has its own.
        parts = self.parts if self.together.group is None else self.parts[:1]
        audit(
            self.together,
            "center",
            (
                self.replica.to_bytes(store.read(bucket))
                for part in parts
                if part.placement.everywhere
                for store in part.center_state.values()
                for bucket in part.values.layout.buckets
            ),
        )

    def broadcast(self) -> None:
        """Give all ranks the root's parameters, buffers, center, counters and schedule position.

        This is what starts training, and what restores it when a checkpoint was loaded on the root only. The state of
        the local optimizer is not part of it. Where gradients are averaged in groups, each takes over the values of its
        first rank before.

        Raises:
            RuntimeError: called inside ``center()``; or a state was loaded on some ranks only, where gradients are
                averaged, so that local optimizers have to be in the same state.
        """
        self.refuse_inside_center("broadcast")
        steps = set(self.together.gather(self.counters.local_steps, "steps").values())
        averaging = self.together.any(self._in_groups) or max(steps) < (self.synchronous_until or 0)
        if averaging and len(steps) > 1:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which broadcast() does "
                f"not bring: load the state on every rank. Received: states of steps {sorted(steps)}"
            )
        self._take_over(self.communicator, self.root, self.name)
        if self.together.group is not None:
            self._take_over(self.together.group, self.together.group_root, self.together.group_name)
        self._restored = None
        self._loaded = False
        if self.local_steps == 0:
            self._plan_first_round(self._meet(Purpose.START))
        self._time()
        self.begun = True

    def _give_values(self) -> None:
        """Give all ranks the root's parameters, statistics and constants."""
        for send in self._senders("values"):
            self._send_values(send)

    def _senders(self, what: str) -> list[Callable[[Any], Any]]:
        """Return what gives all ranks the root's values: first those that exchange with it, then those of groups."""
        senders, together = [_sender(self.communicator, f"{self.name}.{what}", self.root)], self.together
        if together.group is not None:
            senders.append(_sender(together.group, f"{together.group_name}.{what}", together.group_root))
        return senders

    def _take_over(self, communicator: Communicator, root: int, name: str) -> None:
        """Give the ranks of a communicator all that one of them has."""
        is_root, worker = communicator.rank == root, self.asynchronous
        if worker is not None:
            worker.go_on()

        send = _sender(communicator, f"{name}.broadcast", root)
        restored = None if self._restored is None else self._restored["center_optimizer"]
        if self.placement.everywhere:
            restored = self.outer.state()
        known = self._has_loaded() or self.local_steps > 0
        mine = (self.counters, self.notes, self.run, known, self._restored is not None, restored)
        gathered = communicator.allgather_object(mine if is_root else None, f"{name}.progress")[root]
        counters, notes, self.run, known, whole, optimizer_state = gathered
        if known and communicator is self.together.group and not self.placement.everywhere:
            raise RuntimeError(
                f"With center={self.placement.name!r}, ranks that average their gradients hold other parts of the "
                "center: load the state on every rank"
            )
        self._send_values(send)
        if not is_root:
            self.counters, self.notes = counters, notes
        if not known:  # The parameters may have been loaded since construction.
            self._restart()
            return
        if worker is not None and whole:
            worker.resume(self.parts, self._restored)
        for part in self.parts:
            for store in part.worker.values():
                self._send_store(store, send)
            if part.placement.everywhere:
                for store in part.center_state.values():
                    self._send_store(store, send)
            elif whole and worker is None:
                self._send_restored(part, is_root, send)
        if not is_root and worker is None and (self.placement.everywhere or whole):
            self._load_center_optimizer(optimizer_state)

    def restart_center(self) -> None:
        """Let exchanges begin: set the center to the parameters, which have to be the same on all ranks.

        Statistics were not averaged so long, and now are.

        Raises:
            RuntimeError: the parameters are not the same.
        """
        self._restart_parts()
        self.audit()

    def _restart_parts(self) -> None:
        self.reset_center()
        for part in self.parts[1:]:
            self._send_store(part.center, _sender(self.communicator, f"{self.name}.{part.name}.restart", self.root))
            part.exchange(self.communicator, Exchange(self.communicator.size, 1, 1), self.name)

    def _follow_equal_replicas(self) -> None:
        """While gradients are averaged over all, the center is what the replicas are."""
        if self.replicas_are_equal and not self._inside_center:
            self.reset_center()

    def _send_values(self, send: Callable[[Any], Any]) -> None:
        for part in self.parts:
            self._send_store(part.values, send)
        if self.replica.constants is not None:
            self._send_store(self.replica.constants, send)

    def _send_store(self, store: Store[Any], send: Callable[[Any], Any]) -> None:
        for bucket in store.layout.buckets:
            store.write(bucket, send(store.read(bucket, out=self.replica.scratch(bucket, 0))))

    def _load_center_optimizer(self, saved: Any) -> None:
        state = self.placement.select(saved)
        if state is not None:
            self.outer.load(state)

    def _send_restored(self, part: TensorGroup[V], is_root: bool, send: Callable[[Any], Any]) -> None:
        """Give all ranks their shares of the center that the root has loaded."""
        layout = part.values.layout
        held = self.replica.new_temporary_store(layout) if is_root else part.values
        for key in part.center_state:
            if is_root and self._restored is not None:
                self.replica.load(held, self._restored["vectors"][part.name][key])
            for bucket in layout.buckets:
                part.set_share(key, bucket, send(held.read(bucket, out=self.replica.scratch(bucket, 0))))

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center variables in the model inside the block, the local values again after it, come what may.

        Buffers that are averaged at exchanges take the values of the last one. Before the first step the center is what
        the model holds. Where the center is not on every rank, all ranks have to enter the block.

        Raises:
            RuntimeError: blocks are nested.
        """
        self.refuse_inside_center("center")
        self._begin_reading()
        shown = self.parts if self._center_is_known() else []
        held = [[part.values.read(bucket) for bucket in part.values.layout.buckets] for part in shown]
        self._inside_center = True
        try:
            for part in shown:
                for bucket in part.values.layout.buckets:
                    part.values.write(bucket, part.fetch(self.communicator, bucket, self.name))
            yield
        finally:
            for part, vectors in zip(shown, held, strict=True):
                for bucket, vector in zip(part.values.layout.buckets, vectors, strict=True):
                    part.values.write(bucket, vector)
            self._inside_center = False

    def _begin_reading(self) -> None:
        """Get ready to read the center: where all ranks have to, they begin training first."""
        if self.reads_together:
            self.begin()
        self._follow_equal_replicas()

    def _center_is_known(self) -> bool:
        """Whether the center can be read, and be another thing than the model: before training, if it was loaded."""
        if self._begun or not self._has_loaded():
            return self._begun
        return self.asynchronous is None or self.asynchronous.at_rest

    @property
    def inside_center(self) -> bool:
        """Whether the model holds the center now."""
        return self._inside_center

    @property
    def reads_together(self) -> bool:
        """Whether all ranks have to take part where one reads the center."""
        return not self.placement.everywhere and self.asynchronous is None

    def center_tensors(self) -> list[Any]:
        """Return what this rank holds of the center of the parameters: views, in their order and in its dtype."""
        return self.parts[0].center.tensors()

    def distance(self) -> float:
        """Return ‖x − c‖₂, the distance of this rank's parameters to the center.

        Nothing is communicated where the center is on every rank; otherwise all ranks have to ask.
        """
        self._begin_reading()
        return float(self._distance())

    def _distance(self) -> Any:
        part, replica = self.parts[0], self.replica
        total: Any = 0.0
        for bucket in part.values.layout.buckets:
            x = part.values.read(bucket, out=replica.scratch(bucket, 0))
            center = part.fetch(self.communicator, bucket, self.name)
            d = replica.space.sub(x, center, out=replica.scratch(bucket, 1))
            total += replica.space.dot(d, d)
        return total**0.5

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to continue exactly, except the parameters and the local optimizer.

        It holds copies, in tensors, dicts, lists and numbers only; the whole center, wherever that lives. Where it is
        not on every rank, all ranks have to call this, once training has begun.
        """
        if not self._begun:
            return self._state_before_training()
        self._follow_equal_replicas()
        return self._state()

    def _state_before_training(self) -> dict[str, Any]:
        """Return what was loaded; or of a new training, in which the center is what the model holds."""
        if self._restored is not None:
            return copy.deepcopy(self._restored)
        if self._has_loaded() and self.reads_together:  # Every rank has its share, in variables.
            self.begin()
            return self._state()
        if not self._has_loaded():
            self.reset_center()
        if self.placement.everywhere:
            return self._state()
        return self._assembled({part.name: part.save_initial() for part in self.parts}, None)

    def _state(self) -> dict[str, Any]:
        optimizer_state = (self.outer if self.asynchronous is None else self.asynchronous).state()
        if self.parts[0].total is not None and self.asynchronous is None:
            optimizer_state = self.placement.gather(self.communicator, optimizer_state, f"{self.name}.state")
        vectors = {part.name: part.save(self.communicator, self.name) for part in self.parts}
        return self._assembled(vectors, optimizer_state)

    def _assembled(self, vectors: dict[str, Any], optimizer_state: Any) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "run": self.run,
            "algorithm": type(self.algorithm).__name__,
            "schedule": repr(self.schedule),
            "counters": asdict(self.counters),
            "notes": asdict(self.notes),
            "center_optimizer": optimizer_state,
            "outer": self.outer.name,
            "vectors": vectors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned: on every rank its own, or all the same; or on the root alone.

        The first step afterwards finds out who has loaded what, see :meth:`begin`. The next exchange takes place where
        the saved schedule put it, those after it where this one does.

        Raises:
            ValueError: the state belongs to another algorithm, another model or another version.
            RuntimeError: called inside ``center()``; or in the middle of asynchronous training, which other ranks would
                not notice.
        """
        self.refuse_inside_center("load_state_dict")
        self.check_state_dict(state)
        worker = self.asynchronous
        if worker is None:
            self._load_center_optimizer(state["center_optimizer"])
        else:
            if self._begun and not worker.at_rest and self.communicator.size > 1:
                raise RuntimeError(
                    "load_state_dict() while ranks train asynchronously: the others would not notice. Load before the "
                    "first step; or after finalize() on every rank, or on the root and then call broadcast() on all"
                )
            worker.check(state)
        for part in self.parts:
            part.load(state["vectors"][part.name])
        if worker is not None:
            worker.read_from_saved(self.parts, state)
        self._restored = None if self.placement.everywhere else state
        self._loaded = True
        self.run = state.get("run", "")
        self._ready_since = time.perf_counter()
        self.counters = Counters(**state["counters"])
        self.notes = Notes(**state.get("notes", {}))  # Version 0.1 has none.
        self.begun = False

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise; change nothing."""
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            found = state.get("version") if isinstance(state, dict) else type(state)
            raise ValueError(f"Not a synchronizer state of version {_STATE_VERSION}. Received: {found!r}")
        missing = sorted(_STATE_KEYS - state.keys())
        if missing:
            raise ValueError(f"The synchronizer state is incomplete. It lacks {', '.join(missing)}")
        if state["algorithm"] != type(self.algorithm).__name__:
            raise ValueError(
                f"The state was saved by {state['algorithm']}, this optimizer runs {type(self.algorithm).__name__}"
            )
        if state.get("outer", self.outer.name) != self.outer.name:
            raise ValueError(
                f"The state was saved with the outer optimizer {state['outer']}, and this one has {self.outer.name}"
            )
        for part in self.parts:
            part.check_state(state["vectors"].get(part.name, {}))

    def _facts(self) -> dict[str, object]:
        """Return what all ranks must agree on."""
        return {
            "version": __version__,
            "algorithm": self.algorithm,
            "schedule": re.sub(" at 0x[0-9a-f]+", "", repr(self.schedule)),
            "first exchanges": forecast(self.schedule, 8),
            "root rank": self.root,
            "place of the center": self.placement.name,
            "asynchronous": self.asynchronous is not None,
            **({} if self.asynchronous is None else self.asynchronous.facts()),
            "center optimizer": self.outer.name,
            "optimizer_state": self.policy,
            **self.replica.facts(),
            **self.hyperparameters.settings(),
        }

    def _run_exchange(self, leaving: bool) -> bool:
        """Exchange; return whether some rank is still training."""
        if self.asynchronous is not None:
            self._exchange_alone(self.asynchronous)
            return False
        started = time.perf_counter()
        own = self._standpoint()
        meeting = self.agreement_of(self._meet(Purpose.LEAVE if leaving else Purpose.EXCHANGE), own)
        plan = self._plan(meeting)
        self._count(bytes_sent=8 * len(integers(Record(0, 0))))
        self.hyperparameters.follow(meeting.settings)
        if meeting.training or meeting.pending:
            exchange = Exchange(self.communicator.size, meeting.period, max(self.counters.gradients, 1))
            try:
                if self.replicas_are_equal:
                    self.restart_center()
                if not self.replicas_are_equal:
                    self._count(bytes_sent=sum(p.exchange(self.communicator, exchange, self.name) for p in self.parts))
                    if meeting.states_are_there:
                        self._count(bytes_sent=self._exchange_optimizer_state(exchange, self.counters.rounds))
            except Exception as error:
                self._failure = f"The exchange at step {self.counters.local_steps} failed: {error}"
                raise
            self._count(rounds=1)
        self.counters = replace(
            self.counters,
            local_steps=meeting.step,
            skipped_updates=self.counters.skipped_updates + meeting.step - self.counters.local_steps,
            last_exchange=meeting.step,
            next_exchange=meeting.step + plan.next_exchange - meeting.clock.step,
            gradients=0,
        )
        self.notes = Notes(memory=plan.memory)
        self._count(exchange_seconds=time.perf_counter() - started)
        self._time()
        return meeting.training

    def _exchange_optimizer_state(self, exchange: Exchange, rounds: Any) -> Any:
        """Exchange the local optimizer's state as its policy asks; return the bytes handed to collectives."""
        if self.optimizer_state is None:
            return 0
        return self.optimizer_state.exchange(self.communicator, exchange, rounds, self.name, self._when)

    def _exchange_alone(self, worker: Worker) -> None:
        """Exchange with the center, without the other ranks."""
        started, counters, own = time.perf_counter(), self.counters, self._standpoint()
        problem = self._problem(own, Purpose.EXCHANGE)
        if problem is not None:
            raise RuntimeError(problem)
        plan = ask(self.schedule, own.clock)
        period = own.clock.period
        try:
            sent = worker.exchange(self.parts, Exchange(self.communicator.size, period, max(counters.gradients, 1)))
        except Exception as error:
            self._failure = f"The exchange at step {counters.local_steps} failed: {error}"
            raise
        missed = worker.transport.missed
        self.counters = replace(
            counters,
            rounds=counters.rounds + 1,
            bytes_sent=counters.bytes_sent + sent,
            last_exchange=counters.local_steps,
            next_exchange=plan.next_exchange,
            gradients=0,
            pushes_missed=counters.pushes_missed + missed,
            staleness_max=max(counters.staleness_max, missed),
            exchange_seconds=counters.exchange_seconds + time.perf_counter() - started,
        )
        self.notes = Notes(memory=plan.memory)
        self._time()

    def _meet(self, purpose: Purpose) -> list[Record]:
        """Return what all ranks have come for, and where they stand.

        Raises:
            RuntimeError: on all ranks, if one cannot go on, or if they have come for different things.
        """
        own, problem = Standpoint(self.counters, self.notes), None
        try:
            own = self._standpoint()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = problem or self._problem(own, purpose)
        record = self.own_record(own, purpose, problem)
        records = records_of(self.communicator.gather_integers(integers(record), self.meeting_name))
        check(self.communicator, records, None if problem is None else RuntimeError(problem))
        return records

    def _plan(self, meeting: Agreement) -> Plan:
        """Return what the schedule says at this exchange, the same on all ranks.

        Where nobody trains any more, it may have nothing to say; where nothing is exchanged, it is not asked. The
        period is then the one before.
        """
        if meeting.training:
            return self._asked(meeting.clock, compare=meeting.unforeseen)
        try:
            if meeting.pending:
                return ask(self.schedule, meeting.clock)
        except RuntimeError as error:
            logger.debug("Where training has ended, the period stays as it was: %s", error)
        return Plan(meeting.step + max(meeting.period, 1), meeting.clock.memory)

    def _asked(self, clock: Clock, compare: bool) -> Plan:
        """Return what the schedule says; where ranks have to, they compare, those of all groups that train together.

        Raises:
            RuntimeError: it failed, or says different things on different ranks; on all of them, where they compare.
        """
        if compare and self.together.group is not None:
            clock = united_clock(clock, self.together.allgather_object(clock, "clock"))
        plan, failure = None, None
        try:
            plan = ask(self.schedule, clock)
        except RuntimeError as error:
            failure = error
        planned = 0 if plan is None else plan.next_exchange
        answers = self.together.allgather_object(planned, "plan") if compare else [planned]
        if compare and 0 in answers:
            raise_on_all(self.together, "plan", failure)
        if plan is None:
            raise RuntimeError("The schedule failed") if failure is None else failure
        if len(set(answers)) > 1:
            raise RuntimeError(
                f"The schedule says different things on different ranks: the next exchange at step {answers[0]} on "
                f"rank 0, and at {next(a for a in answers if a != answers[0])} elsewhere. It has to be a function of "
                "the clock alone"
            )
        return plan

    @property
    def meeting_name(self) -> str:
        """The name of the collective in which ranks meet."""
        return self.communicator.meeting_name

    def own_record(self, own: Standpoint, purpose: Purpose, problem: str | None) -> Record:
        """Return what this rank tells the others before any data travels."""
        settings = self.hyperparameters.settings()
        rates = {key: value for key, value in settings.items() if key.startswith(("lr ", "learning_rate "))}
        others = {key: value for key, value in settings.items() if key not in rates}
        counters = own.counters
        return Record(
            purpose=purpose,
            optimizer=self.number,
            problem=int(problem is not None),
            settings=_fingerprint(others),
            rate=_fingerprint(rates),
            local_steps=counters.local_steps,
            updates=counters.local_steps - counters.skipped_updates,
            pending=counters.local_steps - counters.last_exchange,
            period=own.clock.period,
            learning_rate=own.learning_rate,
            step_seconds=own.step_seconds,
            loss=own.notes.loss,
            optimizer_state=self._state_fingerprint() if problem is None and purpose != Purpose.START else 0,
            foreseen=(self._foreseen(own, purpose) or 0) if problem is None else 0,
        )

    def _state_fingerprint(self) -> int:
        """Return a number that is the same where local optimizers keep the same; 0 where this one keeps nothing yet."""
        facts = {} if self.optimizer_state is None else self.optimizer_state.facts()
        return _fingerprint(facts) if facts else 0

    def _foreseen(self, own: Standpoint, purpose: Purpose) -> int | None:
        """Return the exchange after this one, if the schedule can say so before ranks have met."""
        try:
            return foresee(self.schedule, own.clock if purpose != Purpose.START else replace(own.clock, round=0))
        except Exception:
            if purpose == Purpose.LEAVE:  # Where training ends, a schedule may have nothing to say.
                return None
            raise

    def agreement_of(self, records: Sequence[Record], own: Standpoint) -> Agreement:
        """Return what this exchange is, given what all ranks announced.

        Raises:
            RuntimeError: on all ranks, if they are at different steps, or the schedule says different things on them.
            ValueError: on all ranks, if the hyper-parameters of the center optimizer differ; or what local optimizers
                keep, where it is exchanged.
        """
        states = {record.optimizer_state for record in records}
        if self.optimizer_state is not None and 0 not in states and len(states) > 1:
            agree(self.communicator, self.name, self.optimizer_state.facts())
        training = [record for record in records if record.training]
        deciding = training or list(records)
        steps = sorted({record.local_steps for record in training})
        if len(steps) > 1:
            raise RuntimeError(
                f"Ranks exchange at different local steps, from {steps[0]} to {steps[-1]}; this rank is at "
                f"{own.counters.local_steps}. Was sync() called on some ranks only, or a state restored without "
                "broadcast()? A rank that runs out of data calls finalize()"
            )
        step = max(record.local_steps for record in deciding)
        period = max(record.period for record in deciding)
        return Agreement(
            bool(training),
            own.counters.local_steps if training else step,
            pending=max(record.pending for record in records),
            period=period,
            clock=agreed_clock(deciding, replace(own.clock, step=step, period=period)),
            unforeseen=not deciding[0].foreseen or len({record.foreseen for record in deciding}) > 1,
            settings=self._settings_of(records, deciding),
            states_are_there=len(states) == 1,
        )

    def _settings_of(self, records: Sequence[Record], deciding: Sequence[Record]) -> Any:
        """Return the hyper-parameters of the center optimizer where those of ranks differ; None where they do not.

        They follow local optimizers, and a learning-rate scheduler is behind on a rank whose updates were skipped, and
        ahead on one that has ended its epoch. Those that train decide; of them, who has made most updates; of several,
        the first.
        """
        first = leading(deciding)
        most = first.updates
        if all((record.settings, record.rate) == (first.settings, first.rate) for record in records):
            return None
        if any(record.settings != first.settings for record in deciding if record.updates == most):
            agree(self.communicator, self.name, self.hyperparameters.settings())
        of_ranks = self.communicator.allgather_object(self.hyperparameters.hyperparameters(), f"{self.name}.settings")
        decides = records.index(first)
        others = [r for r, record in enumerate(records) if record in deciding and record.rate != first.rate]
        if any(records[rank].updates == most for rank in others) and not self._warned:
            self._warned = True
            logger.warning(
                "The learning rates of the ranks differ at local step %d: the optimizer of the center takes that of "
                "rank %d, and not those of rank %s. A scheduler has to decide alike on all ranks",
                first.local_steps,
                decides,
                join(others),
            )
        return of_ranks[decides]

    def _problem(self, own: Standpoint, purpose: Purpose) -> str | None:
        """Return why this rank cannot exchange, or None."""
        counters = own.counters
        if not math.isfinite(own.notes.loss_sum):
            return f"The losses reported until step {counters.local_steps} are not all finite: {own.notes.loss_sum}"
        try:
            self._foreseen(own, purpose)
        except Exception as error:
            return f"The schedule failed: {type(error).__name__}: {error}"
        unused = purpose == Purpose.LEAVE and counters.local_steps == counters.rounds == 0
        if unused and self.placement.everywhere and self.distance() > 0:
            return (
                "The parameters have moved, but no step was counted: call step() of the wrapper or the synchronizer; "
                "without any training leave out finalize()"
            )
        try:
            state = None if self.optimizer_state is None or purpose == Purpose.START else self.optimizer_state.problem()
            return self.communicator.changed() or self._failure or self.replica.changes() or state
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def refuse_inside_center(self, method: str) -> None:
        """Raise a RuntimeError inside ``center()``, in the name of a method that makes no sense there."""
        if self._inside_center:
            raise RuntimeError(
                f"{method}() inside the center() block: the model holds the center there, not this rank's replica. "
                "Leave the block first"
            )


def _sender(communicator: Communicator, name: str, root: int) -> Callable[[Any], Any]:
    """Return a function that broadcasts one value after the other, under names with a prefix."""
    calls = itertools.count()
    return lambda value: communicator.broadcast(value, f"{name}.{next(calls)}", root)


def rate_of(value: Any) -> float | None:
    """Return a learning rate as a float; None where it is no number."""
    try:
        return _number(value, "A learning rate")
    except TypeError:
        return None


def _number(value: Any, what: str) -> float:
    """Return a number, which may be a tensor or array without dimensions, as a float.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        shape = f" of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else f" {value!r}"
        raise TypeError(f"{what} must be a number. Received: {type(value).__name__}{shape}")
    return float(value.item() if hasattr(value, "item") else value)


def _fingerprint(settings: dict[str, object]) -> int:
    """Return a number that is the same where settings are."""
    return int.from_bytes(hashlib.sha256(str(settings).encode()).digest()[:7], "big")
