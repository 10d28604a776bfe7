"""The groups of tensors that a rank exchanges, and operations on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.algorithms.broadcast import Broadcast
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.algorithms.statistics import Statistics
from hvd_periodic.arguments import outer_name
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.agreement import ADVICE, audit
from hvd_periodic.comm.membership import Membership
from hvd_periodic.outer.framework import Hyperparameters, NoOuterOptimizer, OuterOptimizer
from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.participation.broadcast import Broadcast as Following
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")


class TensorGroups(Generic[V]):
    """All tensor groups of a rank: the parameters, and several kinds of statistics.

    Args:
        groups: the groups, the parameters first.
        replica: the replica of this rank.
        membership: the ranks that exchange the same tensors.

    Attributes:
        parameters: the group on which the algorithm acts.
        statistics: the groups that are exchanged with it by fixed rules: statistics, and parameters that follow the
            root.
    """

    def __init__(self, groups: Sequence[TensorGroup[V]], replica: Replica[V], membership: Membership) -> None:
        self._groups, self._replica, self._membership = list(groups), replica, membership
        self.parameters, self.statistics = self._groups[0], self._groups[1:]

    def __iter__(self) -> Iterator[TensorGroup[V]]:
        return iter(self._groups)

    @property
    def held_alike(self) -> list[TensorGroup[V]]:
        """The tensor groups whose centers are equal on all ranks that train together.

        If gradients are averaged within groups of ranks, centers of statistics differ between the ranks of a group.
        """
        return self._groups if self._membership.group is None else self._trained

    @property
    def _trained(self) -> list[TensorGroup[V]]:
        """The groups of parameters: those on which the algorithm acts, and those that follow the root."""
        return [self.parameters, *(group for group in self.statistics if group.name == FROM_ROOT)]

    def reset(self) -> None:
        """Set the centers to the values of this rank, and forget what was accumulated."""
        for group in self:
            group.reset()

    def restart(self) -> None:
        """Set the centers to the values of this rank, which are equal on all ranks, and average the statistics.

        Statistics were not averaged as long as gradients were.
        """
        self.reset()
        for group in self.statistics:
            self.send_store(group.center, self._membership.broadcaster(f"{group.name}.restart"))
            group.exchange(Exchange(self._membership.communicator.size, 1, 1))

    def give_values(self) -> None:
        """Give all ranks the root's parameters, statistics and constants."""
        for send in self._membership.broadcasters("values"):
            self.send_values(send)

    def give_statistics(self) -> None:
        """Give all ranks the root's centers of statistics, which a forward pass may have changed on each rank."""
        for group in self.statistics:
            if group.placement.everywhere:
                self.send_store(group.center, self._membership.broadcaster(group.name))

    def send_values(self, send: Callable[[Any], Any]) -> None:
        """Replace the values of this rank with the results of ``send``."""
        for group in self:
            self.send_store(group.values, send)
        if self._replica.constants is not None:
            self.send_store(self._replica.constants, send)
        self._replica.follow_weights()

    def send_store(self, store: Store[Any], send: Callable[[Any], Any]) -> None:
        """Replace the values of a store with the results of ``send``."""
        for bucket in store.layout.buckets:
            store.write(bucket, send(store.read(bucket, out=self._replica.scratch(bucket, 0))))

    def exchange_statistics(self, exchange: Exchange) -> int:
        """Exchange the statistics; return the bytes handed to collectives."""
        return sum(group.exchange(exchange) for group in self.statistics)

    def audit(self, advice: str = ADVICE) -> None:
        """Check that the replicated centers are bitwise equal on all ranks; collective.

        Raises:
            RuntimeError: the centers differ; names the ranks and the first tensor.
        """
        audit(
            self._membership.center_replicas,
            "center",
            lambda: (
                part
                for group in self.held_alike
                if group.placement.everywhere
                for store in group.center_state.values()
                for bucket in group.values.layout.buckets
                for part in named_parts(group.values.layout, bucket, self._replica.to_bytes(store.read(bucket)))
            ),
            advice,
        )

    def replica_digest(self) -> str:
        """Return a text that is equal on two ranks if neither has to take over the other's values."""
        return f"{self.digest(group.values for group in self._trained)} {self._replica.frozen().hex()}"

    def digest(self, stores: Iterable[Store[Any]]) -> str:
        """Return a text that is equal for bitwise equal values; empty without stores."""
        digest, any_store = hashlib.sha256(), False
        for store in stores:
            any_store = True
            for bucket in store.layout.buckets:
                digest.update(self._replica.to_bytes(store.read(bucket)))
        return digest.hexdigest() if any_store else ""

    def distance(self) -> Any:
        """Return ‖x − c‖₂; collective, unless every rank can read the center by itself."""
        replica, total = self._replica, 0.0
        for group in self._trained:
            for bucket in group.values.layout.buckets:
                x = group.values.read(bucket, out=replica.scratch(bucket, 0))
                center = group.fetch(bucket)
                d = replica.space.sub(x, center, out=replica.scratch(bucket, 1))
                total += replica.space.dot(d, d)
        return total**0.5


