"""What every algorithm provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")
Optimizer = TypeVar("Optimizer")

State: TypeAlias = dict[str, V]
"""Vectors by name: what a worker keeps, or what is kept with the center; the center itself is ``"center"``."""


@dataclass(frozen=True)
class Exchange:
    """What an algorithm may know of the exchange it takes part in.

    Attributes:
        size: number of workers n.
        period: local steps that the schedule planned for this exchange (τ); at least 1.
        gradients: gradients that this worker accumulated since the last exchange; at least 1, where there were none as
            well.
        learning_rate: of the local optimizers, for the elements at hand (γ); None for algorithms that do not ask.
        weight: how much the message of this worker counts in a mean over workers, w_i n / Σ_j w_j; None where all count
            alike. Algorithms need not look: their messages are multiplied by it.

    In a compiled graph, all but the size are scalars of it.
    """

    size: int
    period: float
    gradients: float = 1
    learning_rate: Any = None
    weight: Any = None


class Algorithm(ABC):
    """One exchange, as functions of vectors: ``message`` and ``pull`` on each worker, ``move`` where the center lives.

        h   = hand_out(c)                    what workers see of the center, by default the center itself
        m_i = message(x_i, h)
        c'  = move(c, Σ_i m_i)               c with all vectors that belong to it
        h'  = hand_out(c')
        x_i = pull(x_i, h or h')

    All act on elements one by one, so that the center may be cut anywhere. An algorithm holds hyper-parameters only;
    all vectors are passed in, and the verbs of the vector space are its only arithmetic. All arguments of a constructor
    have defaults.

    What is written in this file and in that of an algorithm is all there is to an algorithm: no other file names it.

    Attributes:
        reduction: what becomes of the messages, ``"sum"`` or ``"max"`` over workers, or the ``"root"``'s alone.
        reads_before: ``message`` needs what the center hands out.
        reads_after: ``pull`` needs what the center hands out after it has moved; otherwise it takes what ``message``
            saw.
        uses_learning_rate: ``move`` reads ``exchange.learning_rate``.
        spent: name of the worker's vector that a message has used up, if there is one: it becomes zeros. Until ``pull``
            its memory may hold the total.
        keeps_error: what a lossy wire leaves of a message is added to the next one; otherwise it stays in the replica,
            which ``pull_sent`` moves.
        takes_outer_optimizer: an optimizer of the framework may take the place of ``move``: it descends on what
            ``gradient`` makes of the total.
        needs_outer_optimizer: it has to; by default it is a copy of the local one.
    """

    reduction: ClassVar[str] = "sum"
    reads_before: ClassVar[bool] = True
    reads_after: ClassVar[bool] = True
    uses_learning_rate: ClassVar[bool] = False
    spent: ClassVar[str | None] = None
    keeps_error: ClassVar[bool] = True
    takes_outer_optimizer: ClassVar[bool] = False
    needs_outer_optimizer: ClassVar[bool] = False

    @property
    def uses_gradients(self) -> bool:
        """Whether ``local`` must see every local gradient before the local update."""
        return False

    @property
    def takes_mean(self) -> bool:
        """Whether the total divided by n is all that ``move`` takes: a mean, in which some workers may count more."""
        return False

    def check(self, size: int) -> None:
        """Raise a ValueError when the hyper-parameters make no sense for ``size`` workers."""

    def closes(self, exchange: Exchange) -> float | None:
        """Return the part of a distance between the center and the mean of the replicas that an exchange takes away.

        None where that is no constant.
        """
        return None

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm in words, for logs, with the values in force at such an exchange as its defaults."""
        return str(self)

    def one_by_one(self, size: int) -> Algorithm:
        """Return the algorithm with which ``size`` workers exchange one by one, each on its own clock.

        Its ``message`` reads the center and x alone, or the worker's vectors alone; its ``move`` may assume that the
        total is the message of one worker.

        Raises:
            ValueError: there is none; so it is unless an algorithm says otherwise.
        """
        raise ValueError(
            f"{type(self).__name__} is for synchronous exchange: all workers have to meet. For asynchronous=True there "
            "are elastic averaging and accumulated gradient normalization"
        )

    def outer_optimizer(self, local: Optimizer, given: Optimizer | None) -> Optimizer | None:
        """Return the optimizer of the framework that moves the center, which the front end adapts; None for ``move``.

        Args:
            local: the local optimizer.
            given: what the user passed as outer optimizer.

        Raises:
            ValueError: this algorithm takes none.
        """
        if given is not None and not self.takes_outer_optimizer:
            raise ValueError(
                f"{type(self).__name__} moves the center by itself and takes no outer optimizer. Received: "
                f"{type(given).__name__}"
            )
        return local if given is None and self.needs_outer_optimizer else given

    def init_worker(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the worker's own vectors when training starts; all workers hold the same ``x``."""
        return {}

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center when training starts, and what belongs to it; the names are none of the worker's."""
        return {"center": space.copy(x)}

    def local(self, space: VectorSpace[V], x: V, g: V, worker: State[V]) -> tuple[V, State[V]]:
        """Return the gradient for the local update, and the worker's vectors; may overwrite ``g`` and these."""
        return g, worker

    @abstractmethod
    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return what this worker adds to the sum, and what changes of its own vectors.

        Zero where it has nothing to say. May be written into ``out``; may overwrite the worker's vectors.

        Args:
            space: the verbs.
            x: the replica.
            worker: its own vectors.
            center: what the center hands out; without ``reads_before``, not to be used.
            exchange: which it is.
            out: a vector of this size, if there is one; it may be the memory of the vector named by ``spent``.
        """

    def weighed(self, space: VectorSpace[V], message: V, exchange: Exchange) -> V:
        """Return what travels of a message, ``w_i n / Σ_j w_j`` of it where workers count differently in a mean.

        Nothing where this worker does not count, whatever its message holds. May overwrite the message.
        """
        if exchange.weight is None or not self.takes_mean:
            return message
        return space.weigh(exchange.weight, message)

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return what changes of the center's vectors, given the ``total`` of the messages; may overwrite all."""
        raise NotImplementedError(f"{type(self).__name__} moves the center by an outer optimizer")

    def gradient(self, space: VectorSpace[V], total: V, exchange: Exchange) -> V:
        """Return what an outer optimizer descends on, given the ``total`` of the messages; may overwrite it."""
        return total

    def hand_out(self, space: VectorSpace[V], center: State[V], exchange: Exchange) -> V:
        """Return what workers see of the center; overwrites nothing."""
        return center["center"]

    @abstractmethod
    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the new replica, and what changes of the worker's own vectors; may overwrite all but the center.

        The replica may be the center itself: it is copied into the parameters at once.
        """

    def pull_sent(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, sent: V, exchange: Exchange
    ) -> tuple[V, State[V]]:
        """Return what ``pull`` does, where only a part of the message has been ``sent``; may overwrite what it may.

        Without ``keeps_error``; the center is the one that ``message`` saw.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps what a lossy wire leaves")

    def catch_up(self, space: VectorSpace[V], x: V, snapshot: V, pulled: V, out: V | None = None) -> V:
        """Return the replica that takes a pull some local steps late; may overwrite the replica.

        So that no local progress is lost, ``x + (pulled − snapshot)``; Shen et al. 2019, arXiv 1906.12043.

        Args:
            space: the verbs.
            x: the replica now.
            snapshot: the replica that the message was formed from.
            pulled: what ``pull`` makes of the snapshot.
            out: a vector of this size for what is computed on the way, if there is one; ``pulled`` may be in it.
        """
        return space.axpy(1.0, space.sub(pulled, snapshot, out=out), x)
