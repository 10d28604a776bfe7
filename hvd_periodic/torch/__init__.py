"""Periodic exchange for PyTorch models trained with Horovod.

Example::

    import horovod.torch as hvd
    import hvd_periodic.torch as hvdp

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)
"""

from hvd_periodic.algorithms import AGN, EASGD, Averaging
from hvd_periodic.schedules import Every, PostLocal
from hvd_periodic.torch.center import center_state_dict
from hvd_periodic.torch.constructors import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.torch.groups import node_groups, rank_groups
from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.synchronizer import Synchronizer

__all__ = [
    "AGN",
    "EASGD",
    "AGNOptimizer",
    "Averaging",
    "ElasticAverageOptimizer",
    "Every",
    "ModelAverageOptimizer",
    "PeriodicOptimizer",
    "PostLocal",
    "Synchronizer",
    "center_state_dict",
    "node_groups",
    "rank_groups",
]
