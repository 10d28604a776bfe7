"""Local-SGD-style training for Horovod: each worker takes several optimizer steps alone, then all synchronize once.

This package holds the framework-free core and its numpy front end; it imports neither a deep learning framework nor
Horovod. The front ends for frameworks are ``hvd_periodic.torch`` and ``hvd_periodic.tensorflow``.
"""

from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.comm import Communicator, LocalCommunicator
from hvd_periodic.journal import Listener, Report, Total
from hvd_periodic.journal.files import read_run_log
from hvd_periodic.journal.lines import set_up
from hvd_periodic.numpy import (
    SGD,
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
    PeriodicOptimizer,
)
from hvd_periodic.schedules import QSR, AdaComm, Clock, Doubling, Every, Piecewise, PostLocal, Schedule, Seconds
from hvd_periodic.sync.counters import Counters
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.version import __version__
from hvd_periodic.wires import Compression, Wire

__all__ = [
    "AGN",
    "BMUF",
    "EASGD",
    "QSR",
    "SGD",
    "AGNOptimizer",
    "AdaComm",
    "Algorithm",
    "Averaging",
    "Clock",
    "Communicator",
    "Compression",
    "Counters",
    "DiLoCo",
    "Doubling",
    "ElasticAverageOptimizer",
    "Every",
    "Listener",
    "LocalCommunicator",
    "ModelAverageOptimizer",
    "PeriodicOptimizer",
    "Piecewise",
    "PostLocal",
    "ReplicaSynchronizer",
    "Report",
    "Schedule",
    "Seconds",
    "SlowMo",
    "Total",
    "Wire",
    "__version__",
    "read_run_log",
]

set_up()
