"""Periodic exchange for Horovod: workers train on their own for a while, then exchange once.

This package holds the framework-free core and its numpy front end; it imports neither a deep learning framework nor
Horovod. The front ends for frameworks are ``hvd_periodic.torch`` and ``hvd_periodic.tensorflow``.
"""

from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging
from hvd_periodic.comm import Communicator, LocalCommunicator
from hvd_periodic.numpy import (
    SGD,
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
    PeriodicOptimizer,
)
from hvd_periodic.schedules import Every, PostLocal, Schedule
from hvd_periodic.synchronizer import Counters, Synchronizer
from hvd_periodic.version import __version__

__all__ = [
    "AGN",
    "EASGD",
    "SGD",
    "AGNOptimizer",
    "Algorithm",
    "Averaging",
    "Communicator",
    "Counters",
    "ElasticAverageOptimizer",
    "Every",
    "LocalCommunicator",
    "ModelAverageOptimizer",
    "PeriodicOptimizer",
    "PostLocal",
    "Schedule",
    "Synchronizer",
    "__version__",
]
