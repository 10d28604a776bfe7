"""Parameters that take the root's values at every exchange."""

from __future__ import annotations

from hvd_periodic.algorithms import broadcast
from hvd_periodic.participation.base import Policy, Setting

FROM_ROOT = "parameters_from_root"
"""Name of the group of these parameters, in collectives and in saved states."""


class Broadcast(Policy):
    """They are a group of tensors of their own, on which :attr:`algorithm` acts."""

    name = "broadcast"
    exchanged = False
    algorithm = broadcast.Broadcast("parameters")

    def check(self, setting: Setting) -> None:
        """Raise a ValueError if gradients are averaged at first."""
        setting.refuse_averaged_gradients()
