"""Optimizers of TensorFlow 1 graphs whose ranks exchange now and then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import tensorflow as tf

from hvd_periodic.algorithms import AGN, Algorithm, Averaging, Exchange
from hvd_periodic.algorithms.easgd import BETA, ContribEASGD
from hvd_periodic.arguments import require_int
from hvd_periodic.averaged import schedule_around
from hvd_periodic.comm.together import Together
from hvd_periodic.consistency import build_on_all
from hvd_periodic.layout import Layout
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.contrib_opt.beginning import FirstStep, Start
from hvd_periodic.tensorflow.contrib_opt.branches import (
    Assigned,
    Branches,
    TensorStore,
    branch,
    control_flow_v1,
    value_of,
)
from hvd_periodic.tensorflow.contrib_opt.distributed import averaged_by, plain
from hvd_periodic.tensorflow.contrib_opt.getters import (
    AGNCustomGetter,
    CustomGetter,
    ElasticAverageCustomGetter,
    ModelAverageCustomGetter,
    belongs_to_optimizer,
    parts,
)
from hvd_periodic.tensorflow.contrib_opt.hook import InitializationHook
from hvd_periodic.tensorflow.contrib_opt.initialized import (
    initialize_with,
    read_after,
    require_initialized,
)
from hvd_periodic.tensorflow.contrib_opt.replica import (
    CenterOptimizer,
    GraphOuterOptimizer,
    GraphReplica,
    HostCenterOptimizer,
)
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.replica import NamedVariables
from hvd_periodic.tensorflow.space import TensorSpace, in_form_of

Pairs = list[tuple[Any, Any]]
"""(gradient, variable) pairs."""

_COLLECTIONS = tf.compat.v1.GraphKeys
_ROOT = 0

_DESCENDING = (
    tf.compat.v1.train.GradientDescentOptimizer,
    tf.compat.v1.train.MomentumOptimizer,
    tf.compat.v1.train.ProximalGradientDescentOptimizer,
)
"""Optimizers whose step is the learning rate times gradients; all others of TensorFlow 1 rescale them."""

_HOW_TO_START = {
    True: "Have sessions of some ranks alone been initialized or restored again after the first step?",
    False: "Has a session begun without the hook of make_session_run_hook() and without get_init_op()?",
}
"""What may have gone wrong where centers differ at the first exchange: without a custom getter, and with one."""


class _GraphOptimizer(tf.compat.v1.train.Optimizer):
    """What the three optimizers have in common.

    Args:
        opt: the local optimizer.
        num_worker: number of ranks; must be Horovod's.
        getter: the custom getter that created the variables; or None: the variables of the script are the replicas.
        getter_class: the class that the getter has to be of.
        algorithm: makes the algorithm, or raises.
        period: local steps between exchanges, by the name of its argument.
        buffers: ``"average"`` or ``"local"``.
        use_locking: whether asynchronous exchanges in shared memory exclude each other.
        name: of the optimizer.
        asynchronous: exchange without waiting for other ranks.
        process_set: the ranks that exchange.
    """

    BETA = BETA

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        getter: CustomGetter | None,
        getter_class: type[CustomGetter],
        algorithm: Callable[[], Algorithm],
        period: tuple[str, int | Schedule],
        buffers: str,
        use_locking: bool,
        name: str,
        asynchronous: bool = False,
        process_set: Any = None,
    ) -> None:
        super().__init__(use_locking, name)
        self._communicator = TensorFlowCommunicator(process_set)
        prefix = self._communicator.unique_name()

        def check() -> tuple[Algorithm, Schedule, TensorFlowCommunicator | None]:
            cls = type(self).__name__
            if not isinstance(opt, tf.compat.v1.train.Optimizer):
                raise TypeError(
                    f"`{cls}` wraps a tf.compat.v1.train.Optimizer; for Keras optimizers there is "
                    f"hvd_periodic.tensorflow.{cls}. Received: {type(opt).__name__}"
                )
            if isinstance(opt, _GraphOptimizer):
                raise TypeError(f"`{cls}` takes no optimizer that exchanges already; those of PyTorch and Keras do")
            if not isinstance(getter, getter_class) and getter is not None:
                raise TypeError(f"`{cls}` needs a {getter_class.__name__}. Received: {type(getter).__name__}")
            if asynchronous and getter is None:
                raise ValueError(
                    f"asynchronous=True needs a {getter_class.__name__}, and the hook of make_session_run_hook() or "
                    "get_init_op(), which make the center. Received: None"
                )
            if require_int(num_worker, "`num_worker`", minimum=1) != self._communicator.size:
                raise ValueError(
                    f"`num_worker` must be the number of Horovod ranks that exchange, {self._communicator.size}: pass "
                    f"hvd.size(), or that of the process set. Received: num_worker={num_worker!r}"
                )
            if buffers not in ("average", "local"):
                raise ValueError(f"`buffers` must be 'average' or 'local'. Received: buffers={buffers!r}")
            planned = as_schedule(period[1], period[0])
            made = algorithm()
            (made.one_by_one if asynchronous else made.check)(self._communicator.size)
            averaged = averaged_by(opt)
            return made, schedule_around(averaged, self._communicator, planned, asynchronous), averaged

        self._algorithm, self._schedule, self._averaged = build_on_all(self._communicator, prefix, check)
        self._opt: Any = opt
        self._adopts = getter is None
        self._getter = getter_class("", _COLLECTIONS.GLOBAL_VARIABLES) if getter is None else getter
        self._local_steps: tf.Variable | None = None
        self._initialized: list[tf.Operation] = []
        self._counters: list[tf.Variable] = []
        self._read_after: set[Any] = set()
        self._positions: list[tf.Variable] = []
        self._buffers = buffers
        self._global_step: Any = None
        self._center_optimizer: CenterOptimizer | HostCenterOptimizer | None = None
        self._asynchronous = bool(asynchronous)
        self._shared: list[_SharedCenter] = []
        self._together: Together | None = None
        self._buffer_centers: list[tuple[tf.Variable, Any]] = []
        self._initializations = 0

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the (gradient, variable) pairs of the wrapped optimizer, whose arguments these are."""
        begun = self._begun()
        if begun is None or self._averaged is None:
            pairs = list(self._opt.compute_gradients(*args, **kwargs))
        else:
            pairs = self._averaged_until(begun, plain(self._opt).compute_gradients(*args, **kwargs))
        if self._adopts:
            self._getter.adopt(variable for gradient, variable in pairs if gradient is not None)
        return pairs

    @property
    def _switch(self) -> int | None:
        """The local step until which gradients are averaged over all ranks instead; None if there is no such step."""
        return self._schedule.synchronous_until

    def _counted(self) -> tf.Variable:
        """Return the variable that counts the local steps of the next minimization, before there is a synchronizer."""
        if self._local_steps is None:
            # In checkpoints, unlike other counters, where training must not fall back into a synchronous phase.
            collection = _COLLECTIONS.GLOBAL_VARIABLES if self._switch is not None else self._getter.collection
            self._local_steps = self._create("local_step", (), tf.int64, 0, collection)
            if self._switch is not None:
                self._positions.append(self._local_steps)
            self._initialized.append(require_initialized(self._local_steps, type(self).__name__))
            self._first = FirstStep(self._local_steps)
        return self._local_steps

    def _start_centers(self, variables: Sequence[Any]) -> Assigned:
        """Let centers start where the replicas are; a script may have restored these alone, as for fine-tuning."""
        assigned: Assigned = []
        for variable in variables:
            center = self._getter.centers[variable.ref()]
            value = tf.cast(value_of(variable), center.dtype.base_dtype)
            assigned.append(center.assign(value))
            if variable.ref() in self._getter.companions:
                assigned.append(self._getter.companions[variable.ref()].assign(self._first_companion(value)))
        return assigned

    def _begun(self) -> tf.Tensor | None:
        """Return whether the local steps after a synchronous phase have begun; None if there is no such phase."""
        if self._switch is None:
            return None
        counted = self._counted()
        if not self._adopts:
            return counted >= self._switch
        with tf.control_dependencies(self._initialized[-1:]):  # The root alone may have restored its steps.
            name = f"{self._name}.{counted.op.name}"
            steps = self._first.steps_of_all(lambda own: self._communicator.broadcast(own, name, _ROOT))
        return steps >= self._switch

    def _averaged_until(self, begun: tf.Tensor, pairs: Pairs) -> Pairs:
        """Return pairs whose gradients the DistributedOptimizer inside averages as long as no local step has begun."""
        present = [pair for pair in pairs if pair[0] is not None]
        gradients, variables = [gradient for gradient, _ in present], [variable for _, variable in present]
        means: list[Any] = []

        def mean() -> list[Any]:
            means[:] = self._opt._allreduce_grads(gradients, variables)
            return means

        def leave() -> list[Any]:
            return [in_form_of(form, gradient) for form, gradient in zip(means, gradients, strict=True)]

        if not gradients:
            return pairs
        chosen = iter(tf.cond(tf.logical_not(begun), mean, leave))
        return [(gradient if gradient is None else next(chosen), variable) for gradient, variable in pairs]

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> tf.Operation:
        """Return the operation that takes one local step and, every period, exchanges.

        Args:
            grads_and_vars: pairs as :meth:`compute_gradients` returns them.
            global_step: incremented by one at every exchange; without a custom getter, at every local step.
            name: of the operation.

        Raises:
            TypeError: pairs that are none.
            ValueError: no pairs, no gradients, a variable that was not created through the getter, or ranks that
                disagree; on all ranks.
            RuntimeError: the operation of ``get_init_op`` exists already, and would miss variables.
        """
        communicator = self._communicator
        prefix = communicator.unique_name()

        def construct() -> tuple[Pairs, VariableSynchronizer]:
            if self._initializations:
                raise RuntimeError(
                    "apply_gradients() after get_init_op(): the init op would miss variables that are created here. "
                    "Call get_init_op() last"
                )
            pairs = self._checked(grads_and_vars)
            self._require_global_step(global_step)
            return pairs, self._synchronizer([v for g, v in pairs if g is not None], prefix)

        found = self._getter.found()
        pairs, synchronizer = build_on_all(communicator, prefix, construct)
        synchronizer.average_within(self._averaged)
        synchronizer.check_agreement()
        self._together = synchronizer.together
        self._global_step = global_step
        with tf.device(None), self._getter.paused():
            self._create_slots_of(pairs)
            made = [*self.variables(), *(self._getter.made() if self._adopts else [])]
            read_after(self._initialized[-1], [v for v in made if v.ref() not in self._read_after])
            self._read_after |= {v.ref() for v in made}
            if self._adopts:
                initialize_with(found, [*made, *self._counters])
            with tf.control_dependencies(self._initialized[-1:]):
                waited, updated = self._update(synchronizer, pairs)
            with tf.compat.v1.name_scope(name or self._name):
                return self._count_and_exchange(synchronizer, waited, updated, global_step)

    def _create_slots_of(self, pairs: Pairs) -> None:
        """Create what the wrapped optimizer, and that of the center, need: before conditionals do."""
        trained = [variable for gradient, variable in pairs if gradient is not None]
        with tf.init_scope():
            plain(self._opt)._create_slots(trained)
        belongs_to_optimizer(*self._opt.variables())
        if not self._adopts:
            self._keep_slots_local()
        if isinstance(self._center_optimizer, CenterOptimizer):
            self._center_optimizer.create([self._getter.centers[variable.ref()] for variable in trained])
            belongs_to_optimizer(*self._center_optimizer.variables())

    def _update(self, synchronizer: VariableSynchronizer, pairs: Pairs) -> tuple[list[Any], Any]:
        """Return what has to have happened before a local step is counted, and whether that is one with an update.

        Without a hook that starts all ranks alike, the first step does: one whose gradients are of other values than it
        then has leaves out the update.
        """

        def update() -> Assigned:
            return [self._opt.apply_gradients(pairs), *self._accumulate(synchronizer, pairs)]

        if not self._adopts:
            return update(), True
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        own = [*self.variables(), *self._getter.made(), *self._counters]
        with tf.control_dependencies([gradient for gradient, _ in present]), control_flow_v1():
            start = Start(synchronizer, self._getter, own, self._first)
            replaced = start.replaced(lambda: self._start_centers([variable for _, variable in present]))
            with tf.control_dependencies([replaced]):
                done = tf.cond(replaced, lambda: tf.constant(False), branch(update))
        return [done], tf.logical_not(replaced)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of the wrapped optimizer."""
        return list(self._opt.get_slot_names())

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer and of the one that moves the center."""
        center = [] if self._center_optimizer is None else self._center_optimizer.variables()
        return [*self._opt.variables(), *center]

    def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver", **kwargs: Any) -> Any:
        """Return a ``tf.compat.v1.train.Saver`` that saves the centers under the names of the trainable variables.

        Args:
            var_list: variables, or a dict by name. Default: all trainable variables.
            name: of the saver.
            kwargs: for ``Saver``.

        Raises:
            RuntimeError: no variable was created through the getter.
        """
        if not self._getter.centers:
            raise RuntimeError(
                f"No variable was created through the {type(self._getter).__name__}: create the model first, in a "
                "variable_scope with the getter as its custom_getter"
            )
        chosen = tf.compat.v1.trainable_variables() if var_list is None else var_list
        saved: dict[str, Any] = {}
        for key, variable in chosen.items() if isinstance(chosen, dict) else ((None, v) for v in chosen):
            for part in parts(variable):
                center = self._getter.centers.get(part.ref(), part)
                slices = part._save_slice_info
                if slices is None:
                    saved[key or part.op.name] = center
                else:
                    saved.setdefault(key or slices.full_name, []).append(center)
        return tf.compat.v1.train.Saver(saved, name=name, **kwargs)

    def _initialize(self) -> tf.Operation:
        """Give all ranks the root's centers and global step, then let everything local start from the center."""
        getter, self._initializations = self._getter, self._initializations + 1
        shared = [*getter.centers.values(), *getter.statistics, *self._positions]
        if self._center_optimizer is not None:
            shared += self._center_optimizer.variables()
        if self._global_step is not None:
            shared.append(self._global_step)
        name = f"{self._name}.initialize.{self._initializations}"
        with tf.compat.v1.name_scope(None), tf.device(None):
            with tf.control_dependencies(self._initialized):
                written = [center.write() for center in self._shared]
            with tf.control_dependencies([*self._initialized, *written]):
                received = [
                    variable.assign(self._from_root(variable.read_value(), f"{name}.{i}"))
                    for i, variable in enumerate(shared)
                ]
            with tf.control_dependencies(received):
                assigned = [
                    center.assign(tf.cast(value_of(statistic), center.dtype))
                    for center, statistic in self._buffer_centers
                ]
                for reference, center in getter.centers.items():
                    local, value = reference.deref(), value_of(center)
                    assigned.append(local.assign(tf.cast(value, local.dtype.base_dtype)))
                    if reference in getter.companions:
                        assigned.append(getter.companions[reference].assign(self._first_companion(value)))
            return tf.group(*assigned, name=name)

    def _from_root(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Return the root's value: first those who exchange with it get it, then the others of their groups."""
        value = self._communicator.broadcast(value, name, _ROOT)
        together = self._together
        if together is not None and together.group is not None:
            value = together.group.broadcast(value, f"{name}.group", together.group_root)
        return value

    def finalize(self) -> None:
        """Wait until all groups of ranks have come to their end; the hook of ``make_session_run_hook`` does it too.

        The first process that ends takes Horovod from all others. Outside of groups there is nothing to wait for.
        """
        self._communicator.wait_for_job()

    def get_final_op(self) -> tf.Operation:
        """Return the operation that ends asynchronous training.

        It waits, asleep, until all ranks run it, and puts the final center into the center variables. The hook of
        :meth:`make_session_run_hook` runs it at the end of its session; in a plain session run it after the last step.

        Raises:
            RuntimeError: the optimizer is synchronous, or ``apply_gradients`` has not been called.
        """
        if not self._shared:
            raise RuntimeError(
                "get_final_op() ends asynchronous training: construct the optimizer with asynchronous=True, and call "
                "apply_gradients() or minimize() first"
            )
        with tf.compat.v1.name_scope(None), tf.device(None):
            return tf.group(*(center.finish() for center in self._shared), name=f"{self._name}.final")

    def _hook(self, get_init_op: Callable[[], tf.Operation], is_chief: bool) -> InitializationHook:
        final = self.get_final_op if self._asynchronous else None
        return InitializationHook(get_init_op, is_chief, self.finalize, final)

    def _first_companion(self, center: tf.Tensor) -> tf.Tensor:
        """Return what the second variable per trainable variable starts from."""
        return center

    def _require_global_step(self, global_step: Any) -> None:
        """Raise a ValueError if the algorithm needs one and there is none."""

    def _accumulate(self, synchronizer: VariableSynchronizer, pairs: Pairs) -> list[Any]:
        """Return what has to have happened with the gradients before an exchange."""
        return []

    def _before_exchange(self, references: Sequence[Any]) -> Assigned:
        """Return what else is assigned first at an exchange of some variables."""
        return []

    def _as_read(self, references: Sequence[Any], layout: Layout) -> TensorStore | None:
        """Return where the center is kept as an asynchronous exchange has read it, if that is no state anyway."""
        return None

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        """Return the variables of the algorithm's state by name."""
        return {"parameters.center": [self._getter.centers[reference] for reference in references]}

    def _checked(self, grads_and_vars: Any) -> Pairs:
        pairs = list(grads_and_vars)
        if not pairs:
            raise ValueError("`grads_and_vars` is empty: there are no variables to train")
        for pair in pairs:
            if not _is_pair(pair):
                raise TypeError(
                    f"`grads_and_vars` must hold (gradient, variable) pairs. Received: {type(pair).__name__}, {pair!r}"
                )
        if all(gradient is None for gradient, _ in pairs):
            raise ValueError(f"There is no gradient for any variable: {[v.name for _, v in pairs]}")
        if self._adopts:
            self._getter.adopt(variable for gradient, variable in pairs if gradient is not None)
        for gradient, variable in pairs:
            if gradient is not None or not self._adopts:
                self._reference(variable)
        return pairs

    def _reference(self, variable: Any) -> Any:
        """Return the key of a variable in the getter's dicts."""
        if variable.ref() not in self._getter.centers:
            raise ValueError(
                f"Variable {variable.op.name!r} was not created through the {type(self._getter).__name__} and has no "
                "center: create it by tf.compat.v1.get_variable in a variable_scope with the getter as its "
                "custom_getter, or leave it out of var_list"
            )
        return variable.ref()

    def _synchronizer(self, variables: Sequence[Any], prefix: str) -> VariableSynchronizer:
        references = [self._reference(variable) for variable in variables]
        named = NamedVariables(
            [(variable.op.name, variable) for variable in variables],
            averaged=[(v.op.name, v) for v in self._getter.statistics] if self._buffers == "average" else [],
        )
        if self._algorithm.needs_outer_optimizer and self._center_optimizer is None:
            made = HostCenterOptimizer if self._asynchronous else CenterOptimizer
            self._center_optimizer = made(plain(self._opt))
        replica = GraphReplica(named, self._vectors(references), self._new_variable)
        moved = self._center_optimizer
        synchronizer = VariableSynchronizer(
            self._new_variable,
            replica,
            self._algorithm,
            self._schedule,
            self._communicator,
            _ROOT,
            prefix,
            "replicated",
            self._asynchronous,
            self._use_locking,
            None if moved is None else GraphOuterOptimizer(moved, named.parameters),
            learning_rate=lambda: learning_rate_of(plain(self._opt)),
        )
        synchronizer.how_to_start = _HOW_TO_START[self._adopts]
        if self._asynchronous:
            centers = [self._getter.centers[reference] for reference in references]
            self._shared.append(_SharedCenter(synchronizer, centers, [v for _, v in named.averaged]))
            synchronizer.as_left = self._shared[-1].centers
            synchronizer.as_read = self._as_read(references, synchronizer.parts[0].values.layout)
        for part in [] if self._asynchronous else synchronizer.parts[1:]:
            pairs = zip(part.center.tensors(), part.values.tensors(), strict=True)
            self._buffer_centers += pairs
        return synchronizer

    def _new_variable(self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
        if name == "local_steps":
            made, self._local_steps = self._counted(), None
            return made
        return self._create(f"{self._name}/{name}", shape, dtype, initial_value, self._getter.collection)

    def _create(
        self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any, collection: str
    ) -> tf.Variable:
        with tf.compat.v1.name_scope(None), tf.device(None):
            made = tf.compat.v1.Variable(
                lambda: tf.fill(tuple(shape), tf.cast(initial_value, dtype)),
                trainable=False,
                collections=[collection],
                name=name,
                use_resource=True,
            )
        belongs_to_optimizer(made)
        self._counters.append(made)
        return made

    def _keep_slots_local(self) -> None:
        """Move what the wrapped optimizer keeps of the local replicas from the global to the local variables."""
        graph = tf.compat.v1.get_default_graph()
        own = {variable.ref() for variable in self._opt.variables()}
        everywhere = graph.get_collection_ref(_COLLECTIONS.GLOBAL_VARIABLES)
        moved = [variable for variable in everywhere if variable.ref() in own]
        everywhere[:] = [variable for variable in everywhere if variable.ref() not in own]
        for variable in moved:
            graph.add_to_collection(_COLLECTIONS.LOCAL_VARIABLES, variable)

    def _count_and_exchange(
        self, synchronizer: VariableSynchronizer, waited: Sequence[Any], updated: Any, global_step: Any
    ) -> tf.Operation:
        """Count a local step after ``waited``, and whether it ``updated``; exchange if it is the period's last."""
        replica: GraphReplica = synchronizer.replica
        mirrors: Sequence[Any] = [store for store in (synchronizer.as_read, synchronizer.as_left) if store is not None]
        branches = Branches([*replica.stores, *mirrors])
        references = [variable.ref() for _, variable in replica.named.parameters]

        def exchange() -> Assigned:
            with tf.control_dependencies(self._before_exchange(references)):
                assigned = self._exchange(synchronizer, branches)
                if global_step is not None and not self._adopts:
                    assigned.append(global_step.assign_add(tf.ones([], global_step.dtype.base_dtype)))
                return assigned

        def center_follows(action: Callable[[], Any]) -> Callable[[], Assigned]:
            def follow() -> Assigned:
                with tf.control_dependencies(branches.on_values(action)):
                    return [tf.no_op(), *self._before_exchange(references)]

            return follow

        def nothing() -> tf.Tensor:
            return tf.constant(False)

        if self._adopts and global_step is not None:  # A Horovod script knows steps, not rounds.
            with tf.control_dependencies(waited):
                waited = [global_step.assign_add(tf.ones([], global_step.dtype.base_dtype))]
        with tf.control_dependencies(waited):
            due = tf.function(synchronizer.count, autograph=False)(updated)
        with control_flow_v1():
            followed = [due]
            if synchronizer.synchronous_until is not None:
                with tf.control_dependencies([due]):
                    remaining = synchronizer.steps_to_switch()
                followed = [
                    tf.cond(remaining > 0, branch(center_follows(synchronizer.reset_center)), nothing),
                    tf.cond(tf.equal(remaining, 0), branch(center_follows(synchronizer.restart_center)), nothing),
                ]
            with tf.control_dependencies(followed):
                due = tf.identity(due)
            return tf.group(tf.cond(due, branch(exchange), nothing))

    def _exchange(self, synchronizer: VariableSynchronizer, branches: Branches) -> Assigned:
        """Return what an exchange assigns."""
        optimizer, outer = self._center_optimizer, synchronizer.outer
        part: Any = synchronizer.parts[0]
        if not isinstance(optimizer, CenterOptimizer) or not isinstance(outer, GraphOuterOptimizer):
            return branches.on_values(synchronizer.sync)
        alone = Exchange(self._communicator.size, period=1)  # Following a center that an optimizer moved asks no more.

        def exchange() -> Sequence[Any]:
            synchronizer.sync()
            return list(outer.gradients)

        def pull() -> None:
            for bucket in part.values.layout.buckets:
                part.take(bucket, part.center.read(bucket), alone)

        return branches.around_center_optimizer(
            exchange,
            lambda gradients: optimizer.apply(gradients, part.center.variables),
            part.center,
            pull,
            [part.values, *part.worker.values()],
        )


class _InitializedByTask(_GraphOptimizer):
    """The optimizers whose initialization is asked for by task."""

    def get_init_op(self, task_index: int) -> tf.Operation:
        """Return the operation that gives all ranks the root's centers, and starts the local replicas from them.

        All ranks run it, after the initializers; the hook of :meth:`make_session_run_hook` does.
        """
        return self._initialize()

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> InitializationHook:
        """Return the hook that runs :meth:`get_init_op` when the session is created."""
        return self._hook(lambda: self.get_init_op(task_index), is_chief)


class ElasticAverageOptimizer(_InitializedByTask):
    """Elastic averaging of the local replicas; see :class:`hvd_periodic.EASGD` for the equations.

    Every rank takes ``communication_period`` local steps; then all exchange once, synchronously by default.

    Args:
        opt: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        ea_custom_getter: the getter that the model was created with; or None, for scripts that know none: their own
            trainable variables are the replicas, and what else there is, is among the global variables. Ranks that
            ``hvd.broadcast_global_variables(0)`` has not started alike take over the root's at the first step.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default 0.9/(τ n), that of ``tf.contrib.opt``.
        rho: strength ρ ≥ 0 of the elastic term, which :meth:`compute_gradients` and ``minimize`` add; in
            1/(learning rate). Default: ``moving_rate`` over the learning rate of ``opt``, as in ``tf.contrib.opt``,
            with a warning where ``opt`` rescales gradients, as Adam does; 0 without a getter.
        use_locking: in asynchronous exchange through shared memory, whether reading and adding exclude those of other
            ranks; without it, additions that collide may be lost. Otherwise nothing is written concurrently.
        synchronous: accepted; all ranks start together.
        name: of the optimizer.
        buffers: ``"average"``: variables of the getter that are not trainable, such as moving averages of batch
            normalization, become their mean over ranks at every exchange; ``"local"``: they are left alone.
        asynchronous: exchange with one center on its own clock, without waiting for other ranks, as ``tf.contrib.opt``
            does; needs MPI. The center variables hold the center as this rank last left it, and the final one after
            :meth:`get_final_op`. The rate is in (0, 1].

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` that is not Horovod's size; no ``rho``
            where the learning rate is not a number.
        RuntimeError: Horovod is not initialized.

    Example::

        getter = ElasticAverageCustomGetter("")
        with tf.compat.v1.variable_scope("", custom_getter=getter):
            loss = model()
            optimizer = ElasticAverageOptimizer(
                tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), hvd.size(), getter, communication_period=10
            )
        train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_or_create_global_step())
        hooks = [optimizer.make_session_run_hook(is_chief=hvd.rank() == 0, task_index=hvd.rank())]

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        ea_custom_getter: ElasticAverageCustomGetter | None,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        rho: float | None = None,
        use_locking: bool = True,
        synchronous: bool = False,
        name: str = "ElasticAverageOptimizer",
        *,
        buffers: str = "average",
        asynchronous: bool = False,
        process_set: Any = None,
    ) -> None:
        def algorithm() -> ContribEASGD:
            made = ContribEASGD(moving_rate)
            if rho is not None:
                return replace(made, rho=rho)
            if ea_custom_getter is None:
                return made
            if made.moving_rate is None and callable(communication_period):
                raise ValueError(
                    "`rho` has no default, which would be moving_rate / learning_rate, where the default of "
                    "`moving_rate` follows a schedule: pass `rho`, 0.0 for no elastic term"
                )
            period = 1 if callable(communication_period) else communication_period
            rate = made.rate(Exchange(num_worker, period))
            return replace(made, rho=_default_rho(rate, plain(opt)))

        super().__init__(
            opt,
            num_worker,
            ea_custom_getter,
            ElasticAverageCustomGetter,
            algorithm,
            ("communication_period", communication_period),
            buffers,
            use_locking,
            name,
            asynchronous,
            process_set,
        )

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> Pairs:
        """Return (gradient, variable) pairs of ``loss + ρ/2 ‖x − lc‖²``, with the center as last read lc.

        A variable that was not created through the getter has no such term; :meth:`apply_gradients` refuses it, on all
        ranks.
        """
        pairs = super().compute_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        if not self._algorithm.uses_gradients:
            return pairs
        # Without a getter the first step ever sets the centers, to what the replicas are.
        since = max(self._switch or 0, int(self._adopts))
        if not since:
            return [(self._elastic(g, variable), variable) for g, variable in pairs]
        counted = self._counted()
        with tf.control_dependencies(self._initialized[-1:]):
            begun = counted.read_value() >= since
            elastic = [(self._elastic(g, variable), variable) for g, variable in pairs]
        return [(g if g is None else tf.where(begun, e, g), v) for (e, v), (g, _) in zip(elastic, pairs, strict=True)]

    def _before_exchange(self, references: Sequence[Any]) -> Assigned:
        if self._algorithm.uses_gradients:  # Then it is part of the algorithm's state.
            return []
        return [self._getter.companions[key].assign(value_of(self._getter.centers[key])) for key in references]

    def _as_read(self, references: Sequence[Any], layout: Layout) -> TensorStore | None:
        if self._algorithm.uses_gradients:
            return None
        return TensorStore(layout, [self._getter.companions[reference] for reference in references])

    def _elastic(self, gradient: Any, variable: Any) -> Any:
        if gradient is None or variable.ref() not in self._getter.companions:
            return gradient
        read = {"local_center": self._getter.companions[variable.ref()].read_value()}
        return self._algorithm.local(TensorSpace(), variable, gradient, read)[0]

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        companions = [self._getter.companions[reference] for reference in references]
        return super()._vectors(references) | {"parameters.local_center": companions}


class ModelAverageOptimizer(_GraphOptimizer):
    """Model averaging of the local replicas; see :class:`hvd_periodic.Averaging` for the equation.

    Args:
        opt: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        is_chief: accepted; all ranks update their own copy of the center.
        ma_custom_getter: the getter that the model was created with; or None, for scripts that know none: their own
            trainable variables are the replicas, and what else there is, is among the global variables. Ranks that
            ``hvd.broadcast_global_variables(0)`` has not started alike take over the root's at the first step.
        interval_steps: local steps between exchanges (τ), or a schedule.
        use_locking: accepted; in a synchronous exchange nothing is written concurrently.
        name: of the optimizer.
        buffers: as in :class:`ElasticAverageOptimizer`.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` that is not Horovod's size.
        RuntimeError: Horovod is not initialized.

    References:
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        is_chief: bool,
        ma_custom_getter: ModelAverageCustomGetter | None,
        interval_steps: int | Schedule = 100,
        use_locking: bool = True,
        name: str = "ModelAverageOptimizer",
        *,
        buffers: str = "average",
        process_set: Any = None,
    ) -> None:
        super().__init__(
            opt,
            num_worker,
            ma_custom_getter,
            ModelAverageCustomGetter,
            Averaging,
            ("interval_steps", interval_steps),
            buffers,
            use_locking,
            name,
            process_set=process_set,
        )
        self._is_chief = is_chief

    def get_init_op(self) -> tf.Operation:
        """Return the operation that gives all ranks the root's centers, and starts the local replicas from them.

        All ranks run it, after the initializers; the hook of :meth:`make_session_run_hook` does.
        """
        return self._initialize()

    def make_session_run_hook(self) -> InitializationHook:
        """Return the hook that runs :meth:`get_init_op` when the session is created."""
        return self._hook(self.get_init_op, self._is_chief)

    def _require_global_step(self, global_step: Any) -> None:
        if global_step is None:
            raise ValueError(
                "`global_step` is needed for model averaging: pass tf.compat.v1.train.get_or_create_global_step()"
            )


class AGNOptimizer(_InitializedByTask):
    """Accumulated gradient normalization; see :class:`hvd_periodic.AGN` for the equations.

    A copy of the local optimizer, with slots of its own, moves the center.

    Args:
        optimizer: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        custom_getter: the getter that the model was created with; or None, for scripts that know none: their own
            trainable variables are the replicas, and what else there is, is among the global variables. Ranks that
            ``hvd.broadcast_global_variables(0)`` has not started alike take over the root's at the first step.
        communication_period: local steps between exchanges (τ), or a schedule.
        use_locking: in asynchronous exchange through shared memory, whether reading and adding exclude those of other
            ranks; without it, additions that collide may be lost. Otherwise nothing is written concurrently.
        name: of the optimizer.
        buffers: as in :class:`ElasticAverageOptimizer`.
        asynchronous: as in :class:`ElasticAverageOptimizer`; the center's optimizer, whose hyper-parameters have to be
            numbers, starts anew with every process.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` that is not Horovod's size.
        RuntimeError: Horovod is not initialized.

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    def __init__(
        self,
        optimizer: Any,
        num_worker: int,
        custom_getter: AGNCustomGetter | None,
        communication_period: int | Schedule = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
        *,
        buffers: str = "average",
        asynchronous: bool = False,
        process_set: Any = None,
    ) -> None:
        super().__init__(
            optimizer,
            num_worker,
            custom_getter,
            AGNCustomGetter,
            AGN,
            ("communication_period", communication_period),
            buffers,
            use_locking,
            name,
            asynchronous,
            process_set,
        )

    def _first_companion(self, center: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(center)

    def _accumulate(self, synchronizer: VariableSynchronizer, pairs: Pairs) -> list[Any]:
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        graph = tf.compat.v1.get_default_graph()

        def count(*shown: Any) -> tf.Tensor:
            synchronizer.prepare_gradients(shown)
            return tf.constant(True)

        def add() -> Assigned:
            before = len(graph.get_operations())
            for gradient, variable in present:
                accumulator = self._getter.companions[variable.ref()]
                self._algorithm.local(TensorSpace(), variable, gradient, {"gradient": accumulator})
            return graph.get_operations()[before:]

        counted = tf.function(count, autograph=False)(*(gradient for gradient, _ in present))
        if synchronizer.synchronous_until is None:
            return [counted, *add()]
        with control_flow_v1():
            begun = synchronizer.steps_to_switch() <= 0
            return [counted, tf.cond(begun, branch(add), lambda: tf.constant(False))]

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        accumulators = [self._getter.companions[reference] for reference in references]
        return super()._vectors(references) | {"parameters.gradient": accumulators}


class _SharedCenter:
    """The operations of an asynchronous center that are not part of a step.

    Args:
        synchronizer: whose center it is.
        centers: the variables of this rank that stand for the center of the parameters.
        statistics: the variables that are averaged.

    Attributes:
        centers: the center variables as a store of whole buckets.
    """

    def __init__(
        self, synchronizer: VariableSynchronizer, centers: Sequence[tf.Variable], statistics: Sequence[tf.Variable]
    ) -> None:
        if synchronizer.asynchronous is None:
            raise ValueError("The synchronizer is not asynchronous")
        self._worker = synchronizer.asynchronous
        self._rank = synchronizer.communicator.rank
        self.centers = TensorStore(synchronizer.parts[0].values.layout, centers)
        self._stores = [self.centers]
        if statistics:
            self._stores.append(TensorStore(synchronizer.parts[1].values.layout, statistics))

    def write(self) -> tf.Operation:
        """Return the operation that lets the root set the center to the values of the variables."""
        if self._rank != _ROOT:
            return tf.no_op()
        for store in self._stores:
            store.load_variables()
        values = [store.read(bucket) for store in self._stores for bucket in store.layout.buckets]

        def write(*buckets: tf.Tensor) -> tf.Tensor:
            self._worker.wake()
            self._worker.transport.write(bucket.numpy() for bucket in buckets)
            return tf.constant(True)

        with tf.device("CPU:0"):
            return tf.py_function(write, values, tf.bool).op

    def finish(self) -> tf.Operation:
        """Return the operation that waits for all ranks and reads the final center."""
        buckets = self.centers.layout.buckets

        def finish() -> list[Any]:
            self._worker.finish()
            return [self._worker.final(index) for index in range(len(buckets))]

        with tf.device("CPU:0"):
            values = tf.py_function(finish, [], [tf.as_dtype(bucket.kind) for bucket in buckets])

        self.centers.load_variables()
        for bucket, value in zip(buckets, values, strict=True):
            self.centers.write(bucket, tf.ensure_shape(value, [bucket.size]))
        return tf.group(*self.centers.assign())


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and hasattr(pair[1], "assign")


def _rate_as_given(opt: Any) -> Any:
    return getattr(opt, "_learning_rate", getattr(opt, "_lr", None))


def learning_rate_of(opt: Any) -> float | None:
    """Return the learning rate of an optimizer of TensorFlow 1; None where it is not a number."""
    rate = _rate_as_given(opt)
    return float(rate) if isinstance(rate, Real) else None


def _default_rho(moving_rate: float, opt: Any) -> float:
    """Return contrib's ``moving_rate / learning_rate``; warn where it means something else than in contrib's algorithm.

    Raises:
        ValueError: the learning rate is not a positive number.
    """
    rate = learning_rate_of(opt)
    if rate is None or rate <= 0:
        raise ValueError(
            "`rho` has no default, which would be moving_rate / learning_rate, because the learning rate of "
            f"{type(opt).__name__} is not a positive number: pass `rho`, 0.0 for no elastic term. "
            f"Received: learning rate {_rate_as_given(opt)!r}"
        )
    rho = moving_rate / rate
    if not isinstance(opt, _DESCENDING):
        # The term adds ρ (x − lc) to a gradient of which an adaptive optimizer keeps little more than the sign.
        warnings.warn(
            f"`ElasticAverageOptimizer(rho=None)` is moving_rate / learning_rate = {rho:.4g}, which suits gradient "
            f"descent. {type(opt).__name__} rescales gradients, and may follow the elastic term alone and not train: "
            "pass rho=0.0, or a small `rho`",
            stacklevel=2,
        )
    return rho
