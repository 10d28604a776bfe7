"""Policies for the local optimizer's state at an exchange. One file each."""

from hvd_periodic.local_state.average import Average
from hvd_periodic.local_state.base import LocalState, LocalStateLike, as_local_state
from hvd_periodic.local_state.local import Local
from hvd_periodic.local_state.reset import Reset

__all__ = ["Average", "Local", "LocalState", "LocalStateLike", "Reset", "as_local_state"]
