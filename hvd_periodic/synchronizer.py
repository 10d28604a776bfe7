"""Counts local steps, asks the schedule, runs exchanges and keeps their state: the only orchestration."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.algorithms.broadcast import Broadcast
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.algorithms.statistics import Statistics
from hvd_periodic.asynchronous.held import SharedPart
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.comm.base import Communicator
from hvd_periodic.consistency import agree, audit, build_on_all, raise_on_all
from hvd_periodic.part import Part
from hvd_periodic.placement import Placement, Replicated, Sharded, placement_of
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Schedule, next_exchange
from hvd_periodic.schedules.post_local import PostLocal
from hvd_periodic.store import Store
from hvd_periodic.version import __version__

V = TypeVar("V")

_FAR = 2**62
"""Above every step count; ``_FAR − step`` turns a maximum over ranks into a minimum."""

_STATE_VERSION = 1
_STATE_KEYS = {"algorithm", "schedule", "counters", "center_optimizer", "vectors"}


@dataclass(frozen=True)
class Counters:
    """What a synchronizer has done so far, and where it stands in its schedule.

    Attributes:
        local_steps: iterations, whether or not the update ran.
        rounds: exchanges.
        skipped_updates: iterations whose update did not run (overflow under mixed precision).
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
class Meeting:
    """What ranks learn of each other before an exchange: maxima over ranks.

    Attributes:
        training: some rank is still training, and not here to finalize.
        step: local steps at which this rank goes on.
        pending: local steps since the last exchange.
        period: local steps that the schedule planned between the last exchange and the next; where some rank is still
            training, for those that are.
    """

    training: bool
    step: int
    pending: int
    period: int


