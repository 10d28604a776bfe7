"""Python code that the operations of a session wait for: values of variables go in, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, TensorStore, branch
from hvd_periodic.tensorflow.host_values import Blocks, HostValues
from hvd_periodic.tensorflow.hosted import on_arrays
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
    """Let the session wait for Python code; return what this returns, and what assigns the variables that it changes.

    Nothing orders the operations of a session: callers have to say what the reads wait for, and run the assignments,
    of which the branches are of version 1. TensorFlow raises an error of Python as a ``tf.errors.OpError`` that cites
    its type and text.

    Args:
        run: Python code that reads and writes variables through ``values``, given ``inputs``.
        values: arrays that stand for the variables of ``stores`` meanwhile.
        stores: all variables that it reads or writes.
        inputs: what else it is given.
        kinds: the dtypes of the arrays that it returns.
    """
    given = Blocks(stores)
    results: list[np.ndarray] = []

    def note(*arrays: np.ndarray) -> None:
        results[:] = run(*arrays) or []

    call = on_arrays(note, values, stores, given)

    def call_eagerly(*arrays: np.ndarray) -> list[np.ndarray]:
        with eager():
            return [*call(*arrays), *results]

    graph_side = {id(store): TensorStore(store.layout, store.tensors()) for store in stores}
    for side in graph_side.values():
        side.load_variables()
    taken = [graph_side[id(store)].read(block) for store, of_run in given.runs for block in of_run]
    returned = [tf.as_dtype(block.kind) for _, of_run in given.runs for block in of_run]
    with tf.device("CPU:0"):
        changed, *after = tf.numpy_function(call_eagerly, [*taken, *inputs], [tf.bool, *returned, *kinds])
    after, outputs = after[: len(returned)], after[len(returned) :]
    assigned: Assigned = [changed]
    for is_changed, (store, of_run) in zip(tf.unstack(changed, len(given.runs)), given.runs, strict=True):
        vectors, after = after[: len(of_run)], after[len(of_run) :]
        assign = partial(_assign, graph_side[id(store)], of_run, vectors)
        assigned.append(tf.cond(is_changed, branch(assign), lambda: tf.constant(False)))
    return outputs, assigned


def _assign(store: TensorStore, blocks: Sequence[Bucket], vectors: Sequence[tf.Tensor]) -> Assigned:
    """Return what assigns blocks."""
    store.load_variables()
    for block, vector in zip(blocks, vectors, strict=True):
        store.write(block, tf.ensure_shape(vector, [block.size]))
    return store.assign()
