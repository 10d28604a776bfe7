"""The ranks that exchange: those that the user names, or all ranks of the first library that is initialized."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import isfunction
from typing import Any

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.elastic import ElasticJob
from hvd_periodic.comm.horovod import ElasticHorovod, horovod_module, register
from hvd_periodic.comm.local import only_rank, started_alone, started_by_mpi
from hvd_periodic.comm.mpi import group_of_ranks, is_started, world_numbering
from hvd_periodic.comm.rendezvous_settings import VARIABLE as RENDEZVOUS
from hvd_periodic.comm.rendezvous_settings import AwaitedRanks, RendezvousSettings, rendezvous_asked
from hvd_periodic.comm.subset import Subset

VARIABLE = "HVD_PERIODIC_COMM"
"""Environment variable with the library to use if no ``process_set`` implies one."""

LIBRARIES: Mapping[str, str] = {"horovod": "Horovod", "torch": "torch.distributed", "mpi": "MPI"}
"""Names of the libraries by the values of the variable."""


@dataclass(frozen=True)
class FrontEnd:
    """The communicators of a front end.

    Attributes:
        buffer: the class of its buffers in host memory.
        horovod_modules: modules of Horovod that carry its buffers: the first that is initialized is used.
        over_horovod: returns a communicator over a process set (None: all ranks), given the name of Horovod's module.
        over_torch: returns a communicator over a process group of torch.distributed, or a DeviceMesh.
        over_mpi: returns a communicator over an ``mpi4py.MPI.Comm``.
        elastic_over_torch: whether there is an elastic state for jobs over torch.distributed.
        elastic_islands: whether the workers of these jobs may be islands.
    """

    buffer: type
    horovod_modules: tuple[str, ...]
    over_horovod: Callable[[Any, str], Communicator]
    over_torch: Callable[[Any], Communicator]
    over_mpi: Callable[[Any], Communicator]
    elastic_over_torch: bool = False
    elastic_islands: bool = False

    def horovod(self) -> Any:
        """Return Horovod's module if it is initialized, else None; Horovod need not be installed."""
        modules = (sys.modules.get(name) for name in self.horovod_modules)
        return next((module for module in modules if module is not None and module.is_initialized()), None)

    def ready(self, library: str) -> bool:
        """Return whether a library can exchange: it is initialized, or a launcher of MPI has started this process."""
        if library == "horovod":
            return self.horovod() is not None
        return has_torch_distributed() if library == "torch" else started_by_mpi() and find_spec("mpi4py") is not None

    def library(self) -> str | None:
        """Return the library that the environment names, else the first that is ready; None: none is."""
        return requested() or next((library for library in LIBRARIES if self.ready(library)), None)

    def communicator_of(self, process_set: Any) -> Communicator:
        """Return the communicator over some ranks; a communicator is returned as it is, and nothing is staged for it.

        Args:
            process_set: a process set of Horovod; a ``torch.distributed.ProcessGroup``; a ``DeviceMesh`` of one
                dimension; an ``mpi4py.MPI.Comm``; or a function that returns the ranks of this rank's group, over
                Horovod. None: all ranks of the library that ``HVD_PERIODIC_COMM`` names; else of the first that is
                ready: Horovod, torch.distributed, or MPI if its launcher has started this process. If none is, and
                no launcher has started other processes: this process alone.

        Raises:
            RuntimeError: the library is not ready, and this process is one of several; or it is not installed.
            TypeError: it is none of these; or it is a communicator that does not carry the buffers of this front end.
            ValueError: this rank is not in the set; or libraries number ranks differently.
        """
        if isinstance(process_set, Communicator):
            if not process_set.carries(self.buffer):
                kind = f"{self.buffer.__module__}.{self.buffer.__name__}"
                raise TypeError(
                    f"A communicator that is passed as `process_set` is used as it is, and this one does not carry "
                    f"{kind}: pass the process set, the ProcessGroup or the "
                    "mpi4py.MPI.Comm instead, over which buffers of any kind travel. Received: "
                    f"{type(process_set).__name__}"
                )
            return process_set
        if rendezvous_asked():
            return self._at_rendezvous(process_set)
        if isfunction(process_set):
            if self.library() not in ("horovod", None):
                raise ValueError(
                    "A function as `process_set` is for Horovod: over torch.distributed pass a ProcessGroup, over MPI "
                    f"an mpi4py.MPI.Comm. Received: {process_set!r}"
                )
            return Subset(self.communicator_of(None), process_set)
        invalid = _invalid()
        library = _library_of(process_set) or self.library()
        known = requested() == "mpi" or (library in ("horovod", "torch") and self.ready(library))
        if process_set is None and not known and (alone := only_rank()) is not None:
            if invalid is not None:
                raise invalid
            return alone
        communicator = self._made(process_set, library)
        communicator.problem = invalid or self._disagreement(library)
        return communicator

    def everyone(self) -> tuple[Communicator, Callable[[list[int]], Any]]:
        """Return all ranks of the job, and a function that makes process sets; initializes Horovod if nothing is.

        Raises:
            RuntimeError: the library that the environment names is not ready, or not installed.
        """
        library = self.library()
        if requested() is None and library in (None, "mpi") and find_spec("horovod") is not None:
            library = "horovod"
        if library == "horovod" and self.horovod() is None and find_spec("horovod") is not None:
            horovod_module(self.horovod_modules[0]).init(process_sets="dynamic")
        communicator = self._made(None, library)
        if library == "torch":
            return communicator, importlib.import_module("hvd_periodic.comm.torch_distributed").register_group
        if library == "mpi":
            return communicator, group_of_ranks
        return communicator, lambda ranks: register(self.horovod(), ranks)

    def elastic_job(self, min_ranks: int | None, max_ranks: int | None) -> ElasticJob:
        """Return what decides which processes take part: the rendezvous that the environment names, or Horovod.

        Args:
            min_ranks: number of ranks below which nobody trains, if the environment does not say it.
            max_ranks: number of ranks above which workers wait, likewise.

        Raises:
            TypeError: a number of ranks is no int.
            ValueError: settings of the rendezvous are invalid; or numbers of ranks are given without one.
            ImportError: the library of the job is not installed.
        """
        if not rendezvous_asked():
            if min_ranks is not None or max_ranks is not None:
                raise ValueError(
                    f"`min_ranks` and `max_ranks` are for jobs at a rendezvous, and {RENDEZVOUS} is not set: set it, "
                    "or leave them out; elastic Horovod takes the numbers from its launcher, "
                    "horovodrun --min-np 2 --max-np 8"
                )
            return ElasticHorovod(self.horovod_modules[0])
        if find_spec("torch") is None:
            raise ImportError(
                f"{RENDEZVOUS} is set, so that ranks exchange over torch.distributed, but PyTorch is not installed: "
                "pip install torch"
            )
        settings = RendezvousSettings.of_environment(min_ranks, max_ranks)
        from hvd_periodic.comm.torch_rendezvous import TorchRendezvous

        return TorchRendezvous(settings)

    def _at_rendezvous(self, process_set: Any) -> Communicator:
        """Return the ranks that a rendezvous has brought together, or will."""
        if not self.elastic_over_torch:
            raise RuntimeError(
                f"{RENDEZVOUS} is set, and only hvd_periodic.torch and hvd_periodic.tensorflow train in elastic jobs "
                "over torch.distributed: unset it, or train with PyTorch, or with Keras on TensorFlow"
            )
        if process_set is not None:
            raise ValueError(
                f"{RENDEZVOUS} is set, so that all ranks exchange with each other, and the ranks change: leave out "
                f"`process_set`. Received: {process_set!r}"
            )
        if not has_torch_distributed():
            return AwaitedRanks()
        group = importlib.import_module("hvd_periodic.comm.torch_distributed").elastic_group()
        if group is None and not self.elastic_islands:
            raise RuntimeError(
                f"{RENDEZVOUS} is set, and torch.distributed is initialized, whose ranks would be an island: only "
                "hvd_periodic.torch has islands in elastic jobs. Do not initialize it: the rendezvous does"
            )
        return AwaitedRanks(between_islands=True) if group is None else self.over_torch(group)

    def _made(self, process_set: Any, library: str | None) -> Communicator:
        """Return the communicator over some ranks of a library; None: no library is ready."""
        if library is None:
            raise RuntimeError(
                "Neither Horovod nor torch.distributed is initialized: call hvd.init() or "
                "torch.distributed.init_process_group() before the optimizer is constructed; or, to exchange over MPI, "
                "install mpi4py and start the script with mpirun"
            )
        _require_installed(library, process_set)
        if library == "torch":
            return self.over_torch(process_set)
        if library == "mpi":
            _require_mpi_launcher(process_set)
            return self.over_mpi(process_set)
        module = self.horovod()
        return self.over_horovod(process_set, self.horovod_modules[0] if module is None else module.__name__)

    def _disagreement(self, library: str | None) -> ValueError | None:
        """Return an error if another library is initialized as well and numbers the ranks of the job differently."""
        there = {name: is_started() if name == "mpi" else self.ready(name) for name in LIBRARIES}
        used = [name for name in LIBRARIES if name == library or there[name]]
        (first, own), *others = [(LIBRARIES[name], _numbering(name, self)) for name in used]
        for other, theirs in others:
            a_part = other == LIBRARIES["mpi"] and 1 < own[1] < theirs[1]  # Others train on the other ranks of MPI.
            if theirs != own and not a_part:
                return ValueError(
                    f"{first} and {other} are both initialized and must number ranks equally: this is rank {own[0]} of "
                    f"{own[1]} of {first}, and rank {theirs[0]} of {theirs[1]} of {other}. Initialize one of them; or "
                    "the second with rank and size of the first"
                )
        return None


