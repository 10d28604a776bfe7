"""Cost model of training: seconds per step by algorithm, period, workers, compression, fragments and overlap.

:mod:`hvd_periodic.cost_model.model` has the equations, :mod:`hvd_periodic.cost_model.fits` fits their constants.
"""

from hvd_periodic.cost_model.fits import Costs, Measurement, fit, fit_method, fit_network
from hvd_periodic.cost_model.model import (
    Job,
    Method,
    Network,
    buckets,
    expected_largest,
    seconds_per_step,
    sent_per_step,
    share_of_exchanges,
    shortest_period,
    typical,
    typical_allreduce,
    with_period,
)

__all__ = [
    "Costs",
    "Job",
    "Measurement",
    "Method",
    "Network",
    "buckets",
    "expected_largest",
    "fit",
    "fit_method",
    "fit_network",
    "seconds_per_step",
    "sent_per_step",
    "share_of_exchanges",
    "shortest_period",
    "typical",
    "typical_allreduce",
    "with_period",
]
