"""Tracks progress in variables, which compiled functions and checkpoints can access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from itertools import chain, compress
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.journal.base import Counters
from hvd_periodic.schedules import Clock, Schedule
from hvd_periodic.sync.fragment_plan import FragmentSchedule, SinceLastSync
from hvd_periodic.sync.planner import query
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.status import ScheduleState
from hvd_periodic.tensorflow.host import in_session
from hvd_periodic.tensorflow.host_values import HostValues
from hvd_periodic.tensorflow.store import ArrayStore, layout_of
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from hvd_periodic.vectors.store import Store

NewVariable = Callable[[str, Sequence[int], tf.DType, Any], tf.Variable]
"""``new_variable(name, shape, dtype, initial_value)`` creates a variable that is saved with the others of its owner."""

_INTEGERS = [field.name for field in fields(Counters) if field.type == "int"]

ADDED = {"left_out"}
"""Counters missing in older files, and in checkpoints of TensorFlow 1, whose graphs never count them."""

MEMORY = "memory."
"""Prefix of the names of variables for a schedule's memory."""

SINCE = "since"
"""Name of the steps and gradients since every fragment's last exchange."""

WORK = ("updates", "examples", "reports")
"""Names of the counts since this rank last took part in an exchange, for weights by work."""

SEEN = "seen"
"""Name of what says, for every fragment, which ``"present"`` parameters had a gradient since its last exchange."""

_PER_FRAGMENT = len(SinceLastSync._fields)

_NEVER = 2**63 - 1
"""A local step that is never reached."""


