"""The numpy front end: parameters are arrays that are updated in place."""

from hvd_periodic.numpy.constructors import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.numpy.optimizer import PeriodicOptimizer
from hvd_periodic.numpy.replica import NumpyReplica
from hvd_periodic.numpy.sgd import SGD, ArrayOptimizer

__all__ = [
    "SGD",
    "AGNOptimizer",
    "ArrayOptimizer",
    "ElasticAverageOptimizer",
    "ModelAverageOptimizer",
    "NumpyReplica",
    "PeriodicOptimizer",
]
