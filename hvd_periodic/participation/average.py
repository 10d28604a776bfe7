"""Parameters on which the algorithm acts, with the messages of all ranks."""

from __future__ import annotations

from hvd_periodic.participation.base import Policy, Setting


class Average(Policy):
    """The default."""

    name = "average"

    def check(self, setting: Setting) -> None:
        """Do nothing: the algorithm checks its own options."""
