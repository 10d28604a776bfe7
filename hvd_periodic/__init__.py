"""Local-SGD-style training for Horovod: each worker takes several optimizer steps alone, then all synchronize once.

This package holds what all front ends share: algorithms, schedules, compression, communicators and logs. It imports
neither a deep learning framework nor Horovod. Optimizers are in the front ends: ``hvd_periodic.torch``,
``hvd_periodic.tensorflow``, ``hvd_periodic.keras`` and, for numpy arrays, ``hvd_periodic.numpy``.
"""

import importlib
from typing import Any

from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.comm import Communicator, LocalCommunicator
from hvd_periodic.journal import Counters, Listener, Report, Total
from hvd_periodic.journal.files import read_run_log
from hvd_periodic.presets import sparse_loco
from hvd_periodic.schedules import QSR, AdaComm, Clock, Doubling, DyLU, Every, Piecewise, PostLocal, Schedule, Seconds
from hvd_periodic.spellings import warn_old
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.version import __version__
from hvd_periodic.wires import Compression, Wire

__all__ = [
    "AGN",
    "BMUF",
    "EASGD",
    "QSR",
    "AdaComm",
    "Algorithm",
    "Averaging",
    "Clock",
    "Communicator",
    "Compression",
    "Counters",
    "DiLoCo",
    "Doubling",
    "DyLU",
    "Every",
    "Listener",
    "LocalCommunicator",
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
    "sparse_loco",
]

_FRONT_ENDS = {
    "numpy": {"ArrayOptimizer", "NumpyReplica"},
    "keras": {"PeriodicExchange"},
    "torch": {
        *("Synchronizer", "load", "save", "node_groups", "node_ranks", "rank_groups", "elastic"),
        *("Reporter", "SaveBestCenter", "center_state_dict", "init_process_group", "unwrap"),
        *("huggingface", "ignite", "lightning"),
    },
    "tensorflow": {
        *("Synchronizer", "load", "save", "node_groups", "node_ranks", "rank_groups", "elastic"),
        *("callbacks", "contrib_opt"),
    },
}
"""Names that only front ends have."""

_WAS_HERE = {"SGD", "AGNOptimizer", "ElasticAverageOptimizer", "ModelAverageOptimizer", "PeriodicOptimizer"}
"""Names that version 0.1 also offered here, of the numpy front end."""


def __getattr__(name: str) -> Any:
    """Return the front end for numpy, and its optimizers with a warning; say where names of front ends are."""
    if name == "numpy":
        return importlib.import_module("hvd_periodic.numpy")
    if name in _WAS_HERE:
        warn_old(f"`hvd_periodic.{name}`, which is for numpy arrays,", f"`hvd_periodic.numpy.{name}`")
        return getattr(importlib.import_module("hvd_periodic.numpy"), name)
    homes = [f"hvd_periodic.{front_end}" for front_end, names in _FRONT_ENDS.items() if name in names]
    where = f": it is in {' and '.join(homes)}" if homes else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
