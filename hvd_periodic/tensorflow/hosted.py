"""Python code that a compiled step waits for, as if it were an operation of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.host import outside


class HostValues:
    """The values of variables as flat numpy arrays.

    While a compiled step waits for Python, arrays stand for its variables: an operation that Python starts takes as
    long as ten that a graph starts. Elsewhere, a variable is read and assigned at once.
    """

    def __init__(self) -> None:
        self._variables: dict[int, Any] = {}
        self._arrays: dict[int, np.ndarray] = {}
        self._changed: set[int] = set()
        self._only_read: set[int] = set()

    def holds(self, variable: Any) -> bool:
        """Return whether an array stands for a variable now."""
        return id(variable) in self._arrays

    def read(self, variable: Any) -> np.ndarray:
        """Return the elements of a variable; the array must not be changed, and later assignments do not change it."""
        array = self._arrays.get(id(variable))
        return _memory_of(variable) if array is None else array

    def write(self, variable: Any, array: np.ndarray) -> None:
        """Set the elements of a variable; the array must not be changed any more."""
        name = id(variable)
        if name in self._arrays:
            self._arrays[name] = array
            self._changed.add(name)
        if name not in self._arrays or name in self._only_read:
            value = tf.constant(array.reshape(variable.shape))
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    @contextmanager
    def standing_for(self, written: Sequence[Any], read: Sequence[Any], arrays: Sequence[np.ndarray]) -> Iterator[None]:
        """Let arrays stand for variables inside the block.

        Args:
            written: variables that the caller assigns afterwards.
            read: variables that it does not assign: a write assigns them at once.
            arrays: the elements of all of them.
        """
        variables = (*written, *read)
        self._variables = {id(variable): variable for variable in variables}
        self._arrays = {id(variable): array for variable, array in zip(variables, arrays, strict=True)}
        self._changed, self._only_read = set(), {id(variable) for variable in read}
        try:
            yield
        finally:
            self._variables, self._arrays = {}, {}

    @contextmanager
    def in_variables(self) -> Iterator[None]:
        """Let the variables themselves have the values inside the block, for code that reads or assigns them."""
        variables, arrays, changed = self._variables, self._arrays, self._changed
        self._variables, self._arrays, self._changed = {}, {}, set()
        for name in changed:
            self.write(variables[name], arrays[name])
        try:
            yield
        finally:
            self._variables = variables
            self._arrays = {name: _memory_of(variable) for name, variable in variables.items()}

    def refresh(self, variables: Sequence[Any]) -> None:
        """Let arrays have what others have assigned to these variables."""
        self._arrays.update({id(variable): _memory_of(variable) for variable in variables if self.holds(variable)})


def hosted(
    run: Callable[[], object],
    values: HostValues,
    written: Sequence[Any],
    read: Sequence[Any] = (),
    others: Sequence[Any] = (),
) -> Callable[[], tf.Tensor]:
    """Return a function that lets a graph wait for Python, and returns True.

    Of all such functions, Python runs one at a time, in the order of the program: no process can have two handshakes
    under way. TensorFlow raises an error of Python as a ``tf.errors.OpError`` that cites its type and text.

    Args:
        run: Python code that reads and writes variables through ``values``.
        values: holds variables meanwhile.
        written: variables that Python may write through ``values``.
        read: variables that it only reads so.
        others: variables that it reads or assigns themselves, as all are that are in the memory of other devices. They
            only keep their order.
    """
    here = [variable for variable in written if is_in_host_memory(variable)]
    read_here = [variable for variable in read if is_in_host_memory(variable)]
    elsewhere = [variable for variable in (*written, *read) if not is_in_host_memory(variable)] + list(others)

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        with values.standing_for(here, read_here, [_flat(array) for array in arrays]):
            run()
            after = [_own(values.read(variable)).reshape(variable.shape) for variable in here]
        return [np.array(True), *after]

    def wait() -> tf.Tensor:
        turn = _turn()
        before = [turn.assign_add(1).op, *(variable.read_value().op for variable in elsewhere)]
        with tf.control_dependencies(before), tf.device("CPU:0"):
            taken = [variable.read_value() for variable in (*here, *read_here)]
            done, *after = tf.numpy_function(call, taken, [tf.bool, *(variable.dtype for variable in here)])
        for variable, value in zip(here, after, strict=True):
            variable.assign(tf.ensure_shape(value, variable.shape))
        with tf.control_dependencies([done]):
            turn.assign_add(1)
            for variable in elsewhere:
                variable.assign(variable.read_value())
            return tf.ensure_shape(tf.identity(done), [])

    return wait


_turns: list[tf.Variable] = []


def _turn() -> tf.Variable:
    """Return the variable by which functions that wait for Python wait for each other."""
    if not _turns:
        with outside():
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return _turns[0]


def is_in_host_memory(variable: Any) -> bool:
    """Return whether a variable is in the memory in which Python runs."""
    device = tf.DeviceSpec.from_string(variable.device)
    return (device.device_type, device.device_index) == ("CPU", 0)


def _memory_of(variable: Any) -> np.ndarray:
    """Return the memory of a variable, flat; an assignment gives the variable other memory."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
    return _flat(np.asarray(value))


def _flat(array: np.ndarray) -> np.ndarray:
    """Return the elements of an array that TensorFlow owns."""
    flat = np.reshape(array, -1)
    flat.flags.writeable = False
    return flat


def _own(array: np.ndarray) -> np.ndarray:
    """Return an array that is not memory of TensorFlow: one that is would keep the array of each exchange before."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return array if owner.base is None else array.copy()
