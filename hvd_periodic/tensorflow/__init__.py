"""Periodic exchange for TensorFlow and Keras 3 models trained with Horovod.

Example::

    import horovod.tensorflow as hvd
    import hvd_periodic.tensorflow as hvdp

    hvd.init()
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), model, interval_steps=10)
    model.compile(optimizer, loss="sparse_categorical_crossentropy")

For TensorFlow 1 graphs, use ``hvd_periodic.tensorflow.contrib_opt``.
"""

import importlib
from types import ModuleType

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "hvd_periodic.tensorflow works with Keras on TensorFlow. On another backend, fit() exchanges with "
        "hvd_periodic.keras; or set the environment variable KERAS_BACKEND=tensorflow before keras is imported. "
        f"Received: KERAS_BACKEND={keras.backend.backend()}"
    )

from hvd_periodic.algorithms import AGN, BMUF, EASGD, Averaging, DiLoCo, SlowMo
from hvd_periodic.presets import sparse_loco
from hvd_periodic.schedules import QSR, AdaComm, Clock, Doubling, DyLU, Every, Piecewise, PostLocal, Schedule, Seconds
from hvd_periodic.tensorflow import callbacks
from hvd_periodic.tensorflow.checkpoints import load, save
from hvd_periodic.tensorflow.constructors import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.tensorflow.groups import node_groups, node_ranks, rank_groups
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer
from hvd_periodic.tensorflow.synchronizer import Synchronizer
from hvd_periodic.wires import Compression

__all__ = [
    "AGN",
    "BMUF",
    "EASGD",
    "QSR",
    "AGNOptimizer",
    "AdaComm",
    "Averaging",
    "Clock",
    "Compression",
    "DiLoCo",
    "Doubling",
    "DyLU",
    "ElasticAverageOptimizer",
    "Every",
    "ModelAverageOptimizer",
    "PeriodicOptimizer",
    "Piecewise",
    "PostLocal",
    "Schedule",
    "Seconds",
    "SlowMo",
    "Synchronizer",
    "callbacks",
    "load",
    "node_groups",
    "node_ranks",
    "rank_groups",
    "save",
    "sparse_loco",
]


def __getattr__(name: str) -> ModuleType:
    """Import ``elastic`` on first access, as most scripts do not need it."""
    if name == "elastic":
        return importlib.import_module("hvd_periodic.tensorflow.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
