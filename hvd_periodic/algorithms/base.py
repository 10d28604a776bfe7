"""The interface of all algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

from hvd_periodic.spellings import rename_members
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")
Optimizer = TypeVar("Optimizer")

State: TypeAlias = dict[str, V]
"""Vectors by name, kept by a worker or with the center; the center itself is ``"center"``."""


@dataclass(frozen=True)
class Exchange:
    """What an algorithm knows about an exchange.

    Attributes:
        size: number of workers n.
        period: local steps that the schedule planned for this exchange (τ); at least 1.
        gradients: gradients that this worker accumulated since the last exchange; at least 1, even if there were none.
        learning_rate: learning rate of the local optimizers for the elements being computed (γ); None for algorithms
            that do not use it.
        weight: weight of this worker's message in a mean over workers, w_i n / Σ_j w_j; None if all weights are equal.
            Algorithms can ignore it: the caller multiplies their messages by it.
        cut: factor below 1 that reduces this worker's message to the largest norm allowed; None if it is not reduced.
            Algorithms can ignore it, too.
        presence: for parameters that only workers with gradients contribute to, by name: this worker's weight among
            those, w_i p_i n / Σ_j w_j p_j, with p_i = 1 on a worker with gradients and 0 on another; None if no worker
            had any, so that the parameter stays as it is. Algorithms can ignore it, too.
        rates: learning rate of every tensor on the worker that pushes, in asynchronous exchange, for algorithms that
            use it. Algorithms can ignore it: the caller sets ``learning_rate`` from it.
        staleness: in asynchronous exchange, pushes of other workers since this worker took the center.
        completes: in asynchronous exchange, whether this push completes a window of n pushes.
        speed: in asynchronous exchange, local steps per second of the worker that pushes, in the period that ends; 0 if
            unknown. Algorithms can ignore it: schedules go by it.

    In a compiled graph, all attributes but ``size`` are scalars of the graph.
    """

    size: int
    period: float
    gradients: float = 1
    learning_rate: Any = None
    weight: Any = None
    cut: Any = None
    presence: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    rates: Sequence[float] = field(default=(), hash=False)
    staleness: int = 0
    completes: bool = False
    speed: float = 0.0


class Algorithm(ABC):
    """One exchange, as functions of vectors: ``message`` and ``pull`` on each worker, ``move`` where the center lives.

        h   = publish(c)                     the values that workers see, by default the center itself
        m_i = message(x_i, h)
        c'  = move(c, Σ_i m_i)               c and all vectors that belong to it
        h'  = publish(c')
        x_i = pull(x_i, h or h')

    All functions are elementwise, so that the center can be cut anywhere. An algorithm holds hyper-parameters only;
    all vectors are passed in, and the verbs of the vector space are its only arithmetic. All constructor arguments
    have defaults.

    This file and the algorithm's own file define an algorithm completely: no other file names it.

    Attributes:
        reduction: how messages are reduced: ``"sum"`` or ``"max"`` over workers, or the ``"root"``'s message alone.
        reads_before: ``message`` needs the published center.
        reads_after: ``pull`` needs the center that is published after the move; otherwise it takes the values that
            ``message`` saw.
        uses_learning_rate: ``move`` reads ``exchange.learning_rate``.
        consumed_state: name of the worker's vector that a message consumes, if there is one: it is reset to zeros.
            Until ``pull``, its memory may hold the total.
        taken_state: name of the worker's vector, if there is one, that is set to the replica after every pull, as the
            replica then holds it; in asynchronous exchange, where a worker whose pushes the center does not have, after
            a load, takes the center.
        uses_error_feedback: the part of a message that a lossy wire does not send is added to the next message;
            otherwise it stays in the replica, which ``pull_sent`` moves.
        takes_outer_optimizer: an optimizer of the framework may replace ``move``: it descends on the result of
            ``gradient`` for the total.
        needs_outer_optimizer: an optimizer of the framework must replace ``move``; by default a copy of the local one.
    """

    reduction: ClassVar[str] = "sum"
    reads_before: ClassVar[bool] = True
    reads_after: ClassVar[bool] = True
    uses_learning_rate: ClassVar[bool] = False
    consumed_state: ClassVar[str | None] = None
    taken_state: ClassVar[str | None] = None
    uses_error_feedback: ClassVar[bool] = True
    takes_outer_optimizer: ClassVar[bool] = False
    needs_outer_optimizer: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_members(cls, **_FORMER)

    @property
    def uses_gradients(self) -> bool:
        """Whether ``local`` must see every local gradient before the local update."""
        return False

    @property
    def takes_mean(self) -> bool:
        """Whether ``move`` needs only the total divided by n: a mean, in which workers may have different weights."""
        return False

    def share_of_worker(self, exchange: Exchange) -> float:
        """Return the factor that ``message`` has applied to a worker's contribution, and bounds on its norm undo."""
        return 1.0

    def share_of_mean(self, exchange: Exchange) -> float | None:
        """Return the factor that makes the total what the center steps by, and what bounds on norms apply to.

        None if the center takes no such outer step: the default unless ``move`` takes a mean.
        """
        return 1 / exchange.size if self.takes_mean else None

    def check(self, size: int) -> None:
        """Raise a ValueError if the hyper-parameters make no sense for ``size`` workers."""

    def contraction(self, exchange: Exchange) -> float | None:
        """Return the fraction of the distance between the center and the mean of the replicas that an exchange removes.

        None if it is not constant.
        """
        return None

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm as text, for logs, with the values in force at this exchange in place of defaults."""
        return str(self)

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the variant for asynchronous training, in which ``size`` workers exchange one at a time.

        Its ``message`` reads only the center and x; or, without ``reads_before``, only x and the worker's vectors. Its
        ``move`` runs in host memory, one bucket at a time, under a lock, and may assume that the total is the message
        of one worker. What ``init_center`` returns is kept with the center.

        Raises:
            ValueError: there is no such variant, which is the default.
        """
        raise ValueError(
            f"{type(self).__name__} is for synchronous exchange, in which all workers take part. With "
            "asynchronous=True, use another algorithm, or implement `asynchronous_variant`"
        )

    def outer_optimizer(self, local: Optimizer, given: Optimizer | None) -> Optimizer | None:
        """Return the optimizer of the framework that moves the center, for the front end to adapt; None for ``move``.

        Args:
            local: the local optimizer.
            given: the outer optimizer that the user passed.

        Raises:
            ValueError: this algorithm takes no outer optimizer.
        """
        if given is not None and not self.takes_outer_optimizer:
            raise ValueError(
                f"{type(self).__name__} moves the center by itself and takes no outer optimizer. Received: "
                f"{type(given).__name__}"
            )
        return local if given is None and self.needs_outer_optimizer else given

    def init_worker(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the worker's own vectors at the start of training; all workers hold the same ``x``."""
        return {}

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center and its vectors at the start of training; their names differ from the worker's."""
        return {"center": space.copy(x)}

    def local(self, space: VectorSpace[V], x: V, g: V, worker: State[V]) -> tuple[V, State[V]]:
        """Return the gradient for the local update, and the worker's vectors; may overwrite ``g`` and ``worker``."""
        return g, worker

    @abstractmethod
    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return this worker's term of the sum, and the changes to its own vectors.

        Zero if it has nothing to contribute. May be written into ``out``; may overwrite the worker's vectors.

        Args:
            space: the verbs.
            x: the replica.
            worker: the worker's own vectors.
            center: the published center; undefined without ``reads_before``.
            exchange: the present exchange.
            out: a vector of this size, if there is one; it may be the memory of the vector named by ``consumed_state``.
        """

    def weighed(self, space: VectorSpace[V], message: V, exchange: Exchange) -> V:
        """Return the message to send, times ``w_i n / Σ_j w_j`` if workers have different weights in a mean.

        Zeros if this worker does not count, whatever its message holds. May overwrite the message.
        """
        if exchange.weight is None or not self.takes_mean:
            return message
        return space.weigh(exchange.weight, message)

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return the changes to the center's vectors, given the ``total`` of the messages; may overwrite all."""
        raise NotImplementedError(f"{type(self).__name__} moves the center by an outer optimizer")

    def gradient(self, space: VectorSpace[V], total: V, exchange: Exchange) -> V:
        """Return the gradient for an outer optimizer, given the ``total`` of the messages; may overwrite ``total``."""
        return total

    def publish(self, space: VectorSpace[V], center: State[V], exchange: Exchange) -> V:
        """Return the values that workers see instead of the center; overwrites nothing."""
        return center["center"]

    @abstractmethod
    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the new replica, and the changes to the worker's own vectors; may overwrite all but the center.

        The replica may be the center itself: it is copied into the parameters at once.
        """

    def pull_sent(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, sent: V, exchange: Exchange
    ) -> tuple[V, State[V]]:
        """Return the result of ``pull`` if only the part ``sent`` was sent; may overwrite whatever ``pull`` may.

        For algorithms without ``uses_error_feedback``; the center is the one that ``message`` saw.
        """
        raise NotImplementedError(f"{type(self).__name__} uses error feedback")

    def catch_up(self, space: VectorSpace[V], x: V, snapshot: V, pulled: V, out: V | None = None) -> V:
        """Return the replica after a pull that is some local steps late; may overwrite the replica.

        ``x + (pulled − snapshot)``, so that no local progress is lost; Shen et al. 2019, arXiv 1906.12043.

        Args:
            space: the verbs.
            x: the present replica.
            snapshot: the replica from which the message was formed.
            pulled: the result of ``pull`` for the snapshot.
            out: a vector of this size for intermediate results, if there is one; it may hold ``pulled``.
        """
        return space.axpy(1.0, space.sub(pulled, snapshot, out=out), x)


_FORMER = {
    "spent": "consumed_state",
    "keeps_error": "uses_error_feedback",
    "closes": "contraction",
    "one_by_one": "asynchronous_variant",
    "hand_out": "publish",
}
"""Names of version 0.1."""

rename_members(Algorithm, **_FORMER)
