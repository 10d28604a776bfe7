"""Parameters of which every rank trains its own."""

from __future__ import annotations

from hvd_periodic.participation.base import Policy, Setting


class Local(Policy):
    """They are neither exchanged nor started from the root's; names and shapes may differ between ranks.

    Each rank saves its own.
    """

    name = "local"
    exchanged = False

    def check(self, setting: Setting) -> None:
        """Raise a ValueError if gradients are averaged at first."""
        setting.refuse_averaged_gradients()
