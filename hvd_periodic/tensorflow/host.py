"""Decisions in Python while a graph runs: what goes there and comes back are scalars with names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.variables import default_variable_creator_v2

from hvd_periodic.comm.handshake import float_bits, float_from_bits

Numbers = dict[str, Any]
"""Numbers by name; None for a float that is NaN."""


def packed(scalars: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return scalars of int64 and float64 as one vector of integers; floats as their 64 bits."""
    reals = {name for name, scalar in scalars.items() if scalar.dtype.base_dtype == tf.float64}
    return tf.stack([tf.bitcast(s, tf.int64) if name in reals else tf.cast(s, tf.int64) for name, s in scalars.items()])


def unpacked(vector: tf.Tensor, kinds: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    """Return the scalars that a vector of integers holds."""
    scalars = zip(kinds.items(), tf.unstack(vector, len(kinds)), strict=True)
    return {name: tf.bitcast(scalar, kind) if kind == tf.float64 else scalar for (name, kind), scalar in scalars}


def from_integers(integers: list[int], kinds: Mapping[str, tf.DType]) -> Numbers:
    """Return in Python what :func:`packed` has put into a vector."""
    pairs = zip(kinds.items(), integers, strict=True)
    return {name: float_from_bits(value) if kind == tf.float64 else value for (name, kind), value in pairs}


def to_integers(numbers: Numbers, kinds: Mapping[str, tf.DType]) -> list[int]:
    """Return in Python what :func:`unpacked` takes apart."""
    return [float_bits(numbers[name]) if kind == tf.float64 else int(numbers[name]) for name, kind in kinds.items()]


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
        return default_variable_creator_v2(**options)

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
