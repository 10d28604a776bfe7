"""The first step after construction or a load: decides from which values and states all ranks start."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.comm.membership import broadcaster
from hvd_periodic.ranks import by_value, named, titled
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.exchanger import Exchanger, TakeoverState
from hvd_periodic.sync.gradients import Assigned
from hvd_periodic.sync.reporting import report_start


class CallPoint(Enum):
    """The point at which a rank starts training."""

    BEFORE_UPDATE = "the model holds what local training starts from"
    AFTER_UPDATE = "local training has changed the model already"
    END = "this rank has nothing to train with"


class Start(Enum):
    """The values or states from which training starts."""

    FROM_PARAMETERS = "the parameters of the root"
    AS_CONSTRUCTED = "the parameters that the root had at construction"
    AS_LOADED = "what every rank has loaded"
    FROM_ROOT = "what the root has loaded"


@dataclass(frozen=True)
class LoadStatus:
    """The status of one rank before its first step.

    Attributes:
        loaded: whether a state was loaded.
        local_steps: iterations so far.
        exchanges: local steps at the last exchange and at the next.
        run: identifier of the training run of the state; empty if unknown.
        center: digest of the loaded center; empty if this rank does not have all of it.
        replica: digest of the parameters.
        call_point: the point at which this rank starts.
        failure: why the last load on this rank failed; empty if it did not.
        group: a number that is equal on ranks that share one center.
    """

    loaded: bool
    local_steps: int
    exchanges: tuple[int, int]
    run: str
    center: str
    replica: str
    call_point: CallPoint = CallPoint.BEFORE_UPDATE
    failure: str = ""
    group: int = 0


def decide(statuses: Mapping[int, LoadStatus], root: int, averaging: bool = False, asynchronous: bool = False) -> Start:
    """Decide from what training starts; the result is the same on all ranks.

    Args:
        statuses: the status of all ranks, by global rank.
        root: the global rank whose values all start from.
        averaging: whether gradients are averaged over ranks, so that local optimizers must be in the same state.
        asynchronous: whether each rank exchanges on its own clock.

    Raises:
        RuntimeError: the ranks have loaded states that do not belong together, or a rank failed to load; names them.

    Example:
        >>> new = LoadStatus(False, 0, (0, 10), "", "", "")
        >>> old = LoadStatus(True, 40, (40, 50), "", "a digest", "")
        >>> decide({0: old, 1: new}, root=0)
        <Start.FROM_ROOT: 'what the root has loaded'>
    """
    failures = {rank: status.failure for rank, status in statuses.items() if status.failure}
    if failures:
        raise RuntimeError(
            f"Training cannot start: loading the checkpoint failed on {named(failures)}: "
            f"{next(iter(failures.values()))}"
        )
    loaded = {rank: status for rank, status in statuses.items() if status.loaded}
    if not loaded:
        known = any(status.call_point is CallPoint.BEFORE_UPDATE for status in statuses.values())
        return Start.FROM_PARAMETERS if known else Start.AS_CONSTRUCTED
    if len(loaded) < len(statuses):
        if averaging:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which the root does not "
                "send: load the state on every rank. Received: "
                + _by_rank(statuses, lambda status: f"step {status.local_steps}")
            )
        if root not in loaded:
            raise RuntimeError(
                f"{titled(loaded)} {'has' if len(loaded) == 1 else 'have'} loaded a state, and the root, rank {root}, "
                "has none: load it on the root, from which all then start, or on every rank"
            )
        if not asynchronous and not statuses[root].center:
            raise RuntimeError(
                f"Rank {root} has loaded its shard of the center, and others have loaded nothing: load on every rank "
                "the file that it saved itself"
            )
        return Start.FROM_ROOT
    _require_one(loaded, lambda status: status.run and f"run {status.run}")
    if not asynchronous:
        _require_one(loaded, lambda status: f"step {status.local_steps}")
        _require_one(loaded, lambda s: f"step {s.local_steps}, exchanging at {s.exchanges[0]} and {s.exchanges[1]}")
        for group in {status.group for status in loaded.values()}:
            of_group = {rank: status for rank, status in loaded.items() if status.group == group}
            _require_one(of_group, lambda status: status.center and f"center {status.center[:8]}")
    return Start.AS_LOADED


def parameters_replaced(
    start: Start, statuses: Mapping[int, LoadStatus], rank: int, root: int, averaging: bool
) -> bool:
    """Return whether a rank's parameters are replaced, so that its present gradients belong to other parameters.

    If gradients are averaged over ranks, stale gradients of one rank affect all ranks.

    Example:
        >>> old, other = (LoadStatus(False, 0, (0, 10), "", "", digest) for digest in ("a", "b"))
        >>> statuses = {0: old, 1: other}
        >>> [parameters_replaced(Start.FROM_PARAMETERS, statuses, rank, root=0, averaging=False) for rank in (0, 1)]
        [False, True]
    """
    if start not in (Start.FROM_PARAMETERS, Start.FROM_ROOT):
        return False
    if averaging:
        return len({status.replica for status in statuses.values()}) > 1
    return statuses[rank].replica != statuses[root].replica


def _require_one(statuses: Mapping[int, LoadStatus], text: Callable[[LoadStatus], str]) -> None:
    if len({text(status) for status in statuses.values()} - {""}) > 1:
        raise RuntimeError(
            f"The ranks have loaded states of different runs or steps: {_by_rank(statuses, text)}. Load on every rank "
            "what it saved itself, all at the same step; or the state of one of them on the root alone"
        )


def _by_rank(statuses: Mapping[int, LoadStatus], text: Callable[[LoadStatus], str]) -> str:
    return by_value({rank: text(status) or "unknown" for rank, status in sorted(statuses.items())})


_started: list[weakref.ref[Any]] = []
"""The living synchronizers of this process that have started."""

_lock = threading.Lock()
"""Ranks may be threads."""


def warn_of_former(synchronizer: Any) -> None:
    """Warn on the root if another living synchronizer of the same parameters has steps since its last exchange.

    A new synchronizer starts all ranks from the root's parameters, so that the other ranks lose these steps.
    """
    with _lock:
        living = [former for former in (reference() for reference in _started) if former is not None]
        _started[:] = [weakref.ref(each) for each in {id(each): each for each in (*living, synchronizer)}.values()]
    ours = {id(tensor): tensor for tensor in synchronizer.replica.parameters.originals()}
    for former in living if synchronizer.membership.is_root else []:
        shared = any(tensor is ours.get(id(tensor)) for tensor in former.replica.parameters.originals())
        if former is synchronizer or not shared:
            continue
        counters = former.counters
        if counters.local_steps > counters.last_exchange and not former.warmup.active:
            synchronizer.membership.log.warning(
                "A new optimizer takes over parameters of one that has taken %d local steps since its last exchange, "
                "at step %d: all ranks start from the root's parameters, and what other ranks learned in these steps "
                "is lost. Call finalize() of the former optimizer first, or its adopt()",
                counters.local_steps - counters.last_exchange,
                counters.last_exchange,
            )


V = TypeVar("V")


class Startup(Generic[V]):
    """Starts all ranks together, from the root's values or from the state that each rank has loaded.

    Args:
        exchanger: the exchange strategy.
        checkpoint: the loaded state.
        assigned: watches, from the start of training, weights that only other code changes.

    Attributes:
        begun: whether training has started since construction and since the last load.
    """

    def __init__(self, exchanger: Exchanger[V], checkpoint: Checkpoint[V], assigned: Assigned[V]) -> None:
        self._exchanger, self._checkpoint, self._context = exchanger, checkpoint, exchanger.context
        self.assigned = assigned
        self.begun = False

    def start(self, begin: Callable[[], object]) -> None:
        """Give all ranks the root's values; if a state was loaded already, ``begin`` from it instead."""
        together = self._context.membership.all_ranks
        found = together.gather((self._checkpoint.has_loaded(), uuid.uuid4().hex[:16]), "run").values()
        if any(loaded for loaded, _ in found):
            begin()
            return
        _, self._checkpoint.run = next(iter(found))
        self._exchanger.tensor_groups.give_values()
        self._exchanger.restart()

    def begin(self, call_point: CallPoint) -> bool:
        """Compare the status of all ranks and start training; return whether this rank's parameters are replaced."""
        exchanger, context, checkpoint = self._exchanger, self._context, self._checkpoint
        membership = context.membership
        records = context.handshake.meet(Purpose.START)
        statuses = membership.all_ranks.gather(self._load_status(call_point), "start")
        averaging = self._averaging([status.local_steps for status in statuses.values()])
        everyone = membership.communicator.handshake_group
        root = everyone.global_ranks[membership.root_among_all]
        start = decide(statuses, root, averaging, asynchronous=not exchanger.steps_agree)
        if start is Start.FROM_PARAMETERS:
            self._start_from_parameters(different=len({status.replica for status in statuses.values()}) > 1)
        elif start is Start.AS_CONSTRUCTED:  # A copy made before training holds the statistics of its own rank.
            exchanger.tensor_groups.give_statistics()
        elif start is Start.FROM_ROOT:
            if membership.all_ranks.any(bool(context.exchanged.replica.local_names)):
                raise ValueError(
                    "A state was loaded on the root alone, which has no values for the `parameters` that are 'local' "
                    "on other ranks: load each rank's own state on all of them"
                )
            self._take_over(everyone, membership.root_among_all, membership.name)
        elif start is Start.AS_LOADED:  # Otherwise, all have the weights of the root that no exchange touches.
            exchanger.resume(checkpoint.state)
            context.differences.compare()
        checkpoint.forget()
        self._plan_first_round(records)
        context.progress.begin()
        self.begun = True
        self._tell()
        source = root if start is Start.FROM_ROOT else membership.global_root
        return parameters_replaced(start, statuses, membership.global_rank, source, averaging)

    def broadcast_from(self, source: int) -> None:
        """Give all ranks the state of the rank ``source``."""
        context, membership = self._context, self._context.membership
        context.handshake.check_same_call(Purpose.BROADCAST, context.exchanged.replica.changes())
        steps = set(membership.all_ranks.gather(context.progress.local_steps, "steps").values())
        if self._averaging(list(steps)) and len(steps) > 1:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which broadcast() does "
                f"not send: load the state on every rank. Received: states of steps {sorted(steps)}"
            )
        self._take_over(membership.communicator.handshake_group, source, membership.name)
        if membership.group is not None:
            self._take_over(membership.group, membership.group_root, membership.group_name)
        self._checkpoint.forget()
        if context.progress.local_steps == 0:
            self._plan_first_round(context.handshake.meet(Purpose.START))
        context.progress.time(context.progress.local_steps)
        self.begun = True
        self._tell()

    def go_on(self) -> None:
        """Go on with counters and vectors that training had before: nothing is agreed on at the next step."""
        self._context.progress.time(self._context.progress.local_steps)
        self._checkpoint.forget()
        self.begun = True
        self._tell()

    def _tell(self) -> None:
        """Notify the journal and the watcher of weights that training starts, or resumes from other counters."""
        self.assigned.remember()
        report_start(self._exchanger, self._context.progress.counters)

    def start_from_center(self, state: Mapping[str, Any] | None = None) -> None:
        """Set this rank's replica to the center, which it has taken over together with the counters.

        ``state`` has the center in full, if no rank holds all of it.
        """
        replica = self._context.exchanged.replica
        self._exchanger.discard()
        for group in self._exchanger.tensor_groups:
            center = group.center
            if state is not None:
                center = replica.new_temporary_store(group.values.layout)
                replica.load(center, state["vectors"][group.name]["center"])
            group.error_feedback.reset()
            for bucket in group.values.layout.buckets:
                group.start_from(bucket, center.read(bucket))
        self._forget_work()

    def start_from_replica(self) -> None:
        """Set the center to this rank's replica, and keep the counters, which are those of other ranks."""
        self._exchanger.discard()
        self._exchanger.restart()
        self._exchanger.tensor_groups.parameters.error_feedback.touch()
        self._forget_work()

    def broadcast_center_from(self, source: int) -> None:
        """Broadcast a replicated center from one of the ranks that exchange; replicas stay as they are."""
        exchanger, membership = self._exchanger, self._context.membership
        communicator, name = membership.communicator, f"{membership.name}.center"
        optimizer_state = communicator.broadcast_object(
            exchanger.optimizer_state_to_give(None), f"{name}.optimizer", source
        )
        send = broadcaster(communicator, name, source)
        for group in exchanger.tensor_groups:
            for store in group.center_state.values():
                exchanger.tensor_groups.send_store(store, send)
        if communicator.rank != source:
            self._context.exchanged.center_optimizer.load(optimizer_state)

    def _forget_work(self) -> None:
        """Reset the counters that describe the other rank's own work."""
        progress = self._context.progress
        progress.counters = replace(progress.counters, gradients=0, exchange_seconds=0.0, bytes_sent=0)
        progress.notes = replace(progress.notes, loss_sum=0.0, losses=0, seen=[])

    def _averaging(self, steps: Sequence[int]) -> bool:
        """Return whether gradients are averaged over all ranks or within groups, given the local steps of all ranks."""
        return self._context.membership.all_ranks.any(self._context.membership.in_groups) or max(steps) < (
            self._context.warmup.until or 0
        )

    def _plan_first_round(self, records: Sequence[Record]) -> None:
        """Query the schedule for the first exchange, with the current learning rate, which may be new."""
        progress = self._context.progress
        if progress.local_steps > 0:
            return
        plan = self._exchanger.first_plan(records)
        progress.counters = replace(progress.counters, next_exchange=plan.next_exchange)
        progress.notes = replace(progress.notes, memory=plan.memory)

    def _start_from_parameters(self, different: bool) -> None:
        """Start from the root's parameters; broadcast them if they differ, as a load since construction may cause."""
        if different:
            if self._context.membership.is_root:
                log = self._context.membership.log
                log.warning("The parameters of the ranks differ at the first step: all take over the root's")
            self._exchanger.tensor_groups.give_values()
        self._exchanger.restart()
        self._exchanger.tensor_groups.give_statistics()

    def _load_status(self, call_point: CallPoint) -> LoadStatus:
        """Return the status of this rank for the others."""
        counters, checkpoint, groups = self._context.progress.counters, self._checkpoint, self._exchanger.tensor_groups
        membership = self._context.membership
        loaded = checkpoint.has_loaded()
        return LoadStatus(
            loaded,
            counters.local_steps,
            (counters.last_exchange, counters.next_exchange),
            checkpoint.run if loaded else "",
            groups.digest(self._exchanger.loaded_centers(checkpoint.state)) if loaded else "",
            groups.replica_digest(),
            call_point,
            checkpoint.failure,
            min(membership.communicator.global_ranks) if membership.is_lockstep_group else 0,
        )

    def _take_over(self, communicator: Communicator, root: int, name: str) -> None:
        """Give the ranks of a communicator the whole state of one of them."""
        exchanger, checkpoint, progress = self._exchanger, self._checkpoint, self._context.progress
        placement, is_root = exchanger.placement, communicator.rank == root
        exchanger.begin_taking_over()
        send = broadcaster(communicator, f"{name}.broadcast", root)
        known, state = checkpoint.has_loaded() or progress.local_steps > 0, checkpoint.state
        optimizer_state = exchanger.optimizer_state_to_give(state)
        mine = (progress.counters, progress.notes, checkpoint.run, known, state is not None, optimizer_state)
        gathered = communicator.broadcast_object(mine, f"{name}.progress", root)
        counters, notes, checkpoint.run, known, whole, optimizer_state = gathered
        if known and communicator is self._context.membership.group and not placement.everywhere:
            raise RuntimeError(
                f"With center={placement.name!r}, ranks that average their gradients hold other parts of the "
                "center: load the state on every rank"
            )
        exchanger.tensor_groups.send_values(send)
        if not is_root:
            progress.counters, progress.notes = counters, notes
        if known:
            exchanger.take_over(TakeoverState(send, is_root, state, whole, optimizer_state))
        else:  # The parameters may have been loaded since construction.
            exchanger.restart()
