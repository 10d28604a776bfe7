"""Goes on with another set of parameters in the middle of training.

All ranks call it together. First they exchange the old set, unless they have just done so, and what is in flight ends.
Then they compare the new sets, as at construction. With x a replica, c the center and z all other state (outer state,
error memory, accumulators):

- a parameter stays if its name, shape, dtype and policy do: x, c and z are kept to the bit;
- one that leaves takes x ← c, on all ranks, and is a constant from then on; z is dropped;
- one that comes takes x ← x_root, c ← x_root, z ← 0.

Counters and rounds go on. Nothing has changed if the ranks do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvd_periodic.centers.saved_vectors import Saved, SavedVectors
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.outer.stretches import Division, Form, carried
from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.replica import Replica
from hvd_periodic.sync.fragment_plan import SinceLastSync
from hvd_periodic.sync.handshake import Check, Handshake
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.sync.tensor_groups import TensorGroups

V = TypeVar("V")

_UNFINISHED = "before finalize() in asynchronous training or with a quorum"
"""A reason for which adopt() is refused."""

_DIED = "after ranks have died"
"""Another such reason."""

_PARAMETERS = ("parameters", FROM_ROOT)


@dataclass(frozen=True)
class Successor(Generic[V]):
    """The replica of a new set of parameters, with what a front end makes for it.

    Attributes:
        replica: the replica.
        arguments: arguments of the synchronizer that depend on it: ``outer``, ``rates``, ``local_optimizer``.
        form: returns the format in which an outer optimizer saves its state, given that of one fragment and the
            parameters.
    """

    replica: Replica[V]
    arguments: Mapping[str, Any]
    form: Callable[[Any, Any], Form]


def adopt(synchronizer: Any, successor: Callable[[], Successor[V]]) -> None:
    """Go on with the replica of ``successor``; collective.

    Args:
        synchronizer: a :class:`~hvd_periodic.sync.synchronizer.ReplicaSynchronizer`, which is constructed again.
        successor: makes the new set's replica, after the last exchange of the old set.

    Raises:
        RuntimeError: this kind of training cannot adopt, or ranks are in different calls.
        TypeError, ValueError: the new set is refused, or differs between ranks; on all ranks, and nothing has changed.
    """
    synchronizer.center_reader.require_outside_center_block("adopt")
    if synchronizer.membership.communicator.elastic and not synchronizer.commits_hold_sets:
        raise RuntimeError(
            "adopt() is available in elastic jobs of PyTorch only: elsewhere, commits hold the parameters of the "
            "start, and ranks that join make these. Call finalize(), save the model, and start another job that trains "
            "the new set"
        )
    refused = refusal(synchronizer) or ("before a synchronous warmup ends" if synchronizer.warmup.active else None)
    if refused is not None:
        raise RuntimeError(unavailable(refused))
    worker = synchronizer.exchanger.worker
    if worker is not None and worker.any_dead():
        raise RuntimeError(unavailable(_DIED))
    with _without(synchronizer.handshake, synchronizer.replica.changes):
        _exchange_last(synchronizer)
    state = synchronizer.checkpoint.save()
    before = dict(vars(synchronizer))
    together, name = synchronizer.membership.all_ranks, f"{synchronizer.membership.name}.adopt"
    try:
        new = build_on_all(together, name, lambda: _rebuilt(synchronizer, successor))
        build_on_all(together, name, synchronizer.check_agreement)
    except BaseException:
        vars(synchronizer).clear()
        vars(synchronizer).update(before)
        raise
    _carry_over(synchronizer, new, before, state)
    if worker is not None:
        worker.close("adopt()")


def unavailable(where: str) -> str:
    """Return the text of an error, given what :func:`refusal` returned."""
    if where == _UNFINISHED:
        return f"adopt() is not available {where}: call finalize() on all ranks first"
    if where == _DIED:
        return f"adopt() is not available {where}: save the model, and start the job again with the ranks that are left"
    return f"adopt() is not available {where}: finalize(), then make a new optimizer"


def refusal(synchronizer: Any) -> str | None:
    """Return the kind of training that cannot adopt, the same on all ranks; or None."""
    membership, exchanger = synchronizer.membership, synchronizer.exchanger
    refused = {
        _UNFINISHED: exchanger.worker is not None and not (synchronizer.begun and exchanger.worker.finished),
        "where ranks exchange in groups of their own": membership.is_lockstep_group,
        "where gradients are averaged": membership.in_groups or membership.group is not None,
    }
    return next((where for where, here in refused.items() if here), None)


@contextmanager
def _without(handshake: Handshake, check: Check) -> Iterator[None]:
    """Leave out a check of handshakes: that the set of parameters is still the old one."""
    handshake.checks.remove(check)
    try:
        yield
    finally:
        handshake.checks.insert(0, check)


def _exchange_last(synchronizer: Any) -> None:
    """Exchange the old set, unless all of it has just been exchanged, and apply what is in flight.

    In asynchronous training, and with a quorum, finalize() has done so.
    """
    synchronizer.begin(CallPoint.BEFORE_UPDATE)
    handshake, progress = synchronizer.handshake, synchronizer.progress
    counters = progress.counters
    pending = counters.local_steps > counters.last_exchange or any(
        SinceLastSync(*entry).pending for entry in progress.notes.since
    )
    alone = synchronizer.exchanger.worker is not None
    problem = handshake.fatal_error or (unavailable(_UNFINISHED) if alone and pending else None)
    handshake.check_same_call(Purpose.ADOPT, problem or synchronizer.replica.misfit())
    if alone:
        return
    if synchronizer.membership.all_ranks.any(pending):
        synchronizer.exchanger.exchange()
    synchronizer.exchanger.land()


def _rebuilt(synchronizer: Any, successor: Callable[[], Successor[V]]) -> Successor[V]:
    """Construct the synchronizer again, for the new set."""
    arguments, learning_rate = synchronizer.arguments(), synchronizer.learning_rate
    saving, journal = synchronizer.handshake.background_save, synchronizer.journal
    new = successor()
    synchronizer.construct(new.replica, **{**arguments, **new.arguments, "journal": journal})
    synchronizer.learning_rate, synchronizer.handshake.background_save = learning_rate, saving
    return new


def _carry_over(synchronizer: Any, new: Successor[V], before: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Give the new set what the old one had."""
    groups, former = synchronizer.tensor_groups, before["exchanger"].tensor_groups
    old, replica = before["replica"], new.replica
    stays = _staying(former, old, groups, replica)
    _warn_of_changed(synchronizer, former, stays)
    _leave(former, old, stays, state["vectors"])
    _keep(former, groups, replica, stays)
    _come(synchronizer, old, former, stays)
    groups.reset()
    layouts = {group.name: group.values.layout for group in former}
    for group in groups:
        vectors, kept = SavedVectors(group, replica), state["vectors"].get(group.name, {})
        layout = layouts.get(group.name)
        if layout is None or layout.specs != group.values.layout.specs or layout.buckets != group.values.layout.buckets:
            kept = _merged(kept, vectors.save_initial(), stays[group.name])
        vectors.load(kept)
        state["vectors"][group.name] = kept
    of_outer = _outer_state(synchronizer, new, before, state["center_optimizer"], stays)
    synchronizer.exchanger.go_on(before["exchanger"], state, of_outer)
    synchronizer.progress.counters, synchronizer.progress.notes = before["progress"].counters, before["progress"].notes
    synchronizer.checkpoint.run = before["checkpoint"].run
    synchronizer.startup.go_on()


