"""Strips job, replica and task from device strings, since there are no parameter servers."""

from __future__ import annotations

import tensorflow as tf

from hvd_periodic.logs import logger, set_up

_told = False


def ignore_jobs(device: str) -> None:
    """Log once per process that a device string with a job has no effect."""
    global _told
    if "/job:" in device and not _told:
        _told = True
        set_up()
        logger.info(
            "Device %r is ignored: with Horovod there are no parameter servers, every rank is its own worker", device
        )


def place_locally(graph: tf.Graph) -> None:
    """Make this process run all present and future operations of a graph, whatever job their devices name.

    A device function below all open ``tf.device`` scopes decides last about every new operation, also in the branches
    and bodies of control flow.
    """
    stack = graph._device_function_stack
    scopes = list(stack.peek_objs())
    if scopes and scopes[-1].function is _local_device:
        return
    for operation in graph.get_operations():
        operation._set_device(_local_device(operation))
    for _ in scopes:
        stack.pop_obj()
    graph._add_device_to_stack(_local_device)
    for scope in reversed(scopes):
        stack.push_obj(scope)


def _local_device(operation: tf.Operation) -> str:
    """Return the device of an operation without job, replica and task."""
    device = str(operation.device)
    if not any(field in device for field in ("/job:", "/replica:", "/task:")):
        return device
    ignore_jobs(device)
    spec = tf.DeviceSpec.from_string(device)
    return str(tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index).to_string())
