"""Devices of jobs that there are no more."""

from __future__ import annotations

import logging

import tensorflow as tf

_LOGGER = logging.getLogger("hvd_periodic")
_told = False


def ignore_jobs(device: str) -> None:
    """Say, once per process, that a device string naming a job has no effect."""
    global _told
    if "/job:" in device and not _told:
        _told = True
        _LOGGER.info(
            "Device %r is ignored: with Horovod there are no parameter servers, every rank is its own worker", device
        )


def place_locally(graph: tf.Graph) -> None:
    """Take job, replica and task out of the devices of all operations of a graph, so that this process runs them."""
    for operation in graph.get_operations():
        if "/job:" in operation.device:
            ignore_jobs(operation.device)
            spec = tf.DeviceSpec.from_string(operation.device)
            local = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
            operation._set_device(local.to_string())
