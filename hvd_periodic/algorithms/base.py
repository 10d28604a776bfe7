"""What every algorithm provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

from hvd_periodic.vector import VectorSpace

V = TypeVar("V")

State: TypeAlias = dict[str, V]
"""The vectors that an algorithm keeps per parameter vector, by name; ``"center"`` is always one of them."""


@dataclass(frozen=True)
class Exchange:
    """What an algorithm may know of the exchange it takes part in.

    Attributes:
        size: number of workers n.
        period: local steps that the schedule planned for this exchange (τ); at least 1.
        gradients: gradients that this worker accumulated since the last exchange; at least 1, where there were none as
            well.

    In a compiled graph, period and gradients are scalars of it.
    """

    size: int
    period: float
    gradients: float = 1


class Algorithm(ABC):
    """One exchange, as functions of vectors: ``message`` and ``pull`` on each worker, ``move`` where the center lives.

        m_i = message(x_i, c)
        c'  = move(c, Σ_i m_i)
        x_i = pull(x_i, c or c')

    All act on elements one by one, so that the center may be cut anywhere. An algorithm holds hyper-parameters only;
    all vectors are passed in, and the verbs of the vector space are its only arithmetic. All arguments of a constructor
    have defaults.

    Attributes:
        reduction: what becomes of the messages, ``"sum"`` or ``"max"`` over workers, or the ``"root"``'s alone.
        reads_before: ``message`` needs ``state["center"]``.
        reads_after: ``pull`` needs the center after it has moved; otherwise it takes the one that ``message`` saw.
        optimizes_center: an optimizer of its own, in place of ``move``, applies the sum of the messages to the center.
    """

    reduction: ClassVar[str] = "sum"
    reads_before: ClassVar[bool] = True
    reads_after: ClassVar[bool] = True
    optimizes_center: ClassVar[bool] = False

    @property
    def uses_gradients(self) -> bool:
        """Whether ``local`` must see every local gradient before the local update."""
        return False

    def check(self, size: int) -> None:
        """Raise a ValueError when the hyper-parameters make no sense for ``size`` workers."""

    def check_asynchronous(self, size: int) -> None:
        """Raise a ValueError where ``size`` workers cannot exchange one by one."""
        raise ValueError(f"{type(self).__name__} is for synchronous exchange: all workers have to meet")

    def init(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the state when training starts; all workers hold the same ``x``."""
        return {"center": space.copy(x)}

    def local(self, space: VectorSpace[V], x: V, g: V, state: State[V]) -> tuple[V, State[V]]:
        """Return the gradient for the local update, and the new state; may overwrite ``g`` and the state."""
        return g, state

    @abstractmethod
    def message(self, space: VectorSpace[V], x: V, state: State[V], exchange: Exchange, out: V | None = None) -> V:
        """Return what this worker adds to the sum; zero where it has nothing to say. May be written into ``out``."""

    def move(self, space: VectorSpace[V], center: V, total: V, exchange: Exchange) -> V:
        """Return the new center, given the ``total`` of the messages; may overwrite both."""
        raise NotImplementedError(f"{type(self).__name__} moves the center by an optimizer")

    @abstractmethod
    def pull(self, space: VectorSpace[V], x: V, state: State[V], exchange: Exchange) -> tuple[V, State[V]]:
        """Return the new replica, and what changes of the worker's own state; may overwrite all but the center.

        The replica may be the center itself: it is copied into the parameters at once.
        """
