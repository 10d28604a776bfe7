"""The interface of policies for parameters, and the options with which they may not go together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.wires.base import Wire


class LocalOptimizer(Protocol):
    """A local optimizer, as exchanges of tables see it."""

    def moves_untouched(self, names: Collection[str]) -> str | None:
        """Return, in words, what moves rows without gradients of some parameters; None if nothing does."""


@dataclass(frozen=True)
class Setting:
    """The options of a synchronizer that policies check.

    Attributes:
        replica: knows which parameters have which policy.
        algorithm: the algorithm, in the variant that runs.
        asynchronous: whether workers exchange with the center without waiting for each other.
        quorum: the number of ranks that a round waits for; None: all.
        center: the name of the center's placement.
        wire: the encoding of the messages.
        fragments: the number of fragments.
        optimizer_state: the policy for the state of the local optimizer.
        local_optimizer: the local optimizer; None if it is not known.
        bounds: the bounds on norms; None if there are none.
        schedule: the schedule.
    """

    replica: Replica[Any]
    algorithm: Algorithm
    asynchronous: bool
    quorum: int | None
    center: str
    wire: Wire
    fragments: int
    optimizer_state: LocalState
    local_optimizer: LocalOptimizer | None
    bounds: object
    schedule: Schedule

    def refuse_averaged_gradients(self) -> None:
        """Raise a ValueError if gradients are averaged at first, with those of ranks that have other parameters."""
        if self.schedule.synchronous_until is not None:
            raise ValueError(
                "`parameters` cannot be 'local', 'broadcast' or 'present' as long as gradients are averaged over the "
                f"ranks that exchange, as in {self.schedule!r}: leave out PostLocal, or `parameters`"
            )


class Policy(ABC):
    """Says how parameters take part in exchanges, and what that does not go together with.

    Attributes:
        name: the users' name for the policy.
        exchanged: whether the algorithm acts on the parameters.
        described: the parameters in words, on which ranks have to agree, after "parameters"; empty if nothing depends
            on this.
        known_early: whether their messages can be formed before the handshake.
    """

    name: ClassVar[str]
    exchanged: ClassVar[bool] = True
    described: ClassVar[str] = ""
    known_early: ClassVar[bool] = True

    @abstractmethod
    def check(self, setting: Setting) -> None:
        """Raise a ValueError if parameters cannot have this policy in a setting; asked at construction."""

    def problem(self, setting: Setting) -> str | None:
        """Return why parameters cannot have this policy any more, or None; asked at construction and every exchange."""
        return None

    def layout(self, replica: Replica[Any]) -> Layout:
        """Return the layout in which messages of these parameters are formed, and those of all others.

        It is derived from ``replica.parameters.layout``, which other policies may have changed before.
        """
        return replica.parameters.layout
