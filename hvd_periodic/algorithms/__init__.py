"""Algorithms: the arithmetic of an exchange. One file each, to be read along with its paper.

Notation, the same in all files:

    n     workers                               τ     communication period, in local steps
    x_i   worker i's replica                    c     center variable
    α     moving rate                           ρ     strength of the elastic term in the loss
    g     gradient                              a_i   worker i's accumulated gradient
    h     published center                       γ     local learning rate
"""

from hvd_periodic.algorithms.agn import AGN
from hvd_periodic.algorithms.averaging import Averaging
from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.bmuf import BMUF
from hvd_periodic.algorithms.broadcast import Broadcast
from hvd_periodic.algorithms.diloco import DiLoCo
from hvd_periodic.algorithms.easgd import EASGD
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.algorithms.slowmo import SlowMo
from hvd_periodic.algorithms.statistics import Statistics

__all__ = [
    "AGN",
    "BMUF",
    "EASGD",
    "Algorithm",
    "Averaging",
    "Broadcast",
    "DiLoCo",
    "Exchange",
    "Maximum",
    "SlowMo",
    "State",
    "Statistics",
]