def requested() -> str | None:
    """Return the library that the environment variable ``HVD_PERIODIC_COMM`` names, if it names one.

    Example:
        >>> requested() in (None, "horovod", "torch", "mpi")
        True
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    return asked if asked in LIBRARIES else None


def has_torch_distributed() -> bool:
    """Return whether torch.distributed is initialized; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available()) and bool(distributed.is_initialized())


def _invalid() -> ValueError | None:
    """Return an error if the environment variable has an invalid value."""
    asked = os.environ.get(VARIABLE, "").strip()
    if not asked or requested() is not None:
        return None
    return ValueError(f"The environment variable {VARIABLE} must be 'horovod', 'torch' or 'mpi'. Received: {asked!r}")


def _library_of(process_set: Any) -> str | None:
    """Return the library to which a process set belongs; None for None."""
    if process_set is None:
        return None
    names = {cls.__module__.partition(".")[0] for cls in type(process_set).__mro__}
    distributed = sys.modules.get("torch.distributed") if has_torch_distributed() else None
    if "torch" in names or (distributed and process_set == distributed.GroupMember.NON_GROUP_MEMBER):
        return "torch"
    if "mpi4py" in names:
        return "mpi"
    if not hasattr(process_set, "process_set_id"):
        raise TypeError(
            "`process_set` must be a Horovod process set, a torch.distributed.ProcessGroup, an mpi4py.MPI.Comm, a "
            f"Communicator, or a function that returns ranks. Received: {process_set!r}"
        )
    return "horovod"


