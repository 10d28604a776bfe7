"""Every worker keeps its optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_periodic.local_state.base import LocalState


@dataclass(frozen=True)
class Local(LocalState):
    """Leave the state alone, as elastic averaging and DiLoCo do.

    Example:
        >>> Local().averaged(["exp_avg"])
        {}
    """

    name: ClassVar[str] = "local"
    touches: ClassVar[bool] = False

    def averaged(self, entries: Collection[str]) -> Mapping[str, int]:
        """Return no entries: nothing is averaged."""
        return {}