def named_parts(layout: Layout, bucket: Bucket, memory: bytes) -> Iterator[tuple[str, memoryview]]:
    """Yield the name of every tensor in a bucket with its part of the bucket's memory."""
    for piece in bucket.pieces:
        start, stop = (bucket.itemsize * place for place in (piece.offset, piece.offset + piece.stop - piece.start))
        yield layout.specs[piece.tensor].name, memoryview(memory)[start:stop]


class Tensors(NamedTuple):
    """Tensors of one kind, with the algorithm that exchanges them.

    Attributes:
        name: their name in collectives and in saved states.
        values: their values on this rank.
        algorithm: the algorithm.
    """

    name: str
    values: Store[Any]
    algorithm: Algorithm


@dataclass(frozen=True)
class ExchangeSpec(Generic[V]):
    """The replica of this rank, the algorithm, and the inputs of the algorithm.

    Attributes:
        replica: the parameters of this rank, as a front end provides them.
        algorithm: the algorithm that exchanges them.
        outer: the framework optimizer that moves the center, if the algorithm takes one.
        rates: the learning rates of local steps, if the algorithm needs them.

    Raises:
        ValueError: the algorithm does not take ``outer``, or it needs an input that is None.
    """

    replica: Replica[V]
    algorithm: Algorithm
    outer: OuterOptimizer | None = None
    rates: LearningRates | None = None

    def __post_init__(self) -> None:
        name = type(self.algorithm).__name__
        if self.outer is not None and not self.algorithm.takes_outer_optimizer:
            raise ValueError(f"{name} moves the center by itself and takes no outer optimizer")
        if self.algorithm.needs_outer_optimizer and self.outer is None:
            raise ValueError(f"{name} moves the center with an optimizer: pass `{outer_name()}`")
        if self.algorithm.uses_learning_rate and self.rates is None:
            raise ValueError(f"{name} needs the learning rate of local steps: pass `optimizer`")

    @cached_property
    def center_optimizer(self) -> OuterOptimizer:
        """The optimizer that moves the center; a no-op if the algorithm moves it by itself."""
        return NoOuterOptimizer() if self.outer is None else self.outer

    @cached_property
    def hyperparameters(self) -> Hyperparameters:
        """The hyper-parameters on which ranks have to agree before they move the center."""
        return self.rates if self.algorithm.uses_learning_rate and self.rates is not None else self.center_optimizer

    def tensors(self) -> list[Tensors]:
        """Return all exchanged tensors: the parameters first, then statistics, which follow fixed rules.

        A kind of which this rank holds no element, as shards of small parameters, is left out.
        """
        replica = self.replica
        kinds = [
            ("parameters", replica.parameters, self.algorithm),
            (FROM_ROOT, replica.parameters_from_root, Following.algorithm),
            ("buffers", replica.buffers, Statistics()),
            ("integers", replica.integers, Maximum()),
            ("from_root", replica.from_root, Broadcast()),
        ]
        return [
            Tensors(name, values, algorithm)
            for name, values, algorithm in kinds
            if values is not None and values.layout.buckets
        ]

    def groups(
        self,
        tensors: Sequence[Tensors],
        placements: Sequence[Placement],
        membership: Membership,
        overlapped: bool = False,
        wire: Wire = Plain(),  # noqa: B008
        error_decay: float = 1.0,
        bounds: NormBounds | None = None,
        keeps_taken: bool = False,
    ) -> list[TensorGroup[V]]:
        """Return the groups with their centers, each with its placement.

        The first group, the parameters, has the outer optimizer, the wire with its error decay and the bounds on norms,
        and its exchanges may overlap with local steps; its workers may keep what they took. Statistics are not encoded,
        and their exchanges do not overlap.
        """
        rates = self.rates if self.algorithm.uses_learning_rate else None
        parameters, *statistics = zip(tensors, placements, strict=True)
        return [
            TensorGroup(
                *parameters[0],
                self.replica,
                parameters[1],
                membership,
                self.outer,
                rates,
                overlapped,
                wire,
                error_decay,
                bounds,
                keeps_taken,
            ),
            *(TensorGroup(*kind, self.replica, placement, membership) for kind, placement in statistics),
        ]
