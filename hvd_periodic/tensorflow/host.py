"""Python and the graphs that it builds or serves: which of them runs, in which threads, and calls between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.private import create_variable


def on_host(function: Callable[..., list[int]], inputs: list[tf.Tensor]) -> tf.Tensor:
    """Return what a Python function makes of integer vectors, when the graph runs: for decisions, never for data."""

    def call(*tensors: tf.Tensor) -> tf.Tensor:
        return tf.constant(function(*(tensor.numpy().tolist() for tensor in tensors)), dtype=tf.int64)

    with tf.device("CPU:0"):
        result = tf.py_function(call, inputs, tf.int64)
    result.set_shape([None])
    return result


@contextmanager
def outside() -> Iterator[None]:
    """Leave the functions that are being compiled: what is done inside the block is done now, once.

    Variables may be made there as well, also where TensorFlow compiles a function for the second time, in which it
    makes none of its own.
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
    """Return whether a graph of TensorFlow 1 is being built, which sessions run; as opposed to a compiled function."""
    with tf.init_scope():
        return not tf.executing_eagerly()


@cache
def several_threads() -> bool:
    """Return whether TensorFlow has more than one thread that runs operations.

    A compiled step keeps the thread on which it waits for Python: where it is the only one, a compiled function that
    Python calls meanwhile would never run.
    """
    chosen = tf.config.threading.get_inter_op_parallelism_threads() or int(os.environ.get("TF_NUM_INTEROP_THREADS", 0))
    return (chosen or len(os.sched_getaffinity(0))) > 1
