"""Base classes of the optimizers for TensorFlow 1 graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from inspect import isfunction
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.algorithms.easgd import BETA
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.keras.model import NamedVariables
from hvd_periodic.options import of_exchange
from hvd_periodic.participation import EXCHANGED, PARAMETERS, Average, Broadcast, Local, Present, by_policy
from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.schedules import Schedule
from hvd_periodic.sync.synchronizer import Exchangers
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator, communicator_of
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, branch, control_flow_v1, nothing
from hvd_periodic.tensorflow.contrib_opt.counters import CounterVariables
from hvd_periodic.tensorflow.contrib_opt.exchangers import SessionAsynchronous, SessionOverlapped, SessionSynchronous
from hvd_periodic.tensorflow.contrib_opt.getters import belongs_to_optimizer, decide, parts
from hvd_periodic.tensorflow.contrib_opt.gradient_averaging import SynchronousPhase, plain
from hvd_periodic.tensorflow.contrib_opt.hook import InitializationHook
from hvd_periodic.tensorflow.contrib_opt.initialization import Initialization, SharedCenter
from hvd_periodic.tensorflow.contrib_opt.local_optimizer import SessionOptimizer
from hvd_periodic.tensorflow.contrib_opt.pairs import (
    Pairs,
    check_patterns,
    checked,
    reference_of,
    shown,
    trained_by,
    with_gradient,
)
from hvd_periodic.tensorflow.contrib_opt.rates import SessionRates, learning_rate_of
from hvd_periodic.tensorflow.contrib_opt.replica import (
    CenterOptimizer,
    GraphOuterOptimizer,
    GraphReplica,
    HostCenterOptimizer,
)
from hvd_periodic.tensorflow.contrib_opt.request import Request, spelled_as
from hvd_periodic.tensorflow.contrib_opt.session_startup import ROOT, SessionStartup, initialize_with, untouched_in
from hvd_periodic.tensorflow.contrib_opt.step_end import StepEnd
from hvd_periodic.tensorflow.contrib_opt.turns import SessionTurns, Turn
from hvd_periodic.tensorflow.contrib_opt.unexchanged import UnexchangedVariables, averaged_among
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import on_host
from hvd_periodic.tensorflow.store import ArrayStore
from hvd_periodic.vectors.space import VectorSpace

_COLLECTIONS = tf.compat.v1.GraphKeys

_HOW_TO_START = {
    True: "Have sessions of some ranks alone been initialized or restored again after the first step?",
    False: "Has a session begun without the hook of make_session_run_hook() and without get_init_op()?",
}
"""Likely causes of different centers: without a custom getter, and with one."""


class GraphOptimizer(tf.compat.v1.train.Optimizer):
    """Takes local steps and exchanges every period."""

    BETA = BETA

    def __init__(self, request: Request, use_locking: bool, name: str) -> None:
        super().__init__(use_locking, name)
        options = self._options = request.options
        if isfunction(options["process_set"]):
            raise ValueError(
                "`process_set` must be a process set, a process group or a communicator: groups that a function "
                f"returns are for PyTorch and Keras. Received: {options['process_set']!r}"
            )
        communicator = self._communicator = communicator_of(options["process_set"])
        # The optimizer and its exchanges share one number.
        prefix = communicator.unique_name(options["timeout_seconds"], provisional=True)
        cls = type(self).__name__

        def validate() -> tuple[Algorithm, Any, Schedule, TensorFlowCommunicator | None]:
            if isinstance(request.opt, GraphOptimizer):
                raise TypeError(f"`{cls}` takes no optimizer that exchanges already; those of PyTorch and Keras do")
            return request.validate(cls, communicator)

        found = build_on_all(communicator, prefix, validate)
        self._algorithm, self._moving, self._schedule, self._averaged = found
        self._opt: Any = request.opt
        self._asynchronous = bool(request.asynchronous)
        self._everywhere = self._asynchronous or options["center"] == "replicated"
        self._without_getter = request.getter is None
        getter = request.getter
        self._getter = request.getter_class("", _COLLECTIONS.GLOBAL_VARIABLES) if getter is None else getter
        self._center_optimizer: CenterOptimizer | HostCenterOptimizer | None = None
        self._synchronizers: list[VariableSynchronizer] = []
        self._ends: list[StepEnd] = []
        self._hooks: list[InitializationHook] = []
        until = self._schedule.synchronous_until
        self._counters = CounterVariables(self, self._getter.collection, saved=until is not None)
        asked = communicator if self._without_getter else None
        self._warmup = SynchronousPhase(self._opt, until, self._counters, asked, name)
        self._initialization = Initialization(name, communicator, self._getter, self._counters)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the (gradient, variable) pairs of the wrapped optimizer, which gets these arguments."""
        pairs = self._warmup.compute_gradients(*args, **kwargs)
        exchanged = trained_by(pairs)
        with suppress(ValueError):  # Of a policy that apply_gradients() refuses, on all ranks.
            exchanged = self._exchanged(pairs)
        if self._without_getter:
            self._getter.adopt(exchanged)
        return pairs

    def _exchanged(self, pairs: Pairs) -> list[Any]:
        """Return the variables with a gradient, and the ``"present"`` ones without: other ranks may have one of these.

        The centers and companions that some policies do not need are forgotten.
        """
        policies = self._participation([variable for _, variable in pairs])
        return [v for gradient, v in pairs if gradient is not None or policies[v.op.name] == Present.name]

    def _participation(self, variables: Sequence[Any]) -> dict[str, str]:
        """Return the policies of variables by name; forget the centers and companions that some do not need."""
        given = self._options["parameters"]
        found = {v.op.name: PARAMETERS.policy_of(given, v.op.name, v) or Average.name for v in variables}
        own, following = ([v for v in variables if found[v.op.name] == kind.name] for kind in (Local, Broadcast))
        self._getter.keep_out(own, following)
        return found

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> tf.Operation:
        """Return the operation that takes one local step and, every period, exchanges.

        Args:
            grads_and_vars: pairs as :meth:`compute_gradients` returns them.
            global_step: incremented by one at every exchange; without a custom getter, at every local step.
            name: name of the operation.

        Raises:
            TypeError: an element is not a pair.
            ValueError: no pairs, no gradients, a variable that was not created through the getter, or ranks that
                disagree; on all ranks.
            RuntimeError: ``get_init_op`` was called before; its operation would miss variables.
        """
        communicator = self._communicator
        prefix = communicator.unique_name()

        def construct() -> tuple[Pairs, list[Any], VariableSynchronizer]:
            if self._initialization.times:
                raise RuntimeError(
                    "apply_gradients() after get_init_op(): the init op would miss variables that are created here. "
                    "Call get_init_op() last"
                )
            pairs = checked(grads_and_vars)
            exchanged = self._exchanged(pairs)
            if self._without_getter:
                self._getter.adopt(exchanged)
            else:
                for _, variable in pairs:
                    if variable.ref() not in self._getter.own:
                        reference_of(variable, self._getter)
            self._require_global_step(global_step)
            with spelled_as(type(self).__name__), tf.device(None), self._getter.paused():
                return pairs, exchanged, self._synchronizer(pairs, exchanged, prefix, global_step)

        found = self._getter.found()
        pairs, exchanged, synchronizer = build_on_all(communicator, prefix, construct)
        self._synchronizers.append(synchronizer)
        synchronizer.average_within(self._averaged)
        synchronizer.check_agreement()
        turn = SessionTurns.of(synchronizer.membership)
        self._warmup.turn = turn
        self._initialization.begin_within(synchronizer.membership, turn, global_step)
        with tf.device(None), self._getter.paused():
            self._create_slots_of(exchanged)
            made = [*self.variables(), *(self._getter.made() if self._without_getter else [])]
            self._counters.read_checked(made)
            if self._without_getter:
                initialize_with(found, [*made, *self._counters.made])
            with tf.control_dependencies(self._counters.check):
                waited, updated = self._update(synchronizer, turn, pairs, exchanged)
            with tf.compat.v1.name_scope(name or self._name):
                end = StepEnd(
                    synchronizer,
                    turn,
                    global_step,
                    not self._without_getter,
                    lambda: self._initialization.start_centers(exchanged),
                )
                self._ends.append(end)
                return end.after(waited, updated)

    def _create_slots_of(self, variables: Sequence[Any]) -> None:
        """Create the variables of the wrapped optimizer outside of conditionals; the same ones on all ranks."""
        with tf.init_scope():
            plain(self._opt)._create_slots(variables)
        belongs_to_optimizer(*self._opt.variables())
        if not self._without_getter:
            _keep_local(self._opt.variables())

    def _update(
        self, synchronizer: VariableSynchronizer, turn: Turn, pairs: Pairs, exchanged: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Return the operations that precede the count of a local step, and whether the step updates the replica.

        Without a hook that gives all ranks the same start, the first step does. If it replaces the replica of a rank,
        that rank skips the update, because its gradients belong to the old values.
        """

        def update() -> Assigned:
            return [self._opt.apply_gradients(pairs), *self._seen(synchronizer, pairs, exchanged)]

        if not self._without_getter:
            return update(), True
        slots = {
            self.get_slot(v, name).ref()
            for _, v in pairs
            for name in self.get_slot_names()
            if v.ref() in self._getter.own and self.get_slot(v, name) is not None
        }
        shared = [variable for variable in self.variables() if variable.ref() not in slots]
        own = [*shared, *self._getter.made(), *self._counters.made]
        with tf.control_dependencies([gradient for gradient, _ in with_gradient(pairs)]), control_flow_v1():
            start = SessionStartup(synchronizer, turn, self._getter, own, self._counters.first)
            replaced = start.replaced(lambda: self._initialization.start_centers(exchanged))
            with tf.control_dependencies([replaced]):
                done = tf.cond(replaced, nothing, branch(update))
        return [done], tf.logical_not(replaced)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of the wrapped optimizer."""
        return list(self._opt.get_slot_names())

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer and of the center's optimizer."""
        center = [] if self._center_optimizer is None else self._center_optimizer.variables()
        return [*self._opt.variables(), *center]

    def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver", **kwargs: Any) -> Any:
        """Return a ``tf.compat.v1.train.Saver`` that saves the centers under the names of the trainable variables.

        Args:
            var_list: variables, or a dict by name. Default: all trainable variables.
            name: name of the saver.
            kwargs: arguments of ``Saver``.

        Raises:
            RuntimeError: no variable was created through the getter.
        """
        centers = self._getter.centers
        if not centers:
            raise RuntimeError(
                f"No variable was created through the {type(self._getter).__name__}: create the model first, in a "
                "variable_scope with the getter as its custom_getter"
            )
        chosen = tf.compat.v1.trainable_variables() if var_list is None else var_list
        saved: dict[str, Any] = {}
        for key, variable in chosen.items() if isinstance(chosen, dict) else ((None, v) for v in chosen):
            for part in parts(variable):
                center = centers.get(part.ref(), part)
                slices = part._save_slice_info
                if slices is None:
                    saved[key or part.op.name] = center
                else:
                    saved.setdefault(key or slices.full_name, []).append(center)
        return tf.compat.v1.train.Saver(saved, name=name, **kwargs)

    def _initialize(self) -> tf.Operation:
        """Return the operation that broadcasts the root's centers and sets the local replicas to them."""
        for hook in self._hooks:
            hook.use()
        moved = [] if self._center_optimizer is None else self._center_optimizer.variables()
        with tf.control_dependencies([on_host(self._drop)] if self._options["overlap"] else []):
            started = self._initialization.operation(
                [*self._getter.vectors.values(), *moved] if self._everywhere else []
            )
        return tf.group(*self._compared_after([started], Purpose.START))

    def _drop(self) -> list[int]:
        """Forget the exchanges in flight: the initialization sets the values to which they would be applied."""
        for synchronizer in self._synchronizers:
            if isinstance(synchronizer.exchanger, SessionOverlapped):
                synchronizer.exchanger.drop()
        return []

    def finalize(self) -> None:
        """Wait until all groups of ranks have ended; the hook of ``make_session_run_hook`` does this too.

        The first process that ends shuts Horovod down for all others. Without groups there is nothing to wait for. This
        call ends a run log with the counters of the last exchange; the hook, which has a session, with the final ones.
        """
        for synchronizer in self._synchronizers:
            if synchronizer.journal.begun and not synchronizer.journal.over:
                synchronizer.journal.ended()
        self._communicator.wait_for_job()

    def get_final_op(self) -> tf.Operation:
        """Return the operation that ends asynchronous training.

        It sleeps until all ranks run it, and then stores the final center in the center variables, and its averaged
        statistics, such as those of batch normalization, in the variables of the statistics. In model averaging,
        it first pushes the steps since the last exchange, and stores the final center in the replicas as well. The hook
        of :meth:`make_session_run_hook` runs it at the end of its session; in a plain session, run it after the last
        step.

        Raises:
            RuntimeError: the optimizer is synchronous, or ``apply_gradients`` has not been called.
        """
        shared = self._initialization.shared_centers
        if not shared:
            raise RuntimeError(
                "get_final_op() ends asynchronous training: construct the optimizer with asynchronous=True, and call "
                "apply_gradients() or minimize() first"
            )
        with tf.compat.v1.name_scope(None), tf.device(None):
            pushed = [end.push_rest() for center, end in zip(shared, self._ends, strict=True) if center.hands_out]
            with tf.control_dependencies(pushed):
                finished = _in_turn(center.finish for center in shared)
            with tf.control_dependencies(finished):
                taken = self._initialization.start_from_centers() if pushed else []
            with tf.control_dependencies([*finished, *taken]):
                statistics = chain.from_iterable(end.take_statistics() for end in self._ends)
                return tf.group(*self._told(), *statistics, *taken, name=f"{self._name}.final")

    def get_land_op(self) -> tf.Operation:
        """Return the operation that waits for the exchange in flight and applies it to center and replica.

        All ranks run it before the center is evaluated or saved: no checkpoint holds an exchange in flight. The hook of
        ``make_session_run_hook`` runs it at the end of its session. Without ``overlap`` it does nothing.

        Raises:
            RuntimeError: ``apply_gradients`` has not been called.
        """
        if not self._ends:
            raise RuntimeError("get_land_op() needs a train op: call apply_gradients() or minimize() first")
        with tf.compat.v1.name_scope(None), tf.device(None):
            return tf.group(*self._landed(), name=f"{self._name}.land")

    def get_audit_op(self) -> tf.Operation:
        """Return the operation that checks that all ranks hold the same centers, bit by bit; all ranks run it together.

        They also compare the variables that no exchange touches; the log names those that differ. In asynchronous
        training, which has one center, they compare these variables only.

        Raises:
            RuntimeError: ``apply_gradients`` has not been called.
        """
        if not self._ends:
            raise RuntimeError("get_audit_op() needs a train op: call apply_gradients() or minimize() first")
        with tf.compat.v1.name_scope(None), tf.device(None):
            return tf.group(*_in_turn(end.audit for end in self._ends), name=f"{self._name}.audit")

    def _landed(self) -> list[tf.Operation]:
        return [end.land() for end in self._ends] if self._options["overlap"] else []

    def _told(self) -> list[tf.Operation]:
        """Return the operations that tell the run log that training has ended."""
        pairs = zip(self._synchronizers, self._ends, strict=True)
        return [end.end() for synchronizer, end in pairs if synchronizer.journal.listeners]

    def _get_end_op(self) -> tf.Operation:
        """Return the operation that the hook runs at the end of its session."""
        if self._asynchronous:
            return self.get_final_op()
        with tf.compat.v1.name_scope(None), tf.device(None):
            landed = self._compared_after(self._landed(), Purpose.SESSION_END)
            with tf.control_dependencies(landed):
                return tf.group(*landed, *self._told(), name=f"{self._name}.end")

    def _compared_after(self, operations: list[tf.Operation], purpose: Purpose) -> list[tf.Operation]:
        """Return operations, and the one with which ranks then compare the variables that no exchange touches."""
        if not self._ends:
            return operations
        with tf.compat.v1.name_scope(None), tf.device(None), tf.control_dependencies(operations):
            return [*operations, self._ends[0].compare(purpose)]

    def _hook(self, get_init_op: Callable[[], tf.Operation], is_chief: bool) -> InitializationHook:
        needed, cls = not self._without_getter, type(self).__name__
        hook = InitializationHook(get_init_op, is_chief, self.finalize, self._get_end_op, cls, needed)
        self._hooks.append(hook)
        return hook

    def _require_global_step(self, global_step: Any) -> None:
        """Raise a ValueError if the algorithm needs a global step and there is none."""

    def _seen(self, synchronizer: VariableSynchronizer, pairs: Pairs, exchanged: Sequence[Any]) -> list[Any]:
        """Return the operations that use the gradients of a step before an exchange."""
        unseen = synchronizer.exchanger.presence is None and untouched_in(synchronizer) is None
        return [] if unseen else [shown(synchronizer, pairs, exchanged)]

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        """Return the variables of the algorithm's state by name."""
        keys = ["center"]
        if self._moving is None and (self._everywhere or self._communicator.rank == ROOT):
            keys = list(self._algorithm.init_center(VectorSpace(), np.zeros(1)))
        return {
            f"parameters.{key}": [self._getter.vector(reference.deref(), key) for reference in references]
            for key in keys
        }

    def _synchronizer(
        self, pairs: Pairs, variables: Sequence[Any], prefix: str, global_step: Any
    ) -> VariableSynchronizer:
        policies, buffers = self._participation(variables), self._options["buffers"]
        known = [reference.deref().op.name for reference in (*self._getter.centers, *self._getter.own)]
        others = [*(variable for _, variable in pairs), *tf.compat.v1.trainable_variables()]
        check_patterns(self._options["parameters"], [*dict.fromkeys([*policies, *known])], others)
        unexchanged = UnexchangedVariables(
            self._getter, self._options["parameters"], buffers, global_step, compares=not self._synchronizers
        )
        averaged = averaged_among(self._getter.statistics, buffers, unexchanged.untrained())
        decide(*variables, *averaged)
        positions = [i for i, variable in enumerate(variables) if policies[variable.op.name] in EXCHANGED]
        references = [reference_of(variables[i], self._getter) for i in positions]
        special = by_policy(policies, [(variable.op.name, variable) for variable in variables])
        following = [v for v in variables if v.op.name in special.get(Broadcast.name, ())]
        named = NamedVariables(
            [(variables[i].op.name, variables[i]) for i in positions],
            averaged=[(v.op.name, v) for v in averaged],
            following=[(v.op.name, v) for v in following],
            trained=len(variables),
            positions=positions if len(positions) < len(variables) else None,
            by_policy=special,
        )
        if self._moving is not None and self._center_optimizer is None:
            made = HostCenterOptimizer if self._asynchronous else CenterOptimizer
            self._center_optimizer = made(self._moving)
        local = plain(self._opt)
        vectors = self._vectors(references)
        vectors[f"{FROM_ROOT}.center"] = [self._getter.centers[variable.ref()] for variable in following]
        replica = GraphReplica(named, vectors, self._counters.new_variable, unexchanged)
        moved = self._center_optimizer
        synchronizer = VariableSynchronizer(
            self._counters.new_variable,
            replica,
            self._algorithm,
            self._schedule,
            self._communicator,
            ROOT,
            prefix,
            asynchronous=self._asynchronous,
            use_locking=self._use_locking,
            outer=None if moved is None else GraphOuterOptimizer(moved, named.parameters, replica.values),
            rates=SessionRates(local, len(positions)) if self._algorithm.uses_learning_rate else None,
            local_optimizer=SessionOptimizer(local, named.parameters),
            learning_rate=lambda: learning_rate_of(local),
            exchangers=Exchangers(SessionSynchronous, SessionAsynchronous, SessionOverlapped),
            **of_exchange(self._options),
        )
        untouched = untouched_in(synchronizer)
        if untouched is not None:
            self._initialization.of_rows += chain.from_iterable(s.tensors() for s in untouched.stores().values())
        exchanger: Any = synchronizer.exchanger
        if isinstance(exchanger, SessionAsynchronous):
            centers = [self._getter.centers[reference] for reference in references]
            exchanger.keep(ArrayStore(replica.parameters.layout, centers, replica.values))
            shared = SharedCenter(exchanger, centers, [v for _, v in named.averaged], unexchanged)
            self._initialization.shared_centers.append(shared)
        else:
            exchanger.advice = _HOW_TO_START[self._without_getter]
            for group in synchronizer.tensor_groups.statistics:
                if group.name == FROM_ROOT:  # These start as the parameters do.
                    continue
                self._initialization.buffer_centers += zip(group.center.tensors(), group.values.tensors(), strict=True)
        return synchronizer


class InitializedByTask(GraphOptimizer):
    """Base class of the optimizers whose initialization takes a task index."""

    def get_init_op(self, task_index: int) -> tf.Operation:
        """Return the operation that broadcasts the root's centers and sets the local replicas to them.

        All ranks run it after the initializers; the hook of :meth:`make_session_run_hook` does so.
        """
        return self._initialize()

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> InitializationHook:
        """Return the hook that runs :meth:`get_init_op` when the session is created."""
        return self._hook(lambda: self.get_init_op(task_index), is_chief)


def _keep_local(variables: Sequence[Any]) -> None:
    """Move the variables of the local optimizer from GLOBAL_VARIABLES to LOCAL_VARIABLES."""
    graph = tf.compat.v1.get_default_graph()
    own = {variable.ref() for variable in variables}
    everywhere = graph.get_collection_ref(_COLLECTIONS.GLOBAL_VARIABLES)
    moved = [variable for variable in everywhere if variable.ref() in own]
    everywhere[:] = [variable for variable in everywhere if variable.ref() not in own]
    for variable in moved:
        graph.add_to_collection(_COLLECTIONS.LOCAL_VARIABLES, variable)


def _in_turn(makes: Iterable[Callable[[], tf.Operation]]) -> list[tf.Operation]:
    """Return operations, each of which runs after the one before: all ranks have to be in the same call."""
    made: list[tf.Operation] = []
    for make in makes:
        with tf.control_dependencies(made[-1:]):
            made.append(make())
    return made
