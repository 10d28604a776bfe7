"""Python code that the operations of a session wait for: it takes and returns the values of variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, TensorStore, branch, nothing
from hvd_periodic.tensorflow.host_values import Blocks, HostValues, address_of, copied_if_in, key_of
from hvd_periodic.tensorflow.private import eager
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store


def python_call(
    run: Callable[..., Sequence[np.ndarray] | None],
    values: HostValues,
    stores: Sequence[Store[Any]],
    inputs: Sequence[tf.Tensor] = (),
    kinds: Sequence[tf.DType] = (),
) -> tuple[list[tf.Tensor], Assigned]:
    """Make a session wait for Python code; return its results, and the assignments of the variables that it changes.

    Nothing orders the operations of a session: callers set the control dependencies of the reads and run the
    assignments, which need version 1 control flow. TensorFlow raises a Python error as a ``tf.errors.OpError`` that
    cites its type and text.

    Args:
        run: Python code that gets ``inputs``, and reads and writes variables through ``values``.
        values: provides arrays that represent the variables of ``stores`` meanwhile.
        stores: all variables that the code reads or writes.
        inputs: arguments of the code.
        kinds: dtypes of the arrays that the code returns.
    """
    given = Blocks(stores)
    keys = [key_of(store, block) for store, of_run in given.runs for block in of_run]

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        arrays, more = arrays[: len(keys)], arrays[len(keys) :]
        for array in arrays:
            array.flags.writeable = False  # It may be the memory of a variable.
        theirs = set(map(address_of, arrays))  # A result in this memory would keep the arrays of all former exchanges.
        with eager(), values.standing_for(given, zip(keys, arrays, strict=True)):
            results = run(*more) or []
            changed = [values.changed(store, of_run) for store, of_run in given.runs]
            after = [
                copied_if_in(store.read(block), theirs) if is_changed else np.empty(0, block.kind)
                for is_changed, (store, of_run) in zip(changed, given.runs, strict=True)
                for block in of_run
            ]
        return [np.array(changed, bool), *after, *results]

    graph_side = {id(store): TensorStore(store.layout, store.tensors()) for store in stores}
    for side in graph_side.values():
        side.load_variables()
    taken = [graph_side[id(store)].read(block) for store, of_run in given.runs for block in of_run]
    returned = [tf.as_dtype(block.kind) for _, of_run in given.runs for block in of_run]
    with tf.device("CPU:0"):
        changed, *after = tf.numpy_function(call, [*taken, *inputs], [tf.bool, *returned, *kinds])
    after, outputs = after[: len(returned)], after[len(returned) :]
    assigned: Assigned = [changed]
    for is_changed, (store, of_run) in zip(tf.unstack(changed, len(given.runs)), given.runs, strict=True):
        vectors, after = after[: len(of_run)], after[len(of_run) :]
        assign = partial(_assign, graph_side[id(store)], of_run, vectors)
        assigned.append(tf.cond(is_changed, branch(assign), nothing))
    return outputs, assigned


def sent_from_root(
    values: Sequence[tf.Tensor],
    name: str,
    routes: Callable[[], Sequence[tuple[Communicator, str, int]]],
    turn: Callable[[], AbstractContextManager[None]],
) -> list[tf.Tensor]:
    """Return the root's values, which ranks send as bytes, one after another, when the session runs.

    Operations of several optimizers that one run of a session starts send in turns, in one order on all ranks.

    Args:
        values: this rank's values.
        name: of the collectives, after the prefix of each route.
        routes: returns, when the session runs, the communicators that carry each value one after another, each with
            a prefix of names and its root.
        turn: the turn of the optimizer.
    """

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        taken = routes()
        with eager(), turn():
            return [sent(array, f"{name}.{i}", taken) for i, array in enumerate(arrays)]

    def sent(array: np.ndarray, label: str, taken: Sequence[tuple[Communicator, str, int]]) -> np.ndarray:
        data = array.reshape(-1).view(np.uint8).copy()
        for communicator, prefix, root in taken:
            data = communicator.broadcast(data, f"{prefix}.{label}", root)
        return data.view(array.dtype).reshape(array.shape)

    with tf.device("CPU:0"):
        results = tf.numpy_function(call, list(values), [value.dtype.base_dtype for value in values])
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    return list(results)


def _assign(store: TensorStore, blocks: Sequence[Bucket], vectors: Sequence[tf.Tensor]) -> Assigned:
    """Return the operations that assign blocks of a store."""
    store.load_variables()
    for block, vector in zip(blocks, vectors, strict=True):
        store.write(block, tf.ensure_shape(vector, [block.size]))
    return store.assign()
