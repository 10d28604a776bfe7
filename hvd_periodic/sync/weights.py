"""How much every rank counts in the means of an exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_periodic.arguments import require_real
from hvd_periodic.comm.handshake import Record
from hvd_periodic.options import WeightLike


class Weight:
    """How much this rank counts.

    Args:
        given: a number of at least 0, such as that of its examples; a function that is called once at every exchange;
            or None: all ranks count alike.

    Attributes:
        value: at this exchange.
        problem: why there is none.

    Raises:
        TypeError, ValueError: no number of at least 0.

    Example:
        >>> weight = Weight(lambda: 32.0)
        >>> weight.measure(idle=False)
        >>> weight.value
        32.0
    """

    def __init__(self, given: WeightLike) -> None:
        self.given = given
        self.value: float | None = None
        self.problem: str | None = None
        if given is not None and not callable(given):
            _checked(given)

    def measure(self, idle: bool) -> None:
        """Ask how much this rank counts; one that leaves, and has taken no step since the last exchange, not at all."""
        self.value = self.problem = None
        if self.given is None:
            return
        try:
            self.value = 0.0 if idle else _checked(self.given() if callable(self.given) else self.given)
        except Exception as error:
            self.problem = f"The weight of this rank cannot be used: {type(error).__name__}: {error}"


def relative_weights(records: Sequence[Record]) -> list[float] | None:
    """Return how much every rank counts, 1 on average: w_i n / Σ_j w_j; None where all count alike.

    A rank that is left out does not count. Where none does, all weights are 0.

    Example:
        >>> told = [Record(2, 1, weight=3.0), Record(2, 1, weight=1.0), Record(2, 1, weight=8.0, left_out=1)]
        >>> relative_weights(told)
        [2.25, 0.75, 0.0]
        >>> relative_weights(told[:1])
    """
    weights = [0.0 if record.left_out else 1.0 if record.weight is None else record.weight for record in records]
    total = math.fsum(weights)
    if total == 0:
        return weights
    return None if len(set(weights)) == 1 else [weight * (len(weights) / total) for weight in weights]


def _checked(weight: object) -> float:
    return require_real(weight, "`weight`", positive=False)