def _merged(kept: Saved, initial: Saved, stays: set[str]) -> Saved:
    """Return the vectors of a new set: as they were where tensors stay, else as at the start of training."""
    return {
        key: {name: kept[key][name] if name in stays and key in kept else value for name, value in tensors.items()}
        for key, tensors in initial.items()
    }


def _named(groups: TensorGroups[V]) -> dict[str, dict[str, Any]]:
    """Return the tensors of all groups, as they were passed, by group and name."""
    return {
        group.name: dict(zip((s.name for s in group.values.layout.specs), group.values.originals(), strict=True))
        for group in groups
    }


def _staying(former: TensorGroups[V], old: Replica[V], groups: TensorGroups[V], new: Replica[V]) -> dict[str, set[str]]:
    """Return the names of the tensors that stay, by group."""
    then, now = _named(former), _named(groups)
    policies = [(old.by_policy.get(p, ()), new.by_policy.get(p, ())) for p in {*old.by_policy, *new.by_policy}]

    def alike(name: str, one: Any, other: Any) -> bool:
        same = tuple(one.shape) == tuple(other.shape) and one.dtype == other.dtype
        return same and all((name in then) == (name in now) for then, now in policies)

    return {
        group: {n for n, tensor in tensors.items() if n in then.get(group, {}) and alike(n, then[group][n], tensor)}
        for group, tensors in now.items()
    }


