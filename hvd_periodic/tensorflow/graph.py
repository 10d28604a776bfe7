"""A synchronizer whose steps and exchanges can be part of a compiled function."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvd_periodic.algorithms import Exchange
from hvd_periodic.asynchronous.worker import Worker
from hvd_periodic.comm.agreement import audit, raise_on_all
from hvd_periodic.comm.meeting import Purpose, check, integers, records_of
from hvd_periodic.comm.packing import is_real
from hvd_periodic.schedules import Clock
from hvd_periodic.sync import synchronizer
from hvd_periodic.sync.planning import Notes, ask
from hvd_periodic.sync.startup import Moment, Standing, Start, decide, replaces
from hvd_periodic.sync.synchronizer import Counters, Standpoint, logger, rate_of
from hvd_periodic.tensorflow.host import Numbers, from_integers, on_host, packed, to_integers, unpacked
from hvd_periodic.tensorflow.space import in_form_of
from hvd_periodic.tensorflow.store import VariableStore
from hvd_periodic.vectors.layout import Bucket

NewVariable = Callable[[str, Sequence[int], tf.DType, Any], tf.Variable]
"""``new_variable(name, shape, dtype, initial_value)`` makes a variable that is saved with the others of its owner."""

_INTEGERS = [field.name for field in fields(Counters) if field.type == "int"]

MEMORY = "memory."
"""Begins the names of variables of what a schedule remembers."""


@dataclass(frozen=True)
class _Exchanging:
    """What Python decides at an exchange in a graph.

    Attributes:
        period: local steps that were planned for the round that ends.
        next_exchange: local steps at which the next exchange is due.
        sent: integers that this rank has told the others.
        learning_rate: for the optimizer of the center.
    """

    period: Any
    next_exchange: Any
    sent: Any
    learning_rate: float


@dataclass(frozen=True)
class _Pushing:
    """What Python decides at an asynchronous exchange in a graph.

    Attributes:
        missed: pushes of other workers since this one's last.
        staleness_max: the most of them at one exchange.
        next_exchange: local steps at which the next exchange is due.
    """

    missed: Any
    staleness_max: Any
    next_exchange: Any


def _kinds(decision: type) -> dict[str, tf.DType]:
    return {field.name: tf.float64 if is_real(field.type) else tf.int64 for field in fields(decision)}


@dataclass(frozen=True)
class Beginning:
    """What a graph has to do before its first step; boolean scalars.

    Attributes:
        anew: the center becomes what the parameters are.
        given: all ranks take over the root's values.
        replaced: this rank gets other parameters by that than it has gradients of.
    """

    anew: tf.Tensor
    given: tf.Tensor
    replaced: tf.Tensor


class VariableSynchronizer(synchronizer.Synchronizer[Any]):
    """The synchronizer of the core with its counters in variables.

    Outside of graphs it is the one of the core. In a graph, :meth:`step` is a ``tf.cond`` on those variables; the data
    of an exchange stays in the graph, and what ranks tell each other before, some integers, is judged in Python.

    Args:
        new_variable: makes the variables of the counters.
        arguments, options: those of :class:`hvd_periodic.Synchronizer`.
        learning_rate: returns the learning rate of the local optimizer; also a tensor, of the graph that asks.

    Attributes:
        opening: called before :meth:`sync` and :meth:`finalize`: what a rank without any step still has to do with the
            others.
        how_to_start: what a user may have forgotten who has to start all ranks alike, which the first exchange checks.
        saved_center: what a checkpoint held of an asynchronous center, in the form of :meth:`state_dict`, until
            :meth:`start`.
        as_read, as_left: where a graph keeps the center of the parameters as this rank read it last in asynchronous
            exchange, and as it was after its own push.
    """

    replica: Any
    hyperparameters: Any
    opening: Callable[[], object] | None = None
    how_to_start: str | None = None
    saved_center: dict[str, Any] | None = None
    as_read: VariableStore | None = None
    as_left: VariableStore | None = None

    def __init__(
        self, new_variable: NewVariable, *arguments: Any, learning_rate: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        self._new_variable = new_variable
        self._counter_variables: dict[str, tf.Variable] = {}
        self.note_variables: dict[str, tf.Variable] = {}
        self.learning_rate = learning_rate
        super().__init__(*arguments, **options)
        self.replica.refuse_constraints(self.parts[0].center.layout, self.asynchronous is not None)
        self._share: tf.Variable | None = None
        if self.asynchronous is None:
            self.hyperparameters.maximum = self._maximum
            if not self.placement.everywhere:
                self._share = new_variable("share", (2,), tf.int64, np.array(self._place))
        self._make_notes()
        with tf.init_scope():
            self._center_held = tf.Variable(False, trainable=False) if tf.executing_eagerly() else None
        self._compiled_distance = tf.function(self._distance, autograph=False)

    def start(self) -> None:
        """Check that all ranks are about to do the same; give all the root's values, or begin from what was loaded.

        A state may also come later, until the first step, by a checkpoint that is restored into the variables.

        Raises:
            ValueError: ranks differ; raised on all of them.
            RuntimeError: as :meth:`begin`.
        """
        self.check_agreement()
        if self.together.any(self._has_loaded()):
            self.begin()
        else:
            self._give_values()
            self._restart()

    def begin(self, moment: Moment = Moment.BEFORE_UPDATE) -> bool:
        """Begin training, as in the core. In a graph of TensorFlow 1, ranks start by an operation of the session."""
        if self._begun:
            return False
        with tf.init_scope():
            if not tf.executing_eagerly():
                return False
            self._refuse_share_of_another()
            self._restored = self._restored or self.saved_center
            replaced = super().begin(moment)
            self.saved_center = None
        return replaced

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict()`` returned, as in the core.

        Once training has begun, all ranks have to load, and find out at once who has what: no compiled step asks.
        """
        begun = self._begun
        super().load_state_dict(state)
        if begun:
            self.begin()

    def _has_loaded(self) -> bool:
        return super()._has_loaded() or self.counters.local_steps > 0 or self.saved_center is not None

    def _state_before_training(self) -> dict[str, Any]:
        """Return what was loaded, of an asynchronous center as well."""
        saved = self.saved_center
        if saved is None:
            return super()._state_before_training()
        vectors = {
            part.name: saved["vectors"][part.name]
            | {key: self.replica.save(store) for key, store in part.worker.items()}
            for part in self.parts
        }
        return self._assembled(vectors, saved["center_optimizer"])

    @property
    def meeting_name(self) -> str:
        """The name of the collective in which ranks meet; in TensorFlow 1 of this optimizer alone.

        Exchanges of several optimizers in one session might run at the same time.
        """
        with tf.init_scope():
            return super().meeting_name if tf.executing_eagerly() else f"{self.name}.meeting"

    @property
    def _place(self) -> list[int]:
        return [self.communicator.rank, self.communicator.size]

    def _share_problem(self) -> str | None:
        """Return what is wrong if another rank's share of the center was loaded, which may have the same shape."""
        if self._share is None or (saved := self._share.numpy().tolist()) == self._place:
            return None
        return (
            f"The state loaded on rank {self._place[0]} of {self._place[1]} was saved by rank {saved[0]} of "
            f"{saved[1]}, which held another part of the center: save and load a file per rank, on as many ranks"
        )

    def _refuse_share_of_another(self) -> None:
        if self._share is not None:
            problem = self._share_problem()
            raise_on_all(self.communicator, self.name, None if problem is None else ValueError(problem))

    def _problem(self, own: Standpoint, purpose: Purpose) -> str | None:
        return self._share_problem() or super()._problem(own, purpose)

    @property
    def counters(self) -> Counters:
        """Steps, rounds, bytes and seconds so far; outside of graphs."""
        with tf.init_scope():
            return Counters(**{name: variable.numpy().item() for name, variable in self._counter_variables.items()})

    @counters.setter
    def counters(self, counters: Counters) -> None:
        for field, value in zip(fields(Counters), astuple(counters), strict=True):
            if field.name in self._counter_variables:
                self._counter_variables[field.name].assign(value)
            else:
                dtype = tf.int64 if field.name in _INTEGERS else tf.float64
                self._counter_variables[field.name] = self._new_variable(field.name, (), dtype, value)

    def _first_exchange(self) -> int:
        """Return the step of the first exchange; sessions of TensorFlow 1 do not decide it when training begins."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return super()._first_exchange()
        return ask(self.schedule, Clock(learning_rate=self._learning_rate())).next_exchange

    def _make_notes(self) -> None:
        """Make the variables of what is kept for the schedule; last, for checkpoints of versions that had none.

        Nothing reports losses in graphs of TensorFlow 1.
        """
        with tf.init_scope():
            eager = tf.executing_eagerly()
        if eager:
            self.note_variables["loss_sum"] = self._new_variable("loss_sum", (), tf.float64, 0.0)
            self.note_variables["losses"] = self._new_variable("losses", (), tf.int64, 0)
        for name in self.schedule.remembers:
            self.note_variables[MEMORY + name] = self._new_variable(f"{MEMORY}{name}", (), tf.float64, np.nan)

    @property
    def notes(self) -> Notes:
        """What this rank keeps for its schedule; outside of graphs."""
        with tf.init_scope():
            return _notes_of({name: variable.numpy().item() for name, variable in self.note_variables.items()})

    @notes.setter
    def notes(self, notes: Notes) -> None:
        for name, variable in self.note_variables.items():
            remembered = notes.memory.get(name.removeprefix(MEMORY), np.nan)
            variable.assign(remembered if name.startswith(MEMORY) else getattr(notes, name))

    def report(self, loss: Any) -> None:
        """Tell schedules the loss of this rank, as in the core; also in a compiled function.

        There a loss of NaN is an error at the next exchange, on all ranks.
        """
        if tf.executing_eagerly():
            super().report(loss)
            return
        reported = tf.convert_to_tensor(loss)
        if reported.shape.rank != 0:
            raise TypeError(f"The loss that is reported must be a number. Received: a tensor of shape {reported.shape}")
        self.note_variables["loss_sum"].assign_add(tf.cast(reported, tf.float64))
        self.note_variables["losses"].assign_add(1)

    @property
    def local_steps(self) -> int:
        """Iterations so far; outside of graphs."""
        return int(self._counter_variables["local_steps"].numpy())

    @property
    def rounds(self) -> int:
        """Exchanges so far; outside of graphs."""
        return int(self._counter_variables["rounds"].numpy())

    def sync(self) -> None:
        """Exchange now, on all ranks, whatever the schedule says; as in the core."""
        self._open()
        super().sync()

    def leave(self) -> None:
        """Leave training: exchange what is left, so that all ranks end with the same center; as in the core."""
        self._open()
        super().leave()

    def _open(self) -> None:
        if self.opening is not None:
            self.opening()

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center variables inside the block; also steps that were compiled before are refused there.

        Raises:
            ValueError: another rank's share of the center was loaded; on all ranks.
            RuntimeError: blocks are nested.
        """
        self._refuse_share_of_another()
        with super().center():
            self._hold_center(True)
            try:
                yield
            finally:
                self._hold_center(False)

    def _hold_center(self, held: bool) -> None:
        if self._center_held is not None:
            self._center_held.assign(held)

    def _maximum(self, value: Any) -> Any:
        """Return the largest value of all ranks, of a scalar."""
        name = f"{self.name}.maximum.{value.dtype.name}"
        return self.communicator.allreduce(tf.reshape(value, [1]), name, op="max")()[0]

    def distance(self) -> float:
        """Return ‖x − c‖₂, the distance of this rank's parameters to the center; as in the core."""
        self._follow_equal_replicas()
        return self._distance_now()

    def _distance_now(self) -> float:
        return float(self._distance() if self.asynchronous is not None else self._compiled_distance())

    def _start_state(self) -> None:
        """Set the state of the algorithm, unless a checkpoint has just given its values to the new variables."""
        with tf.init_scope():
            if tf.executing_eagerly() and self.counters.local_steps == 0:
                self.reset_center()

    def _count(self, **increments: Any) -> None:
        for name, more in increments.items():
            variable = self._counter_variables[name]
            variable.assign_add(tf.cast(more, variable.dtype))

    @tf.autograph.experimental.do_not_convert
    def prepare_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Show the local gradients to the algorithm, and apply what it returns; call it before every local update.

        EASGD with ρ > 0 adds its elastic term to them, AGN accumulates them, the others do nothing. Gradients may be
        ``tf.IndexedSlices``; the elastic term is dense.

        Args:
            gradients: one per parameter, in their order; None for no gradient.

        Raises:
            RuntimeError: called inside ``center()``.
            ValueError: another number of gradients than of parameters.
        """
        shown = list(gradients)
        if len(shown) != len(self.replica.parameters.layout.specs):
            raise ValueError(
                f"{len(self.replica.parameters.layout.specs)} parameters take as many gradients. Received: {len(shown)}"
            )
        self.replica.gradients = shown
        super().prepare_gradients()
        self.replica.gradients = [None] * len(shown)
        return shown

    @property
    def replicas_are_equal(self) -> bool:
        """Whether gradients are still averaged over the ranks that exchange; in a graph only the graph knows."""
        return tf.executing_eagerly() and super().replicas_are_equal

    def _show_gradients(self) -> None:
        if tf.executing_eagerly() or self.synchronous_until is None:
            super()._show_gradients()
            return
        gradients = self.replica.gradients
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        shown: list[Any] = []

        def show() -> list[Any]:
            self.replica.gradients = list(gradients)
            super(VariableSynchronizer, self)._show_gradients()
            shown[:] = [self.replica.gradients[i] for i in present]
            return shown

        def leave() -> list[Any]:
            return [in_form_of(form, gradients[i]) for i, form in zip(present, shown, strict=True)]

        for i, gradient in zip(present, tf.cond(self.steps_to_switch() <= 0, show, leave), strict=True):
            gradients[i] = gradient

    def steps_to_switch(self) -> tf.Tensor:
        """Return for how many local steps gradients will still be averaged over the ranks that exchange, in a graph."""
        return self.synchronous_until - self._counter_variables["local_steps"].read_value()

    @tf.autograph.experimental.do_not_convert
    def step(self, updated: Any = True) -> Any:
        """Count one iteration and exchange if one is due; call it after every iteration, on all ranks.

        Args:
            updated: whether the local update ran; a bool or a boolean scalar.

        Returns:
            Whether an exchange took place: a bool; in a graph, a boolean scalar.

        Raises:
            RuntimeError: as the synchronizer of the core; in a graph, a ``tf.errors.OpError`` that cites it.
            ValueError: XLA compilation.
        """
        refuse_xla()
        self.begin_step(updated is not False)
        # What is being compiled has not run yet.
        self.begin(Moment.AFTER_UPDATE if tf.executing_eagerly() and updated is not False else Moment.BEFORE_UPDATE)
        due = self.count(updated)
        if not tf.executing_eagerly():
            if self.synchronous_until is not None:
                tf.cond(tf.equal(self.steps_to_switch(), 0), self.restart_center, lambda: tf.constant(False))
            return tf.cond(due, lambda: self._run_exchange(leaving=False), lambda: tf.constant(False))
        if self.local_steps == self.synchronous_until:
            self.restart_center()
        if due:
            self.sync()
        return bool(due)

    def count(self, updated: Any = True) -> Any:
        """Count one iteration; return whether an exchange is due then, as a boolean scalar."""
        checks = []
        if self._center_held is not None and not tf.executing_eagerly():
            message = "step() inside the center() block: the model holds the center there. Leave the block first"
            checks.append(tf.debugging.Assert(tf.logical_not(self._center_held), [message]))
        with tf.control_dependencies(checks):
            self._count(local_steps=1, skipped_updates=tf.logical_not(updated))
        return self._counter_variables["local_steps"] >= self._counter_variables["next_exchange"]

    def _run_exchange(self, leaving: bool) -> Any:
        if tf.executing_eagerly():
            rounds = self.rounds
            training = super()._run_exchange(leaving)
            if self.rounds > rounds:
                self._constrain()
            return training
        if self.asynchronous is not None:
            return self._exchange_alone_in_graph(self.asynchronous)
        started = seconds()
        known = self._known()
        kinds, before = {name: scalar.dtype for name, scalar in known.items()}, packed(known)
        name = self.meeting_name

        def announce(mine: list[int]) -> list[int]:
            return self._own_record_in_graph(from_integers(mine, kinds), Purpose.EXCHANGE)

        with tf.control_dependencies(_take_turn()):
            announced = on_host(announce, [before])
        with tf.device("CPU:0"):
            gathered = self.communicator.allgather(announced, name)
        decided = self._memory_kinds() | _kinds(_Exchanging)

        def conclude(integers: list[int], of_all: list[int]) -> list[int]:
            return to_integers(self._agreement_in_graph(from_integers(integers, kinds), of_all), decided)

        concluded = on_host(conclude, [before, gathered])
        memory = unpacked(concluded, decided)
        plan = _Exchanging(**{field.name: memory.pop(field.name) for field in fields(_Exchanging)})
        checks = [concluded]
        if self.how_to_start is not None:
            advice = self.how_to_start
            with tf.control_dependencies([concluded]):
                first = tf.equal(self._counter_variables["rounds"], 0)
            checks.append(tf.cond(first, lambda: self._audit_in_graph(advice), lambda: tf.constant(True)))
        follows = self.hyperparameters.follows_rate
        self.hyperparameters.follow({"learning_rate": plan.learning_rate} if follows else None)
        with tf.control_dependencies(checks):
            gradients = tf.maximum(self._counter_variables["gradients"], 1)
            exchange: Any = Exchange(
                self.communicator.size, tf.cast(plan.period, tf.float64), tf.cast(gradients, tf.float64)
            )
            sent = sum(part.exchange(self.communicator, exchange, self.name) for part in self.parts)
            sent += self._exchange_optimizer_state(exchange, self._counter_variables["rounds"].read_value())
            self._constrain()
        local_steps = self._counter_variables["local_steps"]
        self._count(rounds=1, bytes_sent=sent + 8 * plan.sent)
        self._counter_variables["last_exchange"].assign(local_steps)
        self._counter_variables["next_exchange"].assign(plan.next_exchange)
        self._counter_variables["gradients"].assign(0)
        self._note_in_graph(memory)
        with tf.control_dependencies(_operations_so_far()):
            self._count(exchange_seconds=seconds() - started)
            self._time_in_graph(local_steps)
        return tf.constant(True)

    def _memory_kinds(self) -> dict[str, tf.DType]:
        return {MEMORY + name: tf.float64 for name in self.schedule.remembers}

    def _known(self) -> dict[str, tf.Tensor]:
        """Return what this rank knows by itself, in a graph."""
        variables = {name: self._counter_variables[name] for name in _INTEGERS} | self.note_variables
        rate = None if self.learning_rate is None else self.learning_rate()
        known = {name: variable.read_value() for name, variable in variables.items()}
        return known | {"learning_rate": tf.cast(np.nan if rate is None else rate, tf.float64)}

    def _standpoint_of(self, known: Numbers) -> Standpoint:
        """Return the same in Python, while the graph runs."""
        counters = Counters(**{name: known[name] for name in _INTEGERS})
        return Standpoint(
            counters, _notes_of(known), rate_of(known["learning_rate"]), self._step_seconds(counters.local_steps)
        )

    def _note_in_graph(self, memory: dict[str, tf.Tensor]) -> None:
        """Forget the losses of the round that ends, and keep what the schedule remembers."""
        for name, variable in self.note_variables.items():
            variable.assign(memory[name] if name in memory else tf.zeros((), variable.dtype))

    def _time_in_graph(self, local_steps: Any) -> None:
        """Measure steps from now on."""

        def begin(steps: tf.Tensor) -> tf.Tensor:
            self._timed_since = (time.perf_counter(), int(steps))
            return steps

        with tf.device("CPU:0"):
            tf.py_function(begin, [local_steps], tf.int64)

    def _when(self, condition: Any, run: Callable[[], int]) -> Any:
        """Return what ``run`` does where the condition holds, 0 elsewhere; in a graph, a branch of it."""
        if tf.executing_eagerly():
            return super()._when(condition, run)
        return tf.cond(condition, lambda: tf.constant(run(), tf.int64), lambda: tf.constant(0, tf.int64))

    def _constrain(self) -> None:
        """Let parameters and center obey constraints, alike on all ranks: what was averaged or moved may not."""
        self.replica.constrain(self.parts[0].center)

    def _send_values(self, send: Callable[[Any], Any]) -> None:
        """Give all ranks the root's values, and let layers follow that have derived something from them."""
        super()._send_values(send)
        self.replica.follow_weights()

    def _exchange_alone_in_graph(self, worker: Worker) -> Any:
        """Exchange with the center: one call of Python on host memory, between reading the replica and its pull."""
        started, variables = seconds(), self._counter_variables
        known = self._known()
        kinds, before = {name: scalar.dtype for name, scalar in known.items()}, packed(known)
        decided = self._memory_kinds() | _kinds(_Pushing)
        gradients = tf.maximum(variables["gradients"], 1)
        period = variables["next_exchange"] - variables["last_exchange"]
        exchange: Any = Exchange(self.communicator.size, tf.cast(period, tf.float64), tf.cast(gradients, tf.float64))
        buckets = [(part, bucket) for part in self.parts for bucket in part.values.layout.buckets]
        payloads = [part.payload(bucket, exchange) for part, bucket in buckets]

        def run(integers: tf.Tensor, *vectors: tf.Tensor) -> list[Any]:
            own = self._standpoint_of(from_integers(integers.numpy().tolist(), kinds))
            plan = ask(self.schedule, own.clock)
            alone = Exchange(self.communicator.size, own.clock.period, max(own.counters.gradients, 1))
            worker.go_on()
            pulled = list(worker.transport.exchange(alone, (vector.numpy() for vector in vectors)))
            missed = worker.transport.missed
            pushed = _Pushing(missed, max(missed, own.counters.staleness_max), plan.next_exchange)
            return [np.array(to_integers(asdict(pushed) | self._remembered(plan.memory), decided)), *pulled]

        # What Python reads by itself, a local step in the same graph must have written.
        written = [tf.convert_to_tensor(variable) for variable in self.hyperparameters.followed()]
        with tf.device("CPU:0"), tf.control_dependencies(written):
            results = tf.py_function(run, [before, *payloads], [tf.int64, *(payload.dtype for payload in payloads)])
        memory = unpacked(tf.ensure_shape(results[0], [len(decided)]), decided)
        pushed = _Pushing(**{field.name: memory.pop(field.name) for field in fields(_Pushing)})
        for (part, bucket), pulled in zip(buckets, results[1:], strict=True):
            center = tf.ensure_shape(pulled, [bucket.size])
            if part is self.parts[0]:
                self._mirror(bucket, center, exchange)
            part.pull(bucket, center, exchange)
        self._count(rounds=1, bytes_sent=sum(bucket.nbytes for _, bucket in buckets), pushes_missed=pushed.missed)
        variables["last_exchange"].assign(variables["local_steps"])
        variables["next_exchange"].assign(pushed.next_exchange)
        variables["staleness_max"].assign(pushed.staleness_max)
        variables["gradients"].assign(0)
        self._note_in_graph(memory)
        with tf.control_dependencies(_operations_so_far()):
            self._count(exchange_seconds=seconds() - started)
            self._time_in_graph(variables["local_steps"])
        return tf.constant(True)

    def _mirror(self, bucket: Bucket, center: Any, exchange: Exchange) -> None:
        """Keep what was pulled of the center, and what the transaction made of it."""
        if self.as_read is not None:
            self.as_read.write(bucket, center)
        if self.as_left is None:
            return
        algorithm, space, part = self.algorithm, self.replica.space, self.parts[0]
        if not algorithm.reads_after:
            message, _ = algorithm.message(space, part.values.read(bucket), {}, center, exchange)
            center = algorithm.move(space, {"center": center}, message, exchange)["center"]
        self.as_left.write(bucket, center)

    def restart_center(self) -> Any:
        """Let exchanges begin, as in the core; also in a graph."""
        if tf.executing_eagerly():
            return super().restart_center()
        self._restart_parts()
        return self._audit_in_graph(
            "They were to average all gradients until now: did they start alike, and does hvd.DistributedOptimizer "
            "average those of all variables?"
        )

    def _audit_in_graph(self, advice: str) -> tf.Tensor:
        # Statistics of groups differ: every place in the groups has its own.
        exchanged = self.parts if self.together.group is None else self.parts[:1]
        parts = [part for part in exchanged if part.placement.everywhere]
        centers = [part.center.read(bucket) for part in parts for bucket in part.values.layout.buckets]

        def check(*vectors: tf.Tensor) -> tf.Tensor:
            audit(self.together, "center", (self.replica.to_bytes(vector) for vector in vectors), advice)
            return tf.constant(True)

        with tf.device("CPU:0"):
            return tf.ensure_shape(tf.py_function(check, centers, tf.bool), [])

    def begin_in_graph(self, center: tf.Tensor, replica: tf.Tensor) -> Beginning:
        """Find out on all ranks who has what, as :meth:`begin`, when the graph of a session runs.

        Args:
            center: a number that is the same where the centers are, which may have been loaded.
            replica: a number that is the same where the values are that gradients are of.

        Returns:
            What the graph has to do then. State that was loaded shows by its local steps.
        """
        known = self._known()
        kinds, before = {name: scalar.dtype for name, scalar in known.items()}, packed(known)

        def announce(mine: list[int]) -> list[int]:
            return self._own_record_in_graph(from_integers(mine, kinds), Purpose.START)

        def judge(mine: list[int], of_all: list[int]) -> list[int]:
            self._check_in_graph(from_integers(mine, kinds), of_all, Purpose.START)
            return []

        def stand(mine: list[int], digests: list[int]) -> list[int]:
            return self._standing_in_graph(from_integers(mine, kinds), digests)

        announced = on_host(announce, [before])
        with tf.device("CPU:0"):
            gathered = self.communicator.allgather(announced, self.meeting_name)
        met = on_host(judge, [before, gathered])
        with tf.control_dependencies([met]):
            standings = on_host(stand, [before, tf.stack([center, replica])])
        with tf.device("CPU:0"):
            if self.together.group is not None:
                standings = self.together.group.allgather(standings, f"{self.together.group_name}.start")
            standings = self.communicator.allgather(standings, f"{self.name}.start")
        anew, given, replaced = tf.unstack(tf.ensure_shape(on_host(self._decide_in_graph, [standings]), [3]))
        return Beginning(anew > 0, given > 0, replaced > 0)

    def _standing_in_graph(self, known: Numbers, digests: list[int]) -> list[int]:
        counters = self._standpoint_of(known).counters
        steps = [counters.local_steps, counters.last_exchange, counters.next_exchange]
        return [self._global_rank, int(self._in_groups), *steps, *digests]

    def _decide_in_graph(self, gathered: list[int]) -> list[int]:
        """Return whether training starts anew, whether all take over the root's values, and whether others than its own
        are new to this rank.
        """
        rows, standings = np.reshape(gathered, (-1, 7)).tolist(), {}
        for rank, _, steps, last, following, center, replica in rows:
            standings[rank] = Standing(steps > 0, steps, (last, following), "", f"{center:014x}", f"{replica:014x}")
        root = self.communicator.global_ranks[self.root]
        start = decide(standings, root)  # The root brings the state of the local optimizer as well.
        most = max(standing.local_steps for standing in standings.values())
        averaging = any(row[1] for row in rows) or most < (self.synchronous_until or 0)
        different = len({standing.replica for standing in standings.values()}) > 1
        given = start is Start.FROM_ROOT or (start is Start.ANEW and different)
        replaced = replaces(start, standings, self._global_rank, root, averaging)
        if given and self._global_rank == root:
            logger.warning("The ranks have not started alike: all take over what rank %d has", root)
        return [int(start is Start.ANEW), int(given), int(replaced)]

    def give_in_graph(self, store: VariableStore, name: str) -> None:
        """Let a store of all ranks take over the root's values; ``name`` is another one for every store."""
        for send in self._senders(name):
            self._send_store(store, send)

    def _own_record_in_graph(self, known: Numbers, purpose: Purpose) -> list[int]:
        own = self._standpoint_of(known)
        return integers(self.own_record(own, purpose, self._problem(own, purpose)))

    def _check_in_graph(self, known: Numbers, gathered: list[int], purpose: Purpose) -> None:
        """Raise on all ranks where one cannot go on, or where they have come for different things."""
        problem = self._problem(self._standpoint_of(known), purpose)
        # hvd.elastic.run takes no notice of errors of unknown kind, which RuntimeErrors become in a graph.
        kind = RuntimeError if self.communicator.changed() is None else ValueError
        check(self.communicator, records_of(gathered), None if problem is None else kind(problem))

    def _agreement_in_graph(self, known: Numbers, gathered: list[int]) -> Numbers:
        """Return the fields of :class:`_Exchanging`, and what the schedule remembers."""
        self._check_in_graph(known, gathered, Purpose.EXCHANGE)
        own, records = self._standpoint_of(known), records_of(gathered)
        meeting = self.agreement_of(records, own)
        plan = self._plan(meeting)
        settings = meeting.settings or self.hyperparameters.hyperparameters() or {}
        decision = _Exchanging(
            period=meeting.period,
            next_exchange=plan.next_exchange,
            sent=len(gathered) // len(records),
            learning_rate=settings.get("learning_rate", 0.0),
        )
        return asdict(decision) | self._remembered(plan.memory)

    def _remembered(self, memory: Mapping[str, float]) -> Numbers:
        """Return what is remembered under the names of its variables; None for nothing."""
        return {MEMORY + name: memory.get(name) for name in self.schedule.remembers}


