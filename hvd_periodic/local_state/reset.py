"""Resets the optimizer's state at every exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_periodic.local_state.base import LocalState


@dataclass(frozen=True)
class Reset(LocalState):
    """Set every entry to its value before the first step, after each exchange.

    Step counters continue: a bias correction that relies on them is too small for the first steps of a period.

    Example:
        >>> Reset().resets
        True

    References:
        Chen, Huo: Scalable training of deep learning machines by incremental block training with intra-block parallel
        optimization and blockwise model-update filtering. ICASSP (2016); as in CNTK.
    """

    name: ClassVar[str] = "reset"
    resets: ClassVar[bool] = True

    def averaged(self, entries: Collection[str]) -> Mapping[str, int]:
        """Return no entries: nothing is averaged."""
        return {}