def _require_installed(library: str, process_set: Any) -> None:
    """Raise a RuntimeError if a library is not installed."""
    package = "mpi4py" if library == "mpi" else library
    if find_spec(package) is None:
        name = "Horovod" if library == "horovod" else package
        raise RuntimeError(
            f"{name} is not installed, but the environment or `process_set` asks for it: install it, or exchange over "
            f"another library. Received: {VARIABLE}={os.environ.get(VARIABLE, '')!r}, process_set={process_set!r}"
        )


def _require_mpi_launcher(process_set: Any) -> None:
    """Raise a RuntimeError unless a launcher of the MPI of mpi4py has started this process."""
    if not started_by_mpi():
        raise RuntimeError(
            "The environment or `process_set` asks for MPI, and no launcher of MPI has started this process: start the "
            "script with mpirun, or srun --mpi=pmix, of the MPI for which mpi4py is built; to train alone, leave both "
            f"out. Received: {VARIABLE}={os.environ.get(VARIABLE, '')!r}, process_set={process_set!r}"
        )
    try:
        _, size = world_numbering()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py cannot be imported ({error}): build it for the MPI whose launcher starts the ranks: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py"
        ) from error
    if size == 1 and not started_alone():
        raise RuntimeError(
            "A launcher of MPI has started this process as one of several, and mpi4py, built for another MPI, sees "
            "one: build it for the MPI of the launcher: pip install --force-reinstall --no-binary mpi4py mpi4py"
        )


def _numbering(library: str, front_end: FrontEnd) -> tuple[int, int]:
    """Return this process's rank in the whole job and the number of ranks, as a library numbers them."""
    if library == "mpi":
        return world_numbering()
    if library == "torch":
        distributed: Any = sys.modules["torch.distributed"]
        return distributed.get_rank(), distributed.get_world_size()
    horovod = front_end.horovod()
    return horovod.rank(), horovod.size()