def _notes_of(values: Mapping[str, Any]) -> Notes:
    """Return notes from the values of their variables, some of which may not be there."""
    memory = {
        name.removeprefix(MEMORY): value
        for name, value in values.items()
        if name.startswith(MEMORY) and value is not None and not np.isnan(value)
    }
    losses = values.get("loss_sum", 0.0)
    return Notes(float("nan") if losses is None else losses, values.get("losses", 0), memory)


def digest_of(tensors: Sequence[Any], chosen: Callable[[], Sequence[bool]] | None = None) -> tf.Tensor:
    """Return a number that is the same where values are, to the bit; when the graph runs.

    Args:
        tensors: the values.
        chosen: which of them count.
    """

    def digest(*values: tf.Tensor) -> tf.Tensor:
        total = hashlib.sha256()
        for value, counts in zip(values, [True] * len(values) if chosen is None else chosen(), strict=True):
            total.update(value.numpy().tobytes() if counts else b"")
        return tf.constant(int.from_bytes(total.digest()[:7], "big"), tf.int64)

    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(digest, list(tensors), tf.int64), [])


def seconds() -> tf.Tensor:
    """Return the time of a clock when the graph runs; TensorFlow's own refuses where determinism is enabled."""
    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(time.perf_counter, [], tf.float64), [])


def refuse_xla() -> None:
    """Raise where XLA compiles: it knows no Horovod collectives."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "Exchanges cannot be compiled by XLA, which has no Horovod collectives: pass jit_compile=False to "
            "model.compile(), or to the tf.function that applies the gradients"
        )


_turns: list[tf.Variable] = []


def _take_turn() -> list[tf.Operation]:
    """Return what lets exchanges of one compiled function happen one after another, in the order of the program.

    All optimizers meet under one name, of which no process can have two collectives under way.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return []
        if not _turns:
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return [_turns[0].assign_add(1).op]


def _operations_so_far() -> list[tf.Operation]:
    return list(tf.compat.v1.get_default_graph().get_operations())
