"""Horovod over any process set, with native tensors of the framework whose Horovod module is given."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.collective_tracker import tracker_of
from hvd_periodic.comm.elastic import ElasticJob, Function, State
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.comm.local import started_alone, started_several
from hvd_periodic.comm.mpi import open_mpi_spins
from hvd_periodic.ranks import named

_EVERYONE = "hvd_periodic.0.meeting"
"""Name of the handshake of all ranks of the job."""


class HorovodCommunicator(JobCommunicator):
    """The ranks of a Horovod process set, exchanging tensors in place.

    Horovod's Average is never used: over Gloo, Horovod has no native average.

    Args:
        framework: the Horovod module, ``"horovod.torch"``.
        process_set: the ranks that exchange. Default: all.
        tensor: converts a numpy array to a tensor of the framework.

    Attributes:
        ranks: the global ranks of the process set.

    Raises:
        RuntimeError: ``hvd.init()`` has not been called, or the launcher has not told Horovod about the other ranks.
        ValueError: the process set is not registered, or this rank is not in it.
    """

    sums = frozenset({"f2"})

    def __init__(self, framework: str, process_set: Any, tensor: Callable[[np.ndarray], Any]) -> None:
        self._hvd: Any = horovod_module(framework)
        if not self._hvd.is_initialized():
            raise RuntimeError("Horovod is not initialized: call hvd.init() before the optimizer is constructed")
        _refuse_unknown_launcher(self._hvd.size())
        if process_set is None:
            process_set = self._hvd.global_process_set
        if getattr(process_set, "process_set_id", None) is None:
            raise ValueError(
                "`process_set` must be a registered Horovod process set: pass it to hvd.init(process_sets=[...]) or "
                f"to hvd.add_process_set() first. Received: {process_set}"
            )
        # Horovod may not have filled in the ranks of its global set when hvd.init() returns; they are known anyway.
        ranks = range(self._hvd.size()) if process_set.process_set_id == 0 else process_set.ranks
        if self._hvd.rank() not in ranks:
            raise ValueError(
                f"`process_set` must contain this rank ({self._hvd.rank()}): construct the optimizer only on the ranks "
                f"of the set. Received: {process_set}"
            )
        self._framework, self._tensor = framework, tensor
        self.native = type(tensor(np.zeros(1)))
        name = f"hvd_periodic.{process_set.process_set_id}.meeting"
        super().__init__(process_set, ranks, self._hvd.rank(), name)
        self._place = (self._hvd.rank(), self._hvd.size())
        self.shares_launcher = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 0)) > self._hvd.size()  # hvd.init(comm=...)
        self.host = self._hvd.rank() - self._hvd.local_rank()  # The first rank of the host.
        self.elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        self.tracker.elastic = self.elastic
        self.description = f"Horovod ({'MPI' if self._hvd.mpi_enabled() else 'Gloo'})"

    def unique_name(self, timeout_seconds: object = None, provisional: bool = False) -> str:
        """As of all communicators; with ``hvd.init(comm=...)`` also name the training, by the launcher's first rank."""
        name = super().unique_name(timeout_seconds, provisional)
        if self.shares_launcher and not self.training:
            launched = self.allgather_object(int(os.environ["OMPI_COMM_WORLD_RANK"]), "hvd_periodic.launched")
            self.training = f"training-of-rank-{min(launched)}"
        return name

    def changed(self) -> str | None:
        """Return how Horovod's ranks have changed since construction, as they do after a reset of elastic Horovod."""
        if not self._hvd.is_initialized():
            return "Horovod has been shut down"
        place = (self._hvd.rank(), self._hvd.size())
        if place == self._place:
            return None
        return (
            f"Horovod's ranks have changed: this was rank {self._place[0]} of {self._place[1]} when the optimizer "
            f"was constructed, and is rank {place[0]} of {place[1]} now. Under elastic Horovod, optimizers "
            "are kept in a State, of hvd_periodic.torch.elastic or hvd_periodic.tensorflow.elastic"
        )

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start an allreduce in place."""
        operation = {"sum": self._hvd.Sum, "max": self._hvd.Max}[op]
        return self._begun(self._hvd.allreduce_async_(buffer, name=name, op=operation, process_set=self.process_set))

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast in place; Horovod identifies the root by its global rank."""
        return self._begun(
            self._hvd.broadcast_async_(buffer, root_rank=self.ranks[root], name=name, process_set=self.process_set)
        )()

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start a reduce-scatter."""
        return self._begun(
            self._hvd.reducescatter_async(buffer, name=name, op=self._hvd.Sum, process_set=self.process_set)
        )

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into a new tensor."""
        return self.begin_allgather(buffer, name, out)()

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to gather into a new tensor."""
        return self._begun(self._hvd.allgather_async(buffer, name=name, process_set=self.process_set))

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to exchange parts, into a new tensor."""
        finish = self._begun(self._hvd.alltoall_async(buffer, name=name, process_set=self.process_set))
        return lambda: finish()[0]  # finish()[1]: how many elements came from each rank

    def _begun(self, handle: Any) -> Callable[[], Any]:
        """Return a function that waits for the collective of a handle, sleeping, and returns its result."""
        number = self.tracker.start_collective()

        def finish() -> Any:
            self.tracker.wait_for(number, partial(self._hvd.poll, handle))
            return self._hvd.synchronize(handle)

        return finish

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Any]]:
        """Start to send each rank its part, into a new tensor."""
        options = {"splits": self._tensor(counts), "name": name, "process_set": self.process_set}
        return self._begun(self._hvd.alltoall_async(buffer, **options))

    def of_array(self, array: np.ndarray) -> Any:
        """Return a tensor in host memory."""
        return self._tensor(array)

    def carries(self, kind: type) -> bool:
        """Return whether these are tensors of the framework."""
        return issubclass(kind, self.native)

    def tile(self, buffer: Any, times: int) -> Any:
        """Return ``times`` concatenated copies of a tensor."""
        return buffer.repeat(times)

    @property
    def busy_waits(self) -> bool:  # type: ignore[override]
        """Whether Open MPI spins while it waits, and this host has no spare cores for that."""
        return bool(self._hvd.mpi_enabled()) and open_mpi_spins(int(self._hvd.local_size()))

    def alive(self) -> bool:
        """Return whether Horovod has not been shut down, here or elsewhere."""
        return bool(self._hvd.is_initialized()) and super().alive()

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job are on one host."""
        return bool(self._hvd.local_size() == self._hvd.size())

    @property
    def on_this_host(self) -> tuple[int, int]:
        """This rank's position among the ranks of its host, and their number."""
        return int(self._hvd.local_rank()), int(self._hvd.local_size())

    def whole_job(self) -> HorovodCommunicator:
        """Return the communicator of all ranks of the job."""
        everyone = copy.copy(self)
        everyone.process_set = self._hvd.global_process_set
        everyone.tracker = tracker_of(_EVERYONE, self._hvd.rank(), range(self._hvd.size()))
        return everyone

    def started_mpi(self) -> bool:
        """Return whether Horovod runs on an MPI with support for threads."""
        return bool(self._hvd.mpi_enabled() and self._hvd.mpi_threads_supported())

    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Gather an array."""
        return np.asarray(self.allgather(self._tensor(array), name))

    def send_bytes(self, data: np.ndarray, counts: np.ndarray, name: str) -> tuple[np.ndarray, Sequence[int]]:
        """Send each rank its part."""
        received, given = self.scatter(self._tensor(data.copy()), counts.astype(np.int32), name)()
        return np.asarray(received), np.asarray(given).tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        process_set = None if self.process_set.process_set_id == 0 else self.process_set
        return HorovodCommunicator, (self._framework, process_set, self._tensor)


def horovod_module(name: str) -> Any:
    """Return Horovod's module for a framework, such as ``"horovod.torch"``.

    Raises:
        RuntimeError: Horovod was built without the framework, or for another version of it.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # TensorFlow has errors of its own for a library that does not load.
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"{name} cannot be imported ({reason}): Horovod was built without this framework, or for another version "
            "of it. Build it again, with bash run_scripts/setup.sh --use-current-env in a clone of hvd_periodic; or "
            "exchange over another library: HVD_PERIODIC_COMM=torch or =mpi"
        ) from error


