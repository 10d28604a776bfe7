"""Jobs whose ranks change: who decides which processes take part, and how training hears of a change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvd_periodic.comm.base import Communicator


class RanksLostError(RuntimeError):
    """A rank was lost in a collective; those that are left go on without it."""


class RanksJoinInterrupt(Exception):  # noqa: N818 - nothing has failed.
    """Processes wait to take part: all ranks meet them now, after a commit."""


class State(Protocol):
    """The state of a worker across changes of the ranks, as it is used here."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What has to be equal in all workers of a job, in words by what it is."""

    def sync(self) -> None:
        """Resume all ranks from the newest commit that all survivors hold."""

    def on_reset(self) -> None:
        """Switch to the new ranks, and restore the newest commit."""

    def forget(self) -> None:
        """Forget all commits: the others have gone on without this process, which joins as a new one."""


Function = Callable[..., Any]


class ElasticJob(ABC):
    """Decides which processes take part in a job: elastic Horovod, or a rendezvous of torch.distributed."""

    @abstractmethod
    def change_due(self, communicator: Communicator, news: Sequence[tuple[float, int]]) -> Exception | None:
        """Return the interrupt with which all ranks leave training now, if the ranks are about to change. Collective.

        Args:
            communicator: the current ranks.
            news: what Horovod has told this process since the last call: times, and results as flags.
        """

    @abstractmethod
    def run(self, function: Function, state: State, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``function(state, ...)``, called again with the new ranks after every change."""
