"""Blockwise model-update filtering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.algorithms.delayed import GATHERED, Delayed, stable
from hvd_periodic.arguments import require_momentum, require_real
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")

SMALL_MOMENTUM = 0.4
"""Default of η in asynchronous exchange of more than 2 workers, which may diverge with 1 − 1/n if they push in turn."""


@dataclass(frozen=True)
class BMUF(Consensus):
    """Filter the movement of the mean in a block of local training with a momentum over blocks.

        ḡ   = h − 1/n Σ_i x_i          h: the last published center
        Δ   ← η Δ − ζ ḡ
        c   ← c + Δ
        h   = c + η Δ                  Nesterov; c without it
        x_i ← h

    Δ is in units of parameters. With ζ = 1 and η = 0 this is model averaging. Nesterov's form publishes the center of
    DiLoCo with λ = ζ = 1 and μ = η. In asynchronous exchange the momentum waits for n pushes: see
    :class:`DelayedBMUF`.

    Args:
        block_momentum: η in [0, 1); default 1 − 1/n, and in asynchronous exchange of more than 2 workers 0.4.
        block_learning_rate: ζ > 0.
        nesterov: publish the center moved ahead by the momentum; otherwise the center itself.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> two, center = Exchange(size=2, period=3), {"center": np.array([0.0]), "block_update": np.array([0.0])}
        >>> center = BMUF().move(VectorSpace(), center, np.array([2.0]), two)
        >>> center["center"], BMUF().publish(VectorSpace(), center, two)
        (array([1.]), array([1.5]))

    References:
        Chen, Huo: Scalable training of deep learning machines by incremental block training with intra-block parallel
        optimization and blockwise model-update filtering. ICASSP (2016).
    """

    block_momentum: float | None = None
    block_learning_rate: float = 1.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.block_momentum is not None:
            momentum = require_momentum(self.block_momentum, "`BMUF(block_momentum=...)`")
            object.__setattr__(self, "block_momentum", momentum)
        rate = require_real(self.block_learning_rate, "`BMUF(block_learning_rate=...)`", positive=True)
        object.__setattr__(self, "block_learning_rate", rate)

    def momentum(self, exchange: Exchange) -> float:
        """Return η for one exchange."""
        return 1 - 1 / exchange.size if self.block_momentum is None else self.block_momentum

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm as text, with η in place of a default."""
        return str(self).replace("block_momentum=None", f"block_momentum={self.momentum(exchange):.4g}")

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the algorithm whose momentum waits for n pushes; warn if it is not stable."""
        if type(self) is not BMUF:  # Subclasses may compute something else.
            return super().asynchronous_variant(size)
        default = 1 - 1 / size if size <= 2 else SMALL_MOMENTUM
        momentum = default if self.block_momentum is None else self.block_momentum
        advice = "Lower `block_momentum` or `block_learning_rate`"
        return stable(DelayedBMUF(momentum, self.block_learning_rate, self.nesterov), size, advice)

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center and Δ = 0."""
        return {"center": space.copy(x), "block_update": space.zeros_like(x)}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by the filtered update."""
        update = space.scale(self.momentum(exchange), center["block_update"])
        update = space.axpy(self.block_learning_rate / exchange.size, total, update)
        return {"center": space.axpy(1.0, update, center["center"]), "block_update": update}

    def publish(self, space: VectorSpace[V], center: State[V], exchange: Exchange) -> V:
        """Return the center, moved ahead by the momentum."""
        if not self.nesterov:
            return center["center"]
        return space.axpy(self.momentum(exchange), center["block_update"], space.copy(center["center"]))


@dataclass(frozen=True)
class DelayedBMUF(Delayed, BMUF):
    """BMUF of workers that exchange one at a time: the momentum moves once in n pushes.

        g = h_i − x_i
        D ← D − ζ g/n
        first n − 1 pushes:  c ← c − ζ g/n
        the n-th push:       c ← c − ζ g/n + η Δ ;  Δ ← η Δ + D ;  D ← 0
        x_i ← c + η Δ                          Nesterov; c without it

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> delayed = DelayedBMUF(0.5)
        >>> center = delayed.init_center(VectorSpace(), np.array([0.0]))
        >>> for completes in (False, True):
        ...     push = Exchange(size=2, period=3, completes=completes)
        ...     center |= delayed.move(VectorSpace(), center, np.array([2.0]), push)
        ...     print(center["center"], center["block_update"], center["gathered"])
        [1.] [0.] [1.]
        [2.] [2.] [0.]
    """

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center, Δ = 0 and D = 0."""
        return super().init_center(space, x) | {GATHERED: space.zeros_like(x)}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by one worker's displacement; at the end of a window by the momentum as well."""
        share, c = self.block_learning_rate / exchange.size, center["center"]
        gathered = space.axpy(share, total, center[GATHERED])
        if not exchange.completes:
            return {"center": space.axpy(share, total, c), GATHERED: gathered}
        old = space.scale(self.momentum(exchange), center["block_update"])
        update = space.axpy(share, total, space.copy(old))
        return {
            "center": space.axpy(1.0, update, c),
            "block_update": space.axpy(1.0, gathered, old),
            GATHERED: space.zeros_like(gathered),
        }