class Synchronizer(Generic[V]):
    """Runs one algorithm on one replica, whenever its schedule says so.

    Construction is local; :meth:`start` is the first call that communicates. Every rank then calls :meth:`step` once
    per iteration, and :meth:`finalize` once at the end.

    Args:
        replica: the parameters of this rank, as a front end provides them.
        algorithm: what an exchange computes.
        schedule: when to exchange.
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

    Raises:
        ValueError: hyper-parameters that make no sense for so many ranks, or an unknown ``center``.
        RuntimeError: asynchronous exchange is not possible between these ranks.
    """

    def __init__(
        self,
        replica: Replica[V],
        algorithm: Algorithm,
        schedule: Schedule,
        communicator: Communicator,
        root: int = 0,
        name: str | None = None,
        center: str = "replicated",
        asynchronous: bool = False,
        use_locking: bool = True,
    ) -> None:
        (algorithm.check_asynchronous if asynchronous else algorithm.check)(communicator.size)
        if asynchronous and isinstance(schedule, PostLocal) and schedule.quiet:
            raise ValueError("Asynchronous exchange has no phase in which gradients are averaged: quiet=False")
        self.replica = replica
        self.algorithm = algorithm
        self.schedule = schedule
        self.communicator = communicator
        self.root = root
        self.name = communicator.unique_name() if name is None else name
        self.counters = Counters(next_exchange=next_exchange(schedule, 0))
        self.group: Communicator | None = None
        self.group_name = ""
        self._in_groups = False
        self._prepared = False
        self._failure: str | None = None
        self._inside_center = False
        exchanged: list[tuple[str, Store[V], Algorithm]] = [("parameters", replica.parameters, algorithm)]
        if replica.buffers is not None:
            exchanged.append(("buffers", replica.buffers, Statistics(alone=asynchronous)))
        if replica.integers is not None:
            exchanged.append(("integers", replica.integers, Maximum(rising=asynchronous)))
        if replica.from_root is not None:
            broadcast = Broadcast()
            if asynchronous:
                broadcast.check_asynchronous(communicator.size)
            exchanged.append(("from_root", replica.from_root, broadcast))
        place = placement_of(center)
        self.asynchronous: Worker | None = None
        placements: list[Placement] = [place(communicator, root), *[Replicated(communicator, root)] * 3]
        if asynchronous:
            shared = [SharedPart(values.layout, made) for _, values, made in exchanged]
            sharded = place is Sharded
            self.asynchronous = Worker(communicator, replica, shared, root, sharded, use_locking)
            placements = list(self.asynchronous.placements)
        self.placement = placements[0]
        self._restored: dict[str, Any] | None = None
        self.parts = [
            Part(part, values, made, replica, where)
            for (part, values, made), where in zip(exchanged, placements, strict=False)
        ]
        if self.parts[0].total is not None and self.asynchronous is None:
            replica.bind_center(self.parts[0].center, self.parts[0].total)
        self._start_state()

    def _start_state(self) -> None:
        """Give the state of the algorithm its first value."""
        self.reset_center()

    def reset_center(self) -> None:
        """Set the center to the parameters, and forget what was accumulated."""
        for part in self.parts:
            part.reset()

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

    def average_within(self, group: Any) -> None:
        """Take notice of the ranks that average their gradients with this one at every step, before :meth:`start`.

        They agree, start and are restored like this one; those that exchange do so anyway.
        """
        self._in_groups = group is not None and group.size > 1 and self.synchronous_until is None
        exchanging = set(getattr(self.communicator, "ranks", range(self.communicator.size)))
        if group is not None and not set(group.ranks) <= exchanging:
            self.group, self.group_name = group, group.unique_name()

    @property
    def synchronous_until(self) -> int | None:
        """Local steps during which something else averages the gradients of the ranks that exchange.

        Their replicas are equal so long, and the center is what they are. None if nothing does.
        """
        return self.schedule.start if isinstance(self.schedule, PostLocal) and self.schedule.quiet else None

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
        self.broadcast()

    def check_agreement(self) -> None:
        """Check that all ranks are about to do the same; for asynchronous exchange, make the center.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: asynchronous exchange is not possible, as the job was launched.
        """
        facts = build_on_all(self.communicator, self.name, self._facts)
        agree(self.communicator, self.name, facts)
        if self.group is not None:
            agree(self.group, self.group_name, facts)
        if self.asynchronous is not None:
            self.asynchronous.open()

    def prepare_gradients(self) -> None:
        """Show the local gradients to the algorithm; call it before every local update.

        EASGD with ρ > 0 adds its elastic term to them, AGN accumulates them, the others do nothing.

        Raises:
            RuntimeError: called inside ``center()``.
        """
        self.refuse_inside_center("step")
        self._prepared = True
        if self.algorithm.uses_gradients and not self.replicas_are_equal:
            self._show_gradients()

    def _show_gradients(self) -> None:
        self._count(gradients=self.replica.local(self.algorithm, self.parts[0].state))

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
        if self.asynchronous is not None:
            if not self.communicator.alive():
                raise RuntimeError("Horovod has been shut down: finalize() has to come before hvd.shutdown()")
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
        audit(
            self.communicator,
            self.name,
            (
                self.replica.to_bytes(part.center.read(bucket))
                for part in self.parts
                if part.placement.everywhere
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
        of_ranks = self.steps_of_ranks()
        steps = {step for step, _ in of_ranks}
        averaged = any(in_groups for _, in_groups in of_ranks) or max(steps) < (self.synchronous_until or 0)
        if averaged and len(steps) > 1:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which broadcast() does "
                f"not bring: load the state on every rank. Received: states of steps {sorted(steps)}"
            )
        if self.group is not None:
            self._broadcast(self.group, 0, self.group_name)
        self._broadcast(self.communicator, self.root, self.name)
        self._restored = None

    def steps_of_ranks(self) -> list[tuple[int, bool]]:
        """Return the local steps of the ranks that exchange, and whether they average gradients in groups.

        Where they do, these are the ranks of all groups.
        """
        known = [(self.counters.local_steps, self._in_groups)]
        if self.group is not None:
            known = self.group.allgather_object(known[0], f"{self.group_name}.steps")
        of_ranks = self.communicator.allgather_object(known, f"{self.name}.steps")
        return [position for of_group in of_ranks for position in of_group]

    def _broadcast(self, communicator: Communicator, root: int, name: str) -> None:
        replica, is_root = self.replica, communicator.rank == root
        if self.asynchronous is not None:
            self.asynchronous.wake()

        send = _sender(communicator, f"{name}.broadcast", root)

        def send_store(store: Store[Any]) -> None:
            self._send_store(store, send)

        restored = None if self._restored is None else self._restored["center_optimizer"]
        if self.placement.everywhere:
            restored = replica.center_optimizer_state()
        progress = (self.counters, self._restored is not None, restored) if is_root else None
        counters, whole, optimizer_state = communicator.allgather_object(progress, f"{name}.progress")[root]
        if counters.local_steps and communicator is self.group and not self.placement.everywhere:
            raise RuntimeError(
                f"With center={self.placement.name!r}, ranks that average their gradients hold other parts of the "
                "center: load the state on every rank"
            )
        self._send_values(send)
        if not is_root:
            self.counters = counters
        if self.asynchronous is not None:
            self._start_center(counters)
        if counters.local_steps == 0:  # The parameters may have been loaded since construction.
            self.reset_center()
        for part in self.parts if counters.local_steps else []:
            for store in part.state.values():
                send_store(store)
            if part.placement.everywhere:
                send_store(part.center)
            elif whole and self.asynchronous is None:
                self._send_restored(part, is_root, send)
        if not is_root and self.asynchronous is None and (self.placement.everywhere or whole):
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

    def _start_center(self, counters: Counters) -> None:
        """Let the root set the asynchronous center to its replica, unless it has loaded one."""
        worker = self.asynchronous
        if worker is not None:
            restarts = worker.start(self.parts) if counters.local_steps == 0 else worker.transport.restarts()
            worker.started(self.communicator.allgather_object(restarts, f"{self.name}.restarts")[self.root])

    def _load_center_optimizer(self, saved: Any) -> None:
        state = self.placement.select(saved)
        if state is not None:
            self.replica.load_center_optimizer_state(state)

    def _send_restored(self, part: Part[V], is_root: bool, send: Callable[[Any], Any]) -> None:
        """Give all ranks their shares of the center that the root has loaded."""
        layout = part.values.layout
        held = self.replica.new_temporary_store(layout) if is_root else part.values
        if is_root and self._restored is not None:
            self.replica.load(held, self._restored["vectors"][part.name]["center"])
        for bucket in layout.buckets:
            part.keep(bucket, send(held.read(bucket, out=self.replica.scratch(bucket, 0))))

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center variables in the model inside the block, the local values again after it, come what may.

        Buffers that are averaged at exchanges take the values of the last one. Where the center is not on every rank,
        all ranks have to enter the block.

        Raises:
            RuntimeError: blocks are nested.
        """
        self.refuse_inside_center("center")
        self._follow_equal_replicas()
        held = [[part.values.read(bucket) for bucket in part.values.layout.buckets] for part in self.parts]
        self._inside_center = True
        try:
            for part in self.parts:
                for bucket in part.values.layout.buckets:
                    part.values.write(bucket, part.fetch(self.communicator, bucket, self.name))
            yield
        finally:
            for part, vectors in zip(self.parts, held, strict=True):
                for bucket, vector in zip(part.values.layout.buckets, vectors, strict=True):
                    part.values.write(bucket, vector)
            self._inside_center = False

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
        self._follow_equal_replicas()
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
        not on every rank, all ranks have to call this.
        """
        self._follow_equal_replicas()
        if self.asynchronous is not None:
            optimizer_state = self.asynchronous.optimizer_state()
        else:
            optimizer_state = self.replica.center_optimizer_state()
        if self.parts[0].total is not None and self.asynchronous is None:
            optimizer_state = self.placement.gather(self.communicator, optimizer_state, f"{self.name}.state")
        return {
            "version": _STATE_VERSION,
            "algorithm": type(self.algorithm).__name__,
            "schedule": repr(self.schedule),
            "counters": asdict(self.counters),
            "center_optimizer": optimizer_state,
            "vectors": {part.name: part.save(self.communicator, self.name) for part in self.parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; load it on every rank, each rank its own or all the same.

        The next exchange takes place where the saved schedule put it, those after it where this one does.

        Raises:
            ValueError: the state belongs to another algorithm, another model or another version.
            RuntimeError: called inside ``center()``.
        """
        self.refuse_inside_center("load_state_dict")
        self.check_state_dict(state)
        if self.asynchronous is None:
            self._load_center_optimizer(state["center_optimizer"])
        for part in self.parts:
            part.load(state["vectors"][part.name])
        if self.asynchronous is not None:
            self.asynchronous.restore(self.parts, state)
        self._restored = None if self.placement.everywhere else state
        self.counters = Counters(**state["counters"])

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
        for part in self.parts:
            part.check_state(state["vectors"].get(part.name, {}))

    def _facts(self) -> dict[str, object]:
        """Return what all ranks must agree on."""
        exchanges = [0]
        for _ in range(8):
            exchanges.append(next_exchange(self.schedule, exchanges[-1]))
        description = repr(self.schedule)
        return {
            "version": __version__,
            "algorithm": self.algorithm,
            "schedule": type(self.schedule).__name__ if " at 0x" in description else description,
            "first exchanges": exchanges[1:],
            "root rank": self.root,
            "place of the center": self.placement.name,
            "asynchronous": self.asynchronous is not None,
            **({} if self.asynchronous is None else self.asynchronous.facts()),
            **self.replica.facts(),
            **self.replica.center_settings(),
        }

    def _run_exchange(self, leaving: bool) -> bool:
        """Exchange; return whether some rank is still training."""
        if self.asynchronous is not None:
            self._exchange_alone(self.asynchronous)
            return False
        started = time.perf_counter()
        self._restored = None
        values = self.announce(self.counters, leaving)
        control = self.replica.control(values)
        total = self.communicator.allreduce(control, f"{self.name}.control", op="max")()
        meeting = self.conclude(self.counters, np.asarray(total).tolist(), leaving)
        self._count(bytes_sent=8 * len(values))
        if meeting.training or meeting.pending:
            exchange = Exchange(self.communicator.size, meeting.period, max(self.counters.gradients, 1))
            try:
                if self.replicas_are_equal:
                    self.restart_center()
                for part in [] if self.replicas_are_equal else self.parts:
                    self._count(bytes_sent=part.exchange(self.communicator, exchange, self.name))
            except Exception as error:
                self._failure = f"The exchange at step {self.counters.local_steps} failed: {error}"
                raise
            self._count(rounds=1)
        self.counters = replace(
            self.counters,
            local_steps=meeting.step,
            last_exchange=meeting.step,
            next_exchange=next_exchange(self.schedule, meeting.step),
            gradients=0,
        )
        self._count(exchange_seconds=time.perf_counter() - started)
        return meeting.training

    def _exchange_alone(self, worker: Worker) -> None:
        """Exchange with the center, without the other ranks."""
        started, counters = time.perf_counter(), self.counters
        problem = self._problem(counters, leaving=False)
        if problem is not None:
            raise RuntimeError(problem)
        period = counters.next_exchange - counters.last_exchange
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
            next_exchange=next_exchange(self.schedule, counters.local_steps),
            gradients=0,
            pushes_missed=counters.pushes_missed + missed,
            staleness_max=max(counters.staleness_max, missed),
            exchange_seconds=counters.exchange_seconds + time.perf_counter() - started,
        )

    def announce(self, counters: Counters, leaving: bool) -> list[int]:
        """Return what this rank tells the others before any data travels; their maximum over ranks is concluded from.

        A rank that is leaving sends zeros for its position, which no maximum of others can notice.
        """
        step, last = counters.local_steps, counters.last_exchange
        position = [0, 0] if leaving else [step + 1, _FAR - step]
        fingerprint = self._fingerprint()
        planned = counters.next_exchange - last
        values = [int(self._problem(counters, leaving) is not None), fingerprint, _FAR - fingerprint, *position]
        return [*values, step, step - last, 0 if leaving else planned, planned]

    def conclude(self, counters: Counters, total: list[int], leaving: bool) -> Meeting:
        """Return what this exchange is, given the maximum over ranks of what they announced.

        Raises:
            RuntimeError: on all ranks, if the parameters of one have changed or ranks are at different steps.
            ValueError: on all ranks, if the hyper-parameters of the center optimizer differ.
        """
        failed, largest, smallest, latest, earliest = total[0], total[1], _FAR - total[2], total[3] - 1, _FAR - total[4]
        if failed:
            problem = self._problem(counters, leaving)
            raise_on_all(self.communicator, self.name, None if problem is None else RuntimeError(problem))
        if largest != smallest:
            agree(self.communicator, self.name, self.replica.center_settings())
        training = latest >= 0
        if training and latest != earliest:
            raise RuntimeError(
                f"Ranks exchange at different local steps, from {earliest} to {latest}; this rank is at "
                f"{counters.local_steps}. Was sync() called on some ranks only, or a state restored without "
                "broadcast()? A rank that runs out of data calls finalize()"
            )
        step = counters.local_steps if training else total[5]
        return Meeting(training, step, pending=total[6], period=total[7] or total[8])

    def _fingerprint(self) -> int:
        """Return a number that is the same where the hyper-parameters of the center optimizer are."""
        settings = self.replica.center_settings()
        return int.from_bytes(hashlib.sha256(str(settings).encode()).digest()[:7], "big")

    def _problem(self, counters: Counters, leaving: bool) -> str | None:
        """Return why this rank cannot exchange, or None."""
        try:
            next_exchange(self.schedule, counters.local_steps)
        except Exception as error:
            return f"The schedule failed: {type(error).__name__}: {error}"
        unused = leaving and counters.local_steps == counters.rounds == 0
        if unused and self.placement.everywhere and self.distance() > 0:
            return "The parameters have moved, but no step was counted: call step() of the wrapper or the synchronizer"
        return self._failure or self.replica.changes()

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
