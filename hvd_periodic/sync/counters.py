"""What a rank has done so far, and what it has noted for its schedule: plain values, which a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Counters:
    """What a synchronizer has done so far, and where it stands in its schedule.

    An exchange that fails is not counted: local steps aside, the counters are those of the last one that took place.

    Attributes:
        local_steps: iterations, whether or not the update ran.
        rounds: exchanges.
        skipped_updates: iterations whose update did not run: overflow under mixed precision, or another rank's while
            this one had run out of data.
        bytes_sent: bytes that this rank handed to collectives in exchanges.
        last_exchange: local steps at the last exchange.
        next_exchange: local steps at which the next exchange is due.
        gradients: gradients accumulated on this rank since the last exchange, for algorithms that use them.
        left_out: exchanges from which this rank was left out, as its replica was not finite.
        exchange_seconds: wall time spent in exchanges, waiting for other ranks included.
        pushes_missed: in asynchronous exchange, pushes of other workers between this worker's own, summed over its
            exchanges: the staleness of the center that its replica was pulled to before.
        staleness_max: the most of them at one exchange.
    """

    local_steps: int = 0
    rounds: int = 0
    skipped_updates: int = 0
    bytes_sent: int = 0
    last_exchange: int = 0
    next_exchange: int = 0
    gradients: int = 0
    exchange_seconds: float = 0.0
    pushes_missed: int = 0
    staleness_max: int = 0
    left_out: int = 0

    @property
    def staleness_mean(self) -> float:
        """Pushes of other workers per exchange of this one."""
        return self.pushes_missed / max(self.rounds, 1)


@dataclass(frozen=True)
class Notes:
    """What a rank keeps from one exchange to the next, besides the counters.

    Attributes:
        loss_sum: of the losses that were reported since the last exchange.
        losses: how many.
        memory: what the schedule asked to be remembered.
        since: what has happened since every fragment of the parameters was exchanged; empty where that is nothing.
    """

    loss_sum: float = 0.0
    losses: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)
    since: Sequence[Sequence[int]] = ()

    @property
    def loss(self) -> float | None:
        """The mean of what was reported; None if nothing was."""
        return self.loss_sum / self.losses if self.losses else None

    def reported(self, loss: float) -> Notes:
        """Return the notes with one more loss."""
        return replace(self, loss_sum=self.loss_sum + loss, losses=self.losses + 1)