class ElasticHorovod(ElasticJob):
    """Elastic Horovod, whose launcher decides which processes take part.

    Args:
        framework: the Horovod module, ``"horovod.torch"``.

    Raises:
        ImportError: the module cannot be imported.
    """

    def __init__(self, framework: str) -> None:
        try:
            horovod_module(framework)
        except RuntimeError as error:
            raise ImportError(
                f"Without HVD_PERIODIC_RENDEZVOUS, elastic states are for elastic Horovod, and {error}. To train "
                "elastically without Horovod, set HVD_PERIODIC_RENDEZVOUS to the host:port of an hvdp rendezvous"
            ) from error
        self._framework, self._seen = framework, 0.0

    def change_due(self, communicator: Communicator, news: Sequence[tuple[float, int]]) -> Exception | None:
        """Return Horovod's interrupt if rank 0 has heard of hosts that were added or removed; collective.

        All ranks then run ``sync()``; Horovod alone would skip it if hosts were only removed.
        """
        from horovod.common.exceptions import HostsUpdatedInterrupt

        newest = max([self._seen, *(time for time, _ in news)])
        before, self._seen = communicator.broadcast_object((self._seen, newest), "hvd_periodic.elastic", 0)
        return HostsUpdatedInterrupt(skip_sync=False) if self._seen > before else None

    def run(self, function: Function, state: State, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``hvd.elastic.run``."""
        return importlib.import_module(f"{self._framework}.elastic").run(function)(state, *args, **kwargs)


def depart() -> None:
    """Wait for all ranks of the job, in every Horovod module of this process.

    If Horovod has started MPI, the first rank that leaves Horovod ends MPI on all ranks, and none may be inside MPI
    then, for whatever purpose. Horovod's own collectives are safe; this one fails if a rank that exchanges nothing has
    already left.
    """
    for name in ("horovod.torch", "horovod.tensorflow"):
        hvd: Any = sys.modules.get(name)
        if hvd is not None and hvd.is_initialized():
            from horovod.common.exceptions import HorovodInternalError

            with suppress(HorovodInternalError):
                hvd.allgather_object(None, name="hvd_periodic.depart")


def ranks_of_host(hvd: Any) -> range:
    """Return the current ranks of this host; local. ``hvd`` is Horovod's module, or None if that is not initialized.

    Raises:
        RuntimeError: Horovod is not initialized, and this process is one of several.
    """
    if hvd is None or not hvd.is_initialized():
        if started_alone():
            return range(1)
        raise RuntimeError("node_ranks() needs Horovod, which is not initialized: call hvd.init() first")
    first = hvd.rank() - hvd.local_rank()
    return range(first, first + hvd.local_size())


_registered: dict[tuple[str, tuple[int, ...]], Any] = {}
"""Process sets of this process by framework and ranks: Horovod refuses to register one twice."""


def register(hvd: Any, ranks: list[int]) -> Any:
    """Return the process set of some ranks; collective among all ranks of the job.

    Raises:
        RuntimeError: Horovod was initialized without dynamic process sets.
    """
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    known = _registered.get((hvd.__name__, tuple(ranks)))
    if known is None or _ranks_of(hvd, known) != ranks:
        try:
            known = hvd.add_process_set(hvd.ProcessSet(ranks))
        except Exception as error:
            raise RuntimeError(
                f"The process set of {named(ranks)} cannot be created ({error}): call "
                "hvd.init(process_sets='dynamic'), or node_groups() in place of hvd.init(), and register no process "
                "set of the same ranks before"
            ) from error
        _registered[hvd.__name__, tuple(ranks)] = known
    return known


def _ranks_of(hvd: Any, process_set: Any) -> list[int] | None:
    """Return the ranks that Horovod has under a process set's id: others, or None, after it was reinitialized.

    Horovod has no public name for that. Test: ``test_groups.py::test_horovod_tells_the_ranks_of_a_process_set``.
    """
    registry: Any = importlib.import_module(hvd.ProcessSet.__module__)
    found: dict[int, list[int]] = registry._basics._get_process_set_ids_and_ranks()
    return found.get(process_set.process_set_id)


def _refuse_unknown_launcher(size: int) -> None:
    """Raise if a launcher has started several processes, each of which takes itself for the whole job."""
    found = started_several(horovodrun=False)
    if size == 1 and found is not None:
        launcher, processes, variable = found
        raise RuntimeError(
            f"{launcher} has started {processes} processes ({variable}), and Horovod knows of one: each would "
            "train alone. Start them with horovodrun; or with mpirun or srun --mpi=pmix (see srun --mpi=list) of the "
            f"MPI that Horovod was built with. For independent runs: unset {variable}"
        )
