"""What one rank exchanges: its tensors in groups, by which algorithm, and what moves the center."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.algorithms.broadcast import Broadcast
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.algorithms.statistics import Statistics
from hvd_periodic.arguments import outer_name
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.base import Communicator
from hvd_periodic.outer.framework import Hyperparameters, NoOuterOptimizer, OuterOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")


class Tensors(NamedTuple):
    """Tensors of one kind, and what an exchange makes of them.

    Attributes:
        name: names them in collectives and in saved states.
        values: of this rank.
        algorithm: what an exchange computes.
    """

    name: str
    values: Store[Any]
    algorithm: Algorithm


@dataclass(frozen=True)
class Exchanged(Generic[V]):
    """The replica of this rank, the algorithm, and what the algorithm asks for.

    Attributes:
        replica: the parameters of this rank, as a front end provides them.
        algorithm: what an exchange makes of them.
        outer: the optimizer of the framework that moves the center, if the algorithm takes one.
        rates: the learning rates of local steps, if the algorithm asks for them.

    Raises:
        ValueError: the algorithm takes no such optimizer; or it needs what is missing.
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
            raise ValueError(f"{name} moves the center by an optimizer: pass `{outer_name()}`")
        if self.algorithm.uses_learning_rate and self.rates is None:
            raise ValueError(f"{name} needs the learning rate of local steps: pass `optimizer`")

    @property
    def center_optimizer(self) -> OuterOptimizer:
        """What moves the center; one that does nothing, where the algorithm does."""
        return NoOuterOptimizer() if self.outer is None else self.outer

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The settings on which ranks have to agree before they move the center."""
        return self.rates if self.algorithm.uses_learning_rate and self.rates is not None else self.center_optimizer

    def tensors(self) -> list[Tensors]:
        """Return all that is exchanged: the parameters first, then statistics, by fixed rules."""
        replica = self.replica
        kinds = [
            ("parameters", replica.parameters, self.algorithm),
            ("buffers", replica.buffers, Statistics()),
            ("integers", replica.integers, Maximum()),
            ("from_root", replica.from_root, Broadcast()),
        ]
        return [Tensors(name, values, algorithm) for name, values, algorithm in kinds if values is not None]

    def groups(
        self,
        tensors: Sequence[Tensors],
        placements: Sequence[Placement],
        overlapped: bool = False,
        wire: Wire = Plain(),  # noqa: B008
        communicator: Communicator | None = None,
    ) -> list[TensorGroup[V]]:
        """Return the groups with their centers, each where its placement says.

        The first, of the parameters, has the outer optimizer and the wire; its exchanges may last. Statistics travel
        as they are, and are waited for.
        """
        rates = self.rates if self.algorithm.uses_learning_rate else None
        parameters, *statistics = zip(tensors, placements, strict=True)
        return [
            TensorGroup(
                *parameters[0],
                self.replica,
                parameters[1],
                self.outer,
                rates,
                overlapped=overlapped,
                wire=wire,
                communicator=communicator,
            ),
            *(TensorGroup(*kind, self.replica, placement) for kind, placement in statistics),
        ]
