"""Runs Python code as an operation of a graph, for which a compiled step waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.host import outside
from hvd_periodic.tensorflow.host_values import Blocks, HostValues, address_of, copied_if_in, key_of
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store


def hosted(
    run: Callable[[], object],
    values: HostValues,
    stores: Sequence[Store[Any]],
    others: Sequence[Any] = (),
    lent: Sequence[Store[Any]] = (),
) -> Callable[[], tf.Tensor]:
    """Return a function with which a graph runs Python code and waits for it; the function returns True.

    All such functions run one at a time, in program order, since a process cannot run two handshakes at once.
    TensorFlow raises a Python error as a ``tf.errors.OpError`` that cites its type and text.

    Args:
        run: Python code that reads and writes variables through ``values``.
        values: provides arrays that represent the variables of ``stores`` meanwhile.
        stores: variables in the memory in which Python runs.
        others: variables that Python reads or assigns directly; the graph orders these accesses.
        lent: stores whose variables Python assigns directly, keeping arrays of the new values.
    """
    given = Blocks(stores)
    call = on_arrays(lambda *_: run(), values, stores, given, lent)

    def wait() -> tf.Tensor:
        turn = _turn()
        with tf.control_dependencies([turn.assign_add(1).op, *(variable.read_value().op for variable in others)]):
            taken = [store.read(block) for store, of_run in given.runs for block in of_run]
            kinds = [block.kind for _, of_run in given.runs for block in of_run]
            with tf.device("CPU:0"):
                changed, *after = tf.numpy_function(call, taken, [tf.bool, *kinds])
            are_changed = tf.unstack(changed, len(given.runs))
        for is_changed, (store, of_run) in zip(are_changed, given.runs, strict=True):
            vectors, after = after[: len(of_run)], after[len(of_run) :]
            tf.cond(is_changed, partial(_assign, store, of_run, vectors), lambda: tf.constant(False))
        with tf.control_dependencies([changed]):
            turn.assign_add(1)
            for variable in others:
                variable.assign(variable.read_value())
            return tf.constant(True)

    return wait


def on_arrays(
    run: Callable[..., object],
    values: HostValues,
    stores: Sequence[Store[Any]],
    given: Blocks,
    lent: Sequence[Store[Any]] = (),
) -> Callable[..., list[np.ndarray]]:
    """Return a function of arrays that represent the blocks of stores while Python runs.

    It passes further arrays to ``run``. It returns a flag for every run of blocks, whether Python has changed any of
    them, followed by the blocks, which are empty if Python has not. The other arguments are as in :func:`hosted`.
    """
    held = Blocks([*stores, *lent])
    keys = [key_of(store, block) for store, of_run in given.runs for block in of_run]

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        arrays, more = arrays[: len(keys)], arrays[len(keys) :]
        for array in arrays:
            array.flags.writeable = False  # It may be the memory of a variable.
        theirs = set(map(address_of, arrays))  # A result in this memory would keep the arrays of all former exchanges.
        with values.standing_for(held, zip(keys, arrays, strict=True)):
            run(*more)
            changed = [values.changed(store, of_run) for store, of_run in given.runs]
            after = [
                copied_if_in(store.read(block), theirs) if is_changed else np.empty(0, block.kind)
                for is_changed, (store, of_run) in zip(changed, given.runs, strict=True)
                for block in of_run
            ]
            values.release(but=stores)
        return [np.array(changed, bool), *after]

    return call


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


def is_in_host_memory(variable: Any) -> bool:
    """Return whether a variable is in the memory in which Python runs."""
    device = tf.DeviceSpec.from_string(variable.device)
    return (device.device_type, device.device_index) == ("CPU", 0)


def _assign(store: Store[Any], blocks: Sequence[Bucket], vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Assign blocks in a graph."""
    for block, vector in zip(blocks, vectors, strict=True):
        store.write(block, tf.ensure_shape(vector, [block.size]))
    return tf.constant(True)


_turns: list[tf.Variable] = []


def _turn() -> tf.Variable:
    """Return the variable that orders all functions that wait for Python."""
    if not _turns:
        with outside():
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return _turns[0]
