"""Elastic averaging SGD, in its synchronous form."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.arguments import as_typed, require_real
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")

BETA = 0.9
"""β of the default moving rate, in the paper and in ``tf.contrib.opt``."""


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Pull every replica towards the center, and the center towards all replicas.

    At an exchange, with d_i = x_i − c and the same old c for all workers:

        x_i ← x_i − α d_i
        c   ← c + α Σ_i d_i

    With ρ > 0 every local step descends on loss + ρ/2 ‖x − lc‖², where lc is the center that this worker read at its
    last exchange, before any push of that exchange:

        g ← g + ρ (x − lc)

    The mean displacement x̄ − c is multiplied by 1 − α(n+1) at each exchange: it shrinks without oscillation up to
    α(n+1) = 1, only changes sign at 2, where equal replicas and the center swap places, and grows without bound
    beyond 2. Without gradients, Σ_i x_i + c is conserved.

    Args:
        moving_rate: α, in (0, 2/(n+1)]. Default: min(0.9/n, 1/(n+1)), the paper's rate unless it overshoots.
        beta: the paper's parameter, α = β/n, with no division by τ; excludes ``moving_rate``.
        rho: ρ ≥ 0, in units of 1/(learning rate).

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range, or ``moving_rate`` and ``beta`` are both given.

    Example:
        >>> EASGD(beta=0.9).rate(Exchange(size=3, period=10))
        0.3

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    moving_rate: float | None = None
    beta: float | None = None
    rho: float = 0.0

    reads_after: ClassVar[bool] = False
    uses_error_feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.moving_rate is not None and self.beta is not None:
            raise ValueError(
                f"`{self._name}` takes `moving_rate` or `beta` (moving_rate = beta/n), not both. "
                f"Received: moving_rate={self.moving_rate!r}, beta={self.beta!r}"
            )
        for name, value in (("moving_rate", self.moving_rate), ("beta", self.beta)):
            if value is not None:
                rate = require_real(value, f"`{self._name}({name}=...)`", positive=True)
                object.__setattr__(self, name, rate)
        object.__setattr__(self, "rho", require_real(self.rho, f"`{self._name}(rho=...)`", positive=False))

    @property
    def _name(self) -> str:
        """The user's name for this class."""
        return as_typed(type(self).__name__)

    @property
    def uses_gradients(self) -> bool:
        """Whether the elastic term enters the local gradients."""
        return self.rho > 0

    @property
    def keeps_center(self) -> bool:
        """Whether a worker keeps the center as it last read it."""
        return self.uses_gradients

    def rate(self, exchange: Exchange) -> float:
        """Return the moving rate α for one exchange."""
        if self.moving_rate is not None:
            return self.moving_rate
        if self.beta is not None:
            return self.beta / exchange.size
        return self.default_rate(exchange)

    def default_rate(self, exchange: Exchange) -> float:
        """Return the moving rate α if none was passed."""
        return min(BETA / exchange.size, 1 / (exchange.size + 1))

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm as text, with α in place of a default."""
        return str(self).replace("moving_rate=None", f"moving_rate={self.rate(exchange):.4g}")

    def contraction(self, exchange: Exchange) -> float:
        """Return α(n+1)."""
        return self.rate(exchange) * (exchange.size + 1)

    def check(self, size: int) -> None:
        """Refuse a rate that diverges with ``size`` workers; warn about one that oscillates.

        Raises:
            ValueError: α > 2/(n+1).
        """
        argument, value = ("beta", self.beta) if self.moving_rate is None else ("moving_rate", self.moving_rate)
        if value is None:
            return
        # In units of the argument, so that rounding does not cause 2/(n+1) itself to be refused.
        limit = (2 if self.beta is None else 2 * size) / (size + 1)
        if value > limit:
            interval = f"(0, {'2' if self.beta is None else '2n'}/(n+1)] = (0, {limit:.4g}]"
            raise ValueError(
                f"`{self._name}({argument}=...)` must be in {interval} for n={size} workers, otherwise "
                f"the center diverges. Received: {argument}={value!r}"
            )
        if value > limit / 2:
            warnings.warn(
                f"`{self._name}({argument}={value!r})` makes the center overshoot at every exchange; with "
                f"n={size} workers it approaches their mean monotonically up to {limit / 2:.4g}",
                stacklevel=1,  # Python shows a text from one line once, however often an optimizer checks its rate.
            )

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return this algorithm; refuse a rate above 1, at which one worker and the center overshoot each other.

        Raises:
            ValueError: α > 1.
        """
        argument, value = ("beta", self.beta) if self.moving_rate is None else ("moving_rate", self.moving_rate)
        if value is not None and self.rate(Exchange(size, period=1)) > 1:
            limit = "1" if argument == "moving_rate" else f"n = {size}"
            raise ValueError(
                f"`{self._name}({argument}=...)` must be in (0, {limit}] in asynchronous exchange. "
                f"Received: {argument}={value!r}"
            )
        return self

    def init_worker(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center as last read, which equals ``x``, if ρ needs it."""
        return {"local_center": space.copy(x)} if self.keeps_center else {}

    def local(self, space: VectorSpace[V], x: V, g: V, worker: State[V]) -> tuple[V, State[V]]:
        """Add the gradient of ρ/2 ‖x − lc‖²."""
        return space.add_difference(self.rho, x, worker["local_center"], g), worker

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the displacement ``d = x − c``."""
        return space.sub(x, center, out=out), {}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by α times the sum of the displacements."""
        return {"center": space.axpy(self.rate(exchange), total, center["center"])}

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Move the replica by −α times its own displacement."""
        return space.lerp(x, center, self.rate(exchange)), self._read(space, worker, center)

    def pull_sent(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, sent: V, exchange: Exchange
    ) -> tuple[V, State[V]]:
        """Move the replica by −α times the part that the center receives, so that Σ_i x_i + c is conserved."""
        return space.axpy(-self.rate(exchange), sent, x), self._read(space, worker, center)

    def _read(self, space: VectorSpace[V], worker: State[V], center: V) -> State[V]:
        """Return the center as read, if ρ needs it."""
        return {"local_center": space.copy(center, out=worker["local_center"])} if self.keeps_center else {}


@dataclass(frozen=True)
class ContribEASGD(EASGD):
    """Elastic averaging with the default rate of ``tf.contrib.opt``, and its local center; else as :class:`EASGD`.

    Args:
        moving_rate: α. Default: 0.9/(τ n), with the τ that the schedule planned for the exchange.
        beta: as in :class:`EASGD`.
        rho: as in :class:`EASGD`.

    Example:
        >>> ContribEASGD().rate(Exchange(size=2, period=2))
        0.225
    """

    @property
    def keeps_center(self) -> bool:
        """True: scripts may read it."""
        return True

    def default_rate(self, exchange: Exchange) -> float:
        """Return 0.9/(τ n)."""
        return BETA / exchange.period / exchange.size

    def in_force(self, exchange: Exchange) -> str:
        """Return it as plain elastic averaging at that rate: users never write the name of this class."""
        return super().in_force(exchange).removeprefix("Contrib")
