"""Exchanges of a compiled step that Python runs, eagerly: meanwhile, ranks may come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_HOSTS_UPDATED = "Hosts were added or removed: all ranks begin anew, as where a HorovodAllreduce has failed"
"""How hvd.elastic.run hears of it from a compiled step, of whose errors it heeds those that name a collective."""


def hosted(run: Callable[[], object], variables: Sequence[tf.Variable]) -> Callable[[], tf.Tensor]:
    """Return what lets a graph wait for Python.

    Errors arrive as ``tf.errors.OpError``: of collectives as ``UnknownError``, which hvd.elastic.run takes for a rank
    that was lost. It takes no notice of others of that kind, and a job would end as if it were done: all others become
    ``InvalidArgumentError``.

    Args:
        run: what Python is to run.
        variables: what it may read or change. The operations of the graph before and after this one that use them wait
            for each other.
    """

    def call(*_: Any) -> tf.Tensor:
        try:
            run()
        except tf.errors.OpError:
            raise
        except Exception as error:
            raise _as_of_graph(error) from error
        return tf.constant(True)

    def wait() -> tf.Tensor:
        # An operation on the CPU takes handles of variables there alone; those elsewhere it comes between.
        handles = [variable.handle for variable in variables if _is_here(variable)]
        others = [variable for variable in variables if not _is_here(variable)]
        before = [variable.read_value() for variable in others]
        with tf.control_dependencies(before), tf.device("CPU:0"):
            done = tf.py_function(call, handles, tf.bool)
        with tf.control_dependencies([done]):
            for variable in others:
                variable.assign(variable.read_value())
            return tf.ensure_shape(tf.identity(done), [])

    return wait


def _is_here(variable: tf.Variable) -> bool:
    """Return whether a variable is where Python runs."""
    device = tf.DeviceSpec.from_string(variable.device)
    return (device.device_type, device.device_index) == ("CPU", 0)


def _as_of_graph(error: Exception) -> Exception:
    """Return an error of a kind that a graph passes on to where it belongs."""
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    if isinstance(error, HostsUpdatedInterrupt):
        return RuntimeError(_HOSTS_UPDATED)
    if isinstance(error, HorovodInternalError):
        return RuntimeError(f"HorovodAllreduce: {error}")
    return ValueError(f"{type(error).__name__}: {error}")
