"""Schedules: when to exchange. One file each; a schedule is a pure function of values that all ranks agree on."""

from hvd_periodic.schedules.adacomm import AdaComm
from hvd_periodic.schedules.base import Clock, Schedule, next_exchange
from hvd_periodic.schedules.conversion import as_schedule
from hvd_periodic.schedules.doubling import Doubling
from hvd_periodic.schedules.dylu import DyLU
from hvd_periodic.schedules.every import Every
from hvd_periodic.schedules.piecewise import Piecewise
from hvd_periodic.schedules.post_local import PostLocal
from hvd_periodic.schedules.qsr import QSR
from hvd_periodic.schedules.seconds import Seconds

__all__ = [
    "QSR",
    "AdaComm",
    "Clock",
    "Doubling",
    "DyLU",
    "Every",
    "Piecewise",
    "PostLocal",
    "Schedule",
    "Seconds",
    "as_schedule",
    "next_exchange",
]
