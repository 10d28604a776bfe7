"""What the environment says about the rendezvous of an elastic job; importing this imports no framework."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from hvd_periodic.arguments import require_int, seconds_in_environment
from hvd_periodic.comm.collective_tracker import CollectiveTracker
from hvd_periodic.comm.handshake import Record
from hvd_periodic.comm.local import LocalCommunicator

VARIABLE = "HVD_PERIODIC_RENDEZVOUS"
"""Environment variable with ``host:port`` of the rendezvous."""

RANKS = "HVD_PERIODIC_RANKS"
"""Environment variable with the minimum and the maximum number of ranks: ``2:8``; or one number for both."""

JOB = "HVD_PERIODIC_JOB"
"""Environment variable with the name of the job, which tells it from others at the same rendezvous."""

SECRET = "HVD_PERIODIC_SECRET"
"""Environment variable with a text that only the workers of the job know."""

LOST = "HVD_PERIODIC_LOST_SECONDS"
"""Environment variable: seconds without a sign of life after which a worker counts as lost."""

PATIENCE = "HVD_PERIODIC_JOIN_SECONDS"
"""Environment variable: seconds for which a worker waits until the minimum of ranks has come."""

NCCL = "HVD_PERIODIC_NCCL"
"""Environment variable: 1, if ranks exchange CUDA tensors over NCCL; 0: over Gloo."""

_ADDRESS = re.compile(r"(?P<host>[^\s:]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
_RANGE = re.compile(r"(\d+)(?::(\d+))?")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_UNLIMITED = 2**16


def rendezvous_asked() -> bool:
    """Return whether the environment names a rendezvous."""
    return bool(os.environ.get(VARIABLE, "").strip())


@dataclass(frozen=True)
class RendezvousSettings:
    """A rendezvous, and the terms on which this worker takes part.

    Attributes:
        host: the host of the rendezvous.
        port: its port.
        minimum: ranks below which nobody trains.
        maximum: ranks above which workers wait.
        job: name of the job.
        secret: a text that only the workers of the job know; empty: there is none.
        lost_seconds: seconds without a sign of life after which a worker counts as lost.
        join_seconds: seconds for which a worker waits for the minimum.
        nccl: whether ranks exchange CUDA tensors over NCCL.
    """

    host: str
    port: int
    minimum: int = 1
    maximum: int = _UNLIMITED
    job: str = "job"
    secret: str = ""
    lost_seconds: float = 10.0
    join_seconds: float = 600.0
    nccl: bool = False

    @property
    def one_host(self) -> bool:
        """Whether only workers of this host can reach the rendezvous."""
        return self.host in _LOCAL

    @property
    def terms(self) -> dict[str, str]:
        """What has to be equal in all workers of a job, in words by what it is."""
        over = "NCCL" if self.nccl else "Gloo"
        return {"the number of ranks": f"{self.minimum} to {self.maximum}", "what carries CUDA tensors": over}

    @classmethod
    def of_environment(cls, min_ranks: int | None = None, max_ranks: int | None = None) -> RendezvousSettings:
        """Return the settings of the environment.

        Args:
            min_ranks: the minimum, if the environment does not say it.
            max_ranks: the maximum, likewise.

        Raises:
            TypeError: a number of ranks is no int.
            ValueError: a variable or an argument has an invalid value; or they contradict each other.
        """
        text = os.environ.get(VARIABLE, "").strip()
        address = _ADDRESS.fullmatch(text)
        if address is None or not 0 < int(address["port"]) < 2**16:
            raise ValueError(
                f"The environment variable {VARIABLE} must be the host:port of an hvdp rendezvous. Received: {text!r}"
            )
        nccl = os.environ.get(NCCL, "").strip() or "0"
        if nccl not in ("0", "1"):
            raise ValueError(f"The environment variable {NCCL} must be 0 or 1. Received: {nccl!r}")
        least, most = _numbers_of_ranks(min_ranks, max_ranks)
        return cls(
            address["host"],
            int(address["port"]),
            least,
            most,
            os.environ.get(JOB, "").strip() or cls.job,
            os.environ.get(SECRET, ""),
            seconds_in_environment(LOST, cls.lost_seconds, 1, "at least 1"),
            seconds_in_environment(PATIENCE, cls.join_seconds, 1, "at least 1"),
            nccl == "1",
        )


def _numbers_of_ranks(min_ranks: int | None, max_ranks: int | None) -> tuple[int, int]:
    """Return the minimum and the maximum number of ranks, of the environment or of a state."""
    text = os.environ.get(RANKS, "").strip()
    found = _RANGE.fullmatch(text or f"1:{_UNLIMITED}")
    least, most = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= least <= most:
        raise ValueError(
            f"The environment variable {RANKS} must be the minimum and the maximum number of ranks, as in 2:8, or "
            f"one number for both. Received: {text!r}"
        )
    low = least if min_ranks is None else require_int(min_ranks, "`min_ranks`", minimum=1)
    high = most if max_ranks is None else require_int(max_ranks, "`max_ranks`", minimum=1)
    if low > high:
        raise ValueError(f"`max_ranks` must be at least `min_ranks`. Received: min_ranks={low}, max_ranks={high}")
    if text and (low, high) != (least, most):
        raise ValueError(
            f"`min_ranks` and `max_ranks` are {low} and {high}, and the environment variable {RANKS} says {text}: say "
            "it in one place"
        )
    return low, high


class AwaitedRanks(LocalCommunicator):
    """The ranks of an elastic job that this process has not joined yet: optimizers are constructed with them.

    Args:
        between_islands: whether this process takes part together with the other ranks of an island.
    """

    description = "the ranks of a rendezvous"
    elastic = True
    sums = frozenset({"f2"})
    """Those of torch.distributed over Gloo."""

    def __init__(self, between_islands: bool = False) -> None:
        super().__init__()
        self.between_islands = between_islands
        self.tracker = CollectiveTracker("", 0, [0])  # It keeps `timeout_seconds` until there are ranks.

    def rank_of(self, global_rank: int | None) -> int:
        """Return the rank as it is: the ranks are not known."""
        return 0 if global_rank is None else require_int(global_rank, "`root_rank`", minimum=0)

    def handshake(self, record: Record, failure: Exception | None = None, piggyback: Any = None) -> Any:
        """Raise a RuntimeError, as there is nobody to meet."""
        raise RuntimeError(
            f"{VARIABLE} is set, and this process has not joined the other ranks: put model and optimizer into an "
            "hvdp.elastic.State, and train in a function under hvdp.elastic.run"
        )