def _warn_of_changed(synchronizer: Any, former: TensorGroups[V], stays: Mapping[str, set[str]]) -> None:
    """Warn on the root of parameters that have kept their names only."""
    then = {name for group, tensors in _named(former).items() if group in _PARAMETERS for name in tensors}
    now = {name for group, tensors in _named(synchronizer.tensor_groups).items() for name in tensors}
    for name in sorted(then & now - set().union(*stays.values())) if synchronizer.membership.is_root else ():
        synchronizer.membership.log.warning(
            "Parameter %r has another shape, dtype or policy than before adopt(): it starts from the root's value, and "
            "its outer state from zero",
            name,
        )


def _leave(former: TensorGroups[V], old: Replica[V], stays: Mapping[str, set[str]], vectors: Any) -> None:
    """Set parameters that leave to the center."""
    for group, tensors in _named(former).items():
        leaving = [(name, t) for name, t in tensors.items() if name not in stays.get(group, ())]
        if leaving and group in _PARAMETERS:
            _set(old, leaving, vectors[group]["center"])


def _keep(former: TensorGroups[V], groups: TensorGroups[V], replica: Replica[V], stays: Mapping[str, set[str]]) -> None:
    """Keep the values of tensors that stay in other memory than before."""
    then = _named(former)
    for group, tensors in _named(groups).items():
        moved = [(n, t) for n, t in tensors.items() if n in stays[group] and t is not then[group][n]]
        if moved:
            values = _values(former, group)
            _set(replica, moved, values)


def _values(former: TensorGroups[V], name: str) -> dict[str, Any]:
    """Return the values of a group, by name, complex ones as pairs of reals."""
    group = next(each for each in former if each.name == name)
    return dict(zip((spec.name for spec in group.values.layout.specs), group.values.tensors(), strict=True))


def _come(synchronizer: Any, old: Replica[V], former: TensorGroups[V], stays: Mapping[str, set[str]]) -> None:
    """Give all ranks the root's values of tensors that come, exchanged or constant."""
    replica, known = synchronizer.replica, {name for tensors in _named(former).values() for name in tensors}
    coming = [
        (n, t)
        for group, tensors in _named(synchronizer.tensor_groups).items()
        for n, t in tensors.items()
        if n not in stays[group]
    ]
    if replica.constants is not None:
        if old.constants is not None:
            known |= {spec.name for spec in old.constants.layout.specs}
        constants = zip(replica.constants.layout.specs, replica.constants.originals(), strict=True)
        coming += [(spec.name, tensor) for spec, tensor in constants if spec.name not in known]
    if coming:
        send = synchronizer.membership.broadcaster("adopt")
        synchronizer.tensor_groups.send_store(replica.store_of(coming), send)
    replica.follow_weights()


def _set(replica: Replica[V], named: list[tuple[str, Any]], values: Mapping[str, Any]) -> None:
    """Set tensors to values, by name."""
    store = replica.store_of(named)
    held = replica.new_temporary_store(store.layout)
    replica.load(held, {name: values[name] for name, _ in named})
    for bucket in store.layout.buckets:
        store.write(bucket, held.read(bucket))


def _outer_state(
    synchronizer: Any,
    new: Successor[V],
    before: Mapping[str, Any],
    saved: Any,
    stays: Mapping[str, set[str]],
) -> Any:
    """Return this rank's state of the new outer optimizer, which the former one had for the parameters that stay."""
    outer, former = synchronizer.exchanged.outer, before["exchanged"].outer
    exchanger, rank = synchronizer.exchanger, synchronizer.membership.communicator.rank
    if outer is None or former is None or exchanger.own_optimizer_state(saved) is None:
        return None
    then = _division(former, before["exchanger"], new.form)
    now = _division(outer, exchanger, new.form)
    if then.layout.specs == now.layout.specs:
        return exchanger.own_optimizer_state(saved)
    names = {spec.name: i for i, spec in enumerate(then.layout.specs)}
    kept = stays["parameters"]
    numbers = {i: names[spec.name] for i, spec in enumerate(now.layout.specs) if spec.name in kept}
    return carried(saved, then, outer.state(), now, rank, numbers)


def _division(outer: Any, exchanger: Any, form: Callable[[Any, Any], Form]) -> Division:
    divided = isinstance(outer, PerFragmentOptimizer)
    layout = exchanger.tensor_groups.parameters.values.layout
    fragments = exchanger.context.fragments if divided else None
    return Division(layout, fragments, form(outer.parts[0] if divided else outer, layout))
