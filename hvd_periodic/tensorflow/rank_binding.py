"""The ranks of a Keras optimizer, which no file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import isfunction
from typing import Any, TypeVar, cast

from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.local import LocalCommunicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.rendezvous_settings import AwaitedRanks
from hvd_periodic.ranks import named
from hvd_periodic.tensorflow.communicator import FRONT_END, TensorFlowCommunicator, communicator_of
from hvd_periodic.tensorflow.gradient_averaging import GradientAverage, is_distributed

T = TypeVar("T")

RANKS = ("process_set", "averaged")
"""Keys of a configuration: the ranks that exchanged, and the ranks whose gradients were averaged inside."""


class UnboundRanks(LocalCommunicator):
    """Replaces the ranks of a loaded optimizer until it is trained: loading and evaluating do not communicate."""

    @property
    def sums(self) -> frozenset[str]:  # type: ignore[override]
        """Those of the library over which ranks will exchange."""
        return MPICommunicator.sums if FRONT_END.library() == "mpi" else HorovodCommunicator.sums


class RankBinding:
    """The ranks that exchange, and the ranks whose gradients are averaged inside.

    A saved configuration only tells which ranks they were. :meth:`attach` gives a loaded optimizer its ranks, and its
    first step connects it to them.

    Args:
        process_set: the ranks that exchange, as passed by the user; :class:`UnboundRanks` for a loaded optimizer.
        timeout_seconds: longest time that ranks wait for each other.

    Attributes:
        loaded: whether the optimizer was loaded.
        waits: whether ranks meet at the first step instead of at construction: the optimizer was loaded, or the job is
            elastic, where other ranks may have constructed theirs long before.
        communicator: the ranks that exchange.
        name: prefix of the names of their collectives.
        average: how an ``hvd.DistributedOptimizer`` inside averages gradients, if there is one.
    """

    def __init__(self, process_set: Any, timeout_seconds: float | None = None) -> None:
        self.loaded = isinstance(process_set, UnboundRanks)
        self.communicator = communicator_of(process_set)
        self.waits = self.loaded or self.communicator.elastic
        self.name = "alone" if self.waits else self.communicator.unique_name(timeout_seconds)
        self.average: GradientAverage | None = None
        self._timeout_seconds = timeout_seconds
        self._process_set: Any = None if self.loaded else process_set
        self._saved: Mapping[str, list[int] | None] = dict.fromkeys(RANKS)

    @property
    def gradient_group(self) -> TensorFlowCommunicator | None:
        """The ranks whose gradients are averaged; None if there are none."""
        return None if self.average is None else self.average.communicator

    def config(self) -> dict[str, list[int] | None]:
        """Return the numbers of the ranks, for :meth:`remember`."""
        given: Any = self._process_set
        numbered = given is not None and not isinstance(given, Communicator)
        process_set = sorted(self._ranks_of(given)) if numbered else self._saved["process_set"]
        averaged = self._saved["averaged"] if self.gradient_group is None else self.gradient_group.ranks
        return {"process_set": process_set, "averaged": averaged}

    def _ranks_of(self, process_set: Any) -> Iterable[int]:
        """Return the ranks of a process set or function; after ``hvd.shutdown()``, the function's earlier result."""
        if isfunction(process_set) and FRONT_END.horovod() is not None:
            return cast(Iterable[int], process_set())
        ranks: Iterable[int] | None = getattr(process_set, "ranks", None)
        return self.communicator.global_ranks if ranks is None else ranks

    def remember(self, config: Mapping[str, Any]) -> None:
        """Store the ranks that a saved optimizer had."""
        self._saved = {key: config.get(key) for key in self._saved}

    def attach(self, process_set: Any, distributed: Any) -> None:
        """Set the given ranks, see ``PeriodicOptimizer.attach``."""
        if process_set is not None:
            self._process_set = process_set
        if distributed is not None:
            if not is_distributed(distributed):
                raise TypeError(
                    f"`distributed` must be an hvd.DistributedOptimizer. Received: {type(distributed).__name__}"
                )
            self.average = GradientAverage(distributed)

    def follow(self, other: RankBinding) -> None:
        """Use the ranks of the optimizer of which this one is a copy; before the first step."""
        self._process_set, self.average, self._saved = other._process_set, other.average, other._saved

    def build(self, build: Callable[[], T]) -> T:
        """Return ``build()``, or raise on all ranks that meet at construction if it raises on any."""
        return build() if self.waits else build_on_all(self.communicator, self.name, build)

    def connect(self) -> None:
        """Connect to ranks that did not meet at construction, under the next unique name.

        Raises:
            RuntimeError: elastic Horovod has changed the ranks since construction.
        """
        if (changed := self.communicator.changed()) is not None:
            raise RuntimeError(changed)
        self.communicator = self.ranks()
        self.name = self.communicator.unique_name(self._timeout_seconds)

    def ranks(self) -> Communicator:
        """Return the ranks that exchange, even before a loaded optimizer is connected; does not communicate."""
        return communicator_of(self._process_set)

    def ranks_of_file(self) -> Communicator:
        """Return :meth:`ranks`, on which this rank's part of a loaded optimizer's state depends.

        Raises:
            RuntimeError: Horovod is not initialized, or does not have these ranks yet; or a rendezvous has not.
        """
        known_later = "call hvd.init() before the file is loaded, or load it with compile=False"
        try:
            ranks = self.ranks()
            if self.loaded and isinstance(ranks, AwaitedRanks):
                known_later = "load the file with compile=False"
                raise RuntimeError("the ranks of an elastic job are not known before it has begun")
            return ranks
        except RuntimeError as error:
            if not self.loaded:
                raise
            raise RuntimeError(
                "The part of this optimizer's state that a rank holds depends on the number of ranks, because it was "
                "made with asynchronous=True, a quorum, a center other than 'replicated', or a compression whose sums "
                f"are kept: {known_later} ({error})"
            ) from error

    def any_in_group(self, value: bool) -> bool:
        """Return whether ``value`` is true on any of the ranks that average gradients with this one."""
        if self.gradient_group is None:
            return value
        return any(self.gradient_group.allgather_object(value, f"{self.name}.group"))

    def refuse_other_ranks(self, gradient_group: TensorFlowCommunicator | None) -> None:
        """Raise a ValueError if a loaded optimizer had a process set, or gradients averaged inside, and now has not.

        ``gradient_group``: the ranks whose gradients are averaged, here or in an optimizer inside.
        """
        if self._saved["process_set"] is not None and self._process_set is None:
            raise ValueError(
                f"This optimizer was trained on the process set of {named(self._saved['process_set'])}: after loading, "
                "call optimizer.attach(process_set=...)"
            )
        if self._saved["averaged"] is not None and gradient_group is None:
            raise ValueError(
                f"This optimizer was around an hvd.DistributedOptimizer over {named(self._saved['averaged'])}: after "
                "loading, call optimizer.attach(distributed=hvd.DistributedOptimizer(keras.optimizers.SGD(), ...))"
            )