class VariableProgress(ProgressTracker):
    """A progress tracker with its numbers in variables.

    Outside graphs it is read and set like its base class; in a graph, numbers are tensors.

    Args:
        learning_rate: returns the local optimizer's learning rate; in a graph, it may be a tensor.
        lands: whether exchanges may be in flight during local steps.
        present: names of the ``"present"`` parameters.
        weighs_work: whether the weight of this rank is a count of work.

    Attributes:
        variables: variables of the counters, by name.
        note_variables: variables of the state kept from one exchange to the next, by name.
    """

    def __init__(
        self,
        new_variable: NewVariable,
        schedule: Schedule,
        learning_rate: Callable[[], Any] | None,
        values: HostValues,
        lands: bool,
        present: Sequence[str] = (),
        weighs_work: bool = False,
    ) -> None:
        self._of_session = in_session()
        self._landing: tf.Variable | None = None
        if lands and self._of_session:
            self._landing = new_variable("landing", (), tf.int64, _NEVER)
        elif lands:  # Not saved: an exchange in flight is in no variable.
            with tf.init_scope():
                self._landing = tf.Variable(_NEVER, dtype=tf.int64, trainable=False)
        self._new_variable, self._remembers, self._values = new_variable, schedule.remembers, values
        self._first_memory: Mapping[str, float] = {}
        self._fragments = schedule.fragments if isinstance(schedule, FragmentSchedule) else 1
        self._present, self._weighs_work = list(present), weighs_work
        self.learning_rate = learning_rate
        self.variables: dict[str, tf.Variable] = {}
        self.note_variables: dict[str, tf.Variable] = {}
        super().__init__(schedule)

    def make_notes(self) -> None:
        """Create the variables of the schedule state; last, for checkpoints of versions that had none.

        TensorFlow 1 graphs have no variables for losses, since nothing reports losses there.
        """
        if not in_session():
            self.note_variables["loss_sum"] = self._new_variable("loss_sum", (), tf.float64, 0.0)
            self.note_variables["losses"] = self._new_variable("losses", (), tf.int64, 0)
        for name in self._remembers:
            first = self._first_memory.get(name, np.nan)
            self.note_variables[MEMORY + name] = self._new_variable(f"{MEMORY}{name}", (), tf.float64, first)
        if self._fragments > 1:
            self.note_variables[SINCE] = self._new_variable(SINCE, (self._fragments, _PER_FRAGMENT), tf.int64, 0)
        for name in WORK if self._weighs_work else ():
            dtype, start = (tf.float64, 0.0) if name == "examples" else (tf.int64, 0)
            self.note_variables[name] = self._new_variable(name, (), dtype, start)
        if self._present:
            self.note_variables[SEEN] = self._new_variable(SEEN, (self._fragments, len(self._present)), tf.int64, 0)

    @property
    def counters(self) -> Counters:
        """Steps, rounds, bytes and seconds so far; outside graphs."""
        with tf.init_scope():
            return Counters(**{name: self._number(name) for name in self.variables})

    @counters.setter
    def counters(self, counters: Counters) -> None:
        for field, value in zip(fields(Counters), astuple(counters), strict=True):
            if field.name in self.variables:
                self._set(self.variables[field.name], value)
            elif not (self._of_session and field.name in ADDED):
                dtype = tf.int64 if field.name in _INTEGERS else tf.float64
                self.variables[field.name] = self._new_variable(field.name, (), dtype, value)

    @property
    def notes(self) -> ScheduleState:
        """The state that this rank keeps for its schedule; outside graphs."""
        with tf.init_scope():
            kept = {name: self._values.read(variable).tolist() for name, variable in self.note_variables.items()}
        (loss_sum,), (losses,) = kept.get("loss_sum", [0.0]), kept.get("losses", [0])
        memory = {name: kept[MEMORY + name][0] for name in self._remembers if MEMORY + name in kept}
        since, seen = kept.get(SINCE, []), kept.get(SEEN, [])
        of_fragments = [since[i : i + _PER_FRAGMENT] for i in range(0, len(since), _PER_FRAGMENT)]
        rows = [seen[i : i + len(self._present)] for i in range(0, len(seen), len(self._present) or 1)]
        return ScheduleState(
            loss_sum,
            losses,
            {name: value for name, value in memory.items() if not np.isnan(value)},
            of_fragments if any(since) else (),
            **{name: kept[name][0] for name in WORK if name in kept},
            seen=[list(compress(self._present, row)) for row in rows] if any(seen) else [],
        )

    @notes.setter
    def notes(self, notes: ScheduleState) -> None:
        numbers: dict[str, Any] = {MEMORY + name: notes.memory.get(name) for name in self._remembers}
        numbers |= {"loss_sum": notes.loss_sum, "losses": notes.losses}
        numbers |= {name: getattr(notes, name) for name in WORK}
        numbers[SINCE] = list(chain(*(notes.since or [SinceLastSync()] * self._fragments)))
        numbers[SEEN] = [[name in part for name in self._present] for part in notes.seen or [()] * self._fragments]
        for name, variable in self.note_variables.items():
            self._set(variable, numbers[name])

    def see(self, names: Sequence[str], fragments: int) -> None:
        """Note that an update has gradients of some parameters; also in a graph."""
        variable, mask = self.note_variables[SEEN], [[name in names for name in self._present]] * fragments
        if tf.executing_eagerly():
            self._set(variable, np.maximum(self._values.read(variable).reshape(fragments, -1), mask))
        else:
            variable.assign(tf.maximum(variable, tf.constant(mask, variable.dtype)))

    @property
    def landing(self) -> int | None:
        """Local step at which the exchange in flight is applied to the replica, or None; outside graphs."""
        step = _NEVER if self._landing is None else self._values.read(self._landing).item()
        return None if step == _NEVER else step

    @landing.setter
    def landing(self, step: int | None) -> None:
        if self._landing is not None:
            self._set(self._landing, _NEVER if step is None else step)

    @property
    def is_new(self) -> bool:
        """Whether no checkpoint has set the new variables; False in a session, where this is not known yet."""
        return not in_session() and self.counters.local_steps == 0

    @property
    def local_steps(self) -> int:
        """Iterations so far; outside graphs."""
        return int(self._number("local_steps"))

    @property
    def rounds(self) -> int:
        """Exchanges so far; outside graphs."""
        return int(self._number("rounds"))

    def store(self) -> Store[Any]:
        """Return all variables as a store."""
        named = [*self.variables.items(), *self.note_variables.items()]
        named += [] if self._landing is None else [("landing", self._landing)]
        return ArrayStore(layout_of(named, DEFAULT_BUCKET_BYTES), [variable for _, variable in named], self._values)

    def _number(self, name: str) -> Any:
        """Return a counter."""
        return self._values.read(self.variables[name]).item()

    def _set(self, variable: tf.Variable, numbers: Any) -> None:
        """Set a variable, outside functions that are being compiled."""
        array = np.array(numbers, variable.dtype.as_numpy_dtype)
        if self._of_session and not self._values.holds(variable):
            variable.assign(array.reshape(variable.shape))
        else:
            self._values.write(variable, array.reshape(-1))

    def _first_exchange(self, schedule: Schedule) -> int:
        """Return the step of the first exchange; TensorFlow 1 sessions do not determine it again at the start."""
        if in_session():
            plan = query(schedule, Clock(learning_rate=self.current_rate()))
            self._first_memory = plan.memory
            return plan.next_exchange
        return super()._first_exchange(schedule)

    def add(self, **increments: Any) -> None:
        """Add to counters, by name; also in a graph."""
        for name, more in increments.items():
            variable = self.variables[name]
            if tf.executing_eagerly():
                self._set(variable, self._number(name) + more)
            elif more is not False:
                number = tf.cast(more, variable.dtype) if tf.is_tensor(more) else int(more)
                variable.assign_add(number, read_value=False)

    def count(self, updated: Any) -> Any:
        """Count one iteration; return whether an exchange is due then, as a boolean scalar."""
        if tf.executing_eagerly():
            updated = bool(updated)
        skipped = not updated if isinstance(updated, bool) else tf.logical_not(updated)
        self.add(local_steps=1, skipped_updates=skipped)
        return self.is_due

    @property
    def is_due(self) -> Any:
        """Whether an exchange is due after the local steps so far; in a graph, a boolean scalar."""
        return self._is_reached(self.variables["next_exchange"])

    @property
    def is_landing_due(self) -> Any:
        """Whether the exchange in flight is due to be applied; in a graph, a boolean scalar."""
        return False if self._landing is None else self._is_reached(self._landing)

    def _is_reached(self, step: tf.Variable) -> Any:
        """Return whether the local steps have reached the value of a variable."""
        if tf.executing_eagerly():
            return self.local_steps >= self._values.read(step).item()
        return self.variables["local_steps"] >= step

    def steps_to(self, step: int) -> tf.Tensor:
        """Return the number of local steps left until ``step``, as a tensor."""
        return step - self.variables["local_steps"].read_value()

    def work(self, examples: Any, updated: Any) -> None:
        """Note the examples of a step in a compiled function; a number below 0 raises an error at the next exchange."""
        if not self._weighs_work:
            return
        number = tf.cast(examples, tf.float64)
        if number.shape.rank != 0:
            raise TypeError(f"`examples` must be a number. Received: a tensor of shape {number.shape}")
        valid = tf.where(number >= 0, number, np.nan)
        self.note_variables["examples"].assign_add(tf.where(updated, valid, 0.0))
        self.note_variables["reports"].assign_add(tf.cast(updated, tf.int64))

    def report(self, loss: Any) -> None:
        """Note a loss of this rank; in a compiled function, a NaN raises an error at the next exchange."""
        if tf.executing_eagerly():
            super().report(loss)
            return
        reported = tf.convert_to_tensor(loss)
        if reported.shape.rank != 0:
            raise TypeError(f"The loss that is reported must be a number. Received: a tensor of shape {reported.shape}")
        self.note_variables["loss_sum"].assign_add(tf.cast(reported, tf.float64))
        self.note_variables["losses"].assign_add(1)
