"""Schedules: when to exchange. One file each; a schedule is a pure function of the step count."""

from hvd_periodic.schedules.base import Schedule, as_schedule, next_exchange
from hvd_periodic.schedules.every import Every
from hvd_periodic.schedules.post_local import PostLocal

__all__ = ["Every", "PostLocal", "Schedule", "as_schedule", "next_exchange"]
