"""Periodic exchange for PyTorch models trained with Horovod.

Example::

    import horovod.torch as hvd
    import hvd_periodic.torch as hvdp

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvdp.ModelAverageOptimizer(optimizer, model, interval_steps=10)
"""

import importlib
from types import ModuleType

from hvd_periodic.algorithms import AGN, BMUF, EASGD, Averaging, DiLoCo, SlowMo
from hvd_periodic.presets import sparse_loco
from hvd_periodic.schedules import QSR, AdaComm, Clock, Doubling, DyLU, Every, Piecewise, PostLocal, Schedule, Seconds
from hvd_periodic.torch.center import center_state_dict
from hvd_periodic.torch.checkpoints import load, save
from hvd_periodic.torch.constructors import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.torch.groups import node_groups, node_ranks, rank_groups
from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.process_group import init_process_group
from hvd_periodic.torch.reporting import Reporter, SaveBestCenter
from hvd_periodic.torch.synchronizer import Synchronizer
from hvd_periodic.torch.trainers import unwrap
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
    "Reporter",
    "SaveBestCenter",
    "Schedule",
    "Seconds",
    "SlowMo",
    "Synchronizer",
    "center_state_dict",
    "init_process_group",
    "load",
    "node_groups",
    "node_ranks",
    "rank_groups",
    "save",
    "sparse_loco",
    "unwrap",
]


_ON_DEMAND = ("elastic", "lightning", "huggingface", "ignite")
"""Modules that need another package, imported on first access."""


def __getattr__(name: str) -> ModuleType:
    """Import a module that needs another package on first access."""
    if name in _ON_DEMAND:
        return importlib.import_module(f"hvd_periodic.torch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
