"""A fixed communication period."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_periodic.arguments import require_int


@dataclass(frozen=True)
class Every:
    """Exchange every ``period`` local steps: at ``period``, ``2 period``, ...

    Args:
        period: local steps between exchanges (τ); at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``period`` is below 1.

    Example:
        >>> Every(10)(30)
        10
    """

    period: int = 10

    def __post_init__(self) -> None:
        require_int(self.period, "`Every(period=...)`", minimum=1)

    def __call__(self, step: int) -> int:
        """Return the number of local steps from ``step`` to the next exchange."""
        return self.period
