"""Python code and graphs: which of them runs, in which threads, and calls between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.private import create_variable


def on_host(function: Callable[[], list[int]]) -> tf.Tensor:
    """Return the integers that a Python function returns when the graph runs: for decisions, never for data."""
    with tf.device("CPU:0"):
        result = tf.py_function(lambda: tf.constant(function(), dtype=tf.int64), [], tf.int64)
    result.set_shape([None])
    return result


@contextmanager
def outside() -> Iterator[None]:
    """Leave the functions that are being compiled, so that code inside the block runs now, once.

    The block may create variables, even when TensorFlow compiles a function for the second time, which forbids new
    variables inside the function.
    """

    def make(_: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return create_variable(**options)

    with tf.init_scope():
        if not tf.executing_eagerly():
            yield
            return
        with tf.variable_creator_scope(make):
            yield


def in_session() -> bool:
    """Return whether a TensorFlow 1 graph for sessions is being built, as opposed to a compiled function."""
    with tf.init_scope():
        return not tf.executing_eagerly()


@cache
def several_threads() -> bool:
    """Return whether TensorFlow has more than one thread that runs operations.

    A compiled step blocks the thread on which it waits for Python. If this is the only thread, a compiled function that
    Python calls meanwhile would never run.
    """
    chosen = tf.config.threading.get_inter_op_parallelism_threads() or int(os.environ.get("TF_NUM_INTEROP_THREADS", 0))
    return (chosen or len(os.sched_getaffinity(0))) > 1
