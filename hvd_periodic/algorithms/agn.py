"""Accumulated gradient normalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.arguments import as_typed
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class AGN(Algorithm):
    """Explore with local steps; move the center by one optimizer step on the normalized accumulated gradients.

        local step:  a_i ← a_i + g_i                           raw gradients
        exchange:    a   = Σ_i a_i / τ                         op="sum"; 1/n of it with op="average"
                     c   ← one step of the center optimizer on a
                     x_i ← c,  a_i ← 0

    τ is the number of gradients that the worker accumulated since the last exchange: the communication period, or less
    if updates were skipped or training ended within a period. For the center optimizer, a parameter without a gradient
    has a gradient of zero: weight decay and momentum still apply.

    Args:
        op: ``"sum"`` or ``"average"`` over workers.

    Raises:
        ValueError: ``op`` is neither of these.

    Example:
        >>> AGN(op="average").op
        'average'

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    op: str = "sum"

    reads_before: ClassVar[bool] = False
    consumed_state: ClassVar[str | None] = "gradient"
    takes_outer_optimizer: ClassVar[bool] = True
    needs_outer_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.op not in ("sum", "average"):
            name = as_typed(type(self).__name__)
            raise ValueError(f"`{name}(op=...)` must be 'sum' or 'average'. Received: op={self.op!r}")

    @property
    def uses_gradients(self) -> bool:
        """True: every local gradient is accumulated."""
        return True

    @property
    def takes_mean(self) -> bool:
        """Whether ``op`` is ``"average"``."""
        return self.op == "average"

    def share_of_worker(self, exchange: Exchange) -> float:
        """Return 1/n with ``op="average"``: bounds are on a_i/τ_i."""
        return 1 / exchange.size if self.op == "average" else 1.0

    def share_of_mean(self, exchange: Exchange) -> float:
        """Return 1: the center optimizer takes the total."""
        return 1.0

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return this algorithm: the gradients of each worker in turn are applied to the center."""
        return self

    def init_worker(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the accumulator ``a = 0``."""
        return {"gradient": space.zeros_like(x)}

    def local(self, space: VectorSpace[V], x: V, g: V, worker: State[V]) -> tuple[V, State[V]]:
        """Accumulate the raw gradient."""
        return g, worker | {"gradient": space.axpy(1.0, g, worker["gradient"])}

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the normalized accumulated gradient, in the memory of the accumulator or in ``out``."""
        workers = exchange.size if self.op == "average" else 1
        return space.scale(1.0 / (exchange.gradients * workers), worker["gradient"], out=out), {}

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the center, which its optimizer has moved."""
        return center, {}
