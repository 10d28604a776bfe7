"""Runs Python code as an operation of a graph, for which a compiled step waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.host import outside
from hvd_periodic.tensorflow.host_values import Blocks, HostValues
from hvd_periodic.vectors.store import Store


def hosted(
    run: Callable[[], object], values: HostValues, stores: Sequence[Store[Any]], others: Sequence[Any] = ()
) -> Callable[..., tf.Tensor]:
    """Return a function with which a graph runs Python code and waits for it.

    The function takes a boolean scalar, whether the code is to run, and returns it; without one, the code runs.

    All such functions run one at a time, in program order, since a process cannot run two handshakes at once.
    TensorFlow raises a Python error as a ``tf.errors.OpError`` that cites its type and text. Then no variable of
    ``stores`` has changed, unless values had been released to other code before.

    Args:
        run: Python code that reads and writes variables through ``values``.
        values: provides arrays that represent the variables of ``stores`` meanwhile.
        stores: variables in the memory in which Python runs.
        others: variables that Python reads or assigns directly.
    """
    blocks = Blocks(stores)
    variables = [*(variable for store in stores for variable in store.tensors()), *others]

    def call() -> np.bool_:
        with values.standing_for(blocks):
            run()
            values.release()
        return np.True_

    def in_python() -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.ensure_shape(tf.numpy_function(call, [], tf.bool), [])

    def wait(due: Any = True) -> tf.Tensor:
        with tf.control_dependencies(_accesses([_turn(), *variables])):
            ran = in_python() if due is True else tf.cond(due, in_python, lambda: tf.constant(False))
        with tf.control_dependencies([ran]):
            _accesses([_turn(), *variables])
            return ran

    return wait


def _accesses(variables: Sequence[Any]) -> list[tf.Operation]:
    """Return operations, one per device, that a graph orders with all that read or assign variables.

    They take the handles of the variables and do nothing. Python code after one and before another is in order with
    the graph, and its branch of a conditional has no inputs, each of which would cost time in every step.
    """
    handles: dict[str, dict[int, tf.Tensor]] = {}
    for variable in variables:
        handles.setdefault(variable.device, {})[id(variable)] = variable.handle
    operations = []
    for device, of_device in handles.items():
        with tf.device(device):
            operations.append(tf.raw_ops.IdentityN(input=list(of_device.values()))[0].op)
    return operations


_kept: list[Exception] = []
"""The newest error of Python code that :func:`keeping_errors` has wrapped."""


def keeping_errors(run: Callable[[], object]) -> Callable[[], None]:
    """Return Python code of a graph whose errors :func:`original_errors` raises as they were."""

    def call() -> None:
        _kept.clear()
        try:
            run()
        except Exception as error:
            _kept.append(error)
            raise

    return call


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise errors of Python code in graphs as they were, with their type, inside the ``with`` block.

    TensorFlow makes a ``tf.errors.OpError`` of them, which only cites them.
    """
    _kept.clear()
    try:
        yield
    except tf.errors.OpError as error:
        for original in _kept:
            if type(original).__name__ in str(error) and str(original) in str(error):
                raise original from error
        raise
    finally:
        _kept.clear()


_turns: list[tf.Variable] = []


def _turn() -> tf.Variable:
    """Return the variable that orders all functions that wait for Python."""
    if not _turns:
        with outside():
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return _turns[0]
