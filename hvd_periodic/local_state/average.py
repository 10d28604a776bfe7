"""Averages the optimizer's state over workers, all of it or by entry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_periodic.arguments import require_int
from hvd_periodic.local_state.base import LocalState


@dataclass(frozen=True)
class Average(LocalState):
    """Replace entries with their mean over workers: all at every exchange, or each at its own multiple of it.

        s_i ← 1/n Σ_j s_j

    Args:
        periods: exchanges between averages, by entry; entries not named here stay local. Default: every entry at
            every exchange.

    Raises:
        TypeError, ValueError: a period is not an int of at least 1.

    Example:
        >>> Average({"exp_avg": 3, "exp_avg_sq": 6}).averaged(["exp_avg", "exp_avg_sq"])
        {'exp_avg': 3, 'exp_avg_sq': 6}

    References:
        Cheng, Glasgow: Convergence of Distributed Adaptive Optimization with Local Updates. arXiv 2409.13155 (2024).
        Iacob et al.: DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models. arXiv
        2505.22549 (2025).
    """

    periods: Mapping[str, int] | None = None

    name: ClassVar[str] = "average"

    def __post_init__(self) -> None:
        for entry, period in (self.periods or {}).items():
            require_int(period, f"`optimizer_state[{entry!r}]`", minimum=1)

    def averaged(self, entries: Collection[str]) -> Mapping[str, int]:
        """Return all entries, or the named ones."""
        if self.periods is None:
            return dict.fromkeys(entries, 1)
        unknown = sorted(self.periods.keys() - set(entries))
        if unknown:
            raise ValueError(
                f"`optimizer_state` names {unknown[0]!r}, which is not in the state of the local optimizer. That has "
                f"{', '.join(sorted(entries)) or 'nothing in the shape of parameters'}"
            )
        return dict(self.periods)
