"""Probes that the doctor runs in other processes: imports, and exchanges between ranks.

    python -m hvd_periodic.cli.probe torch | tensorflow | mpi | name
    mpirun -np 2 python -m hvd_periodic.cli.probe exchange torch:mpi,numpy:mpi,torch:horovod FILE [SECONDS]
    mpirun -np 2 python -m hvd_periodic.cli.probe asynchronous [SECONDS]

Prints a line of JSON for each exchange, on one rank. After SECONDS a process ends, and prints its traceback. Ranks of
torch.distributed that torchrun has not started meet in FILE, a new one.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_periodic.cli.processes import MARK
from hvd_periodic.comm.selection import VARIABLE, FrontEnd
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer


def framework(name: str) -> dict[str, Any]:
    """Return the version of a framework, its number of GPUs, and the build options of Horovod for it."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {"version": module.__version__, "horovod": _horovod(name)}
    if name == "torch":
        found["gpus"] = module.cuda.device_count()
    else:
        found["gpus"] = len(module.config.list_physical_devices("GPU"))
        found["keras"] = importlib.import_module("keras").__version__
    return found


def _horovod(name: str) -> dict[str, Any]:
    try:
        version = importlib.import_module("horovod").__version__
    except ImportError:
        return {"missing": True}
    try:
        hvd = importlib.import_module(f"horovod.{name}")
    except Exception as error:  # TensorFlow has errors of its own for a library that does not load.
        return {"version": version, "error": str(error).strip().splitlines()[0]}
    return {
        "version": version,
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
    }


def mpi() -> dict[str, Any]:
    """Return the version of mpi4py, and of the MPI that it loads; MPI is not started."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"missing": str(error).splitlines()[0]}
    return {"version": mpi4py.__version__, "library": MPI.Get_library_version().partition(",")[0].strip("\0 \n")}


def name() -> dict[str, Any]:
    """Return the name of this host, and its addresses."""
    host = socket.gethostname()
    try:
        return {"host": host, "addresses": sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})}
    except OSError as error:
        return {"host": host, "error": str(error)}


def exchange(ways: str, file: str) -> None:
    """Exchange over the ranks of this job in some ways, one after another; print each result on the first rank.

    Args:
        ways: pairs of a front end and a library, ``"torch:mpi,numpy:mpi"``.
        file: where ranks of torch.distributed meet.
    """
    for way in ways.split(","):
        front_end, library = way.split(":")
        os.environ[VARIABLE] = library
        try:
            found = _exchanged(front_end, library, file)
        except (ImportError, RuntimeError, ValueError) as error:
            found = {"error": str(error)} if _rank() in (None, 0) else None
        if found is not None:
            print(MARK + json.dumps({"way": way, **found}), flush=True)


def _exchanged(front_end: str, library: str, file: str) -> dict[str, Any] | None:
    """Sum a vector over all ranks; return the result on the first rank only."""
    chosen: FrontEnd = importlib.import_module(f"hvd_periodic.{front_end}.communicator").FRONT_END
    hvd: Any = None
    if library == "horovod":
        names = chosen.horovod_modules
        hvd = importlib.import_module(next((name for name in names if name in sys.modules), names[0]))
        hvd.init()
    elif library == "torch":
        _init_torch(file)
    communicator = chosen.communicator_of(None)
    values = np.full(1000, communicator.rank + 1.0, np.float32)
    total = communicator.allreduce(_TENSOR[front_end](values), "hvdp.probe")()
    expected = communicator.size * (communicator.size + 1) / 2
    found: dict[str, Any] = {"ranks": communicator.size, "right": bool((np.asarray(total) == expected).all())}
    if hvd is not None and hvd.mpi_enabled():
        found |= {"threads": bool(hvd.mpi_threads_supported()), "world": _world()}
    seen = communicator.allgather_object(found, "hvdp.seen")
    return seen[0] | {"right": all(each["right"] for each in seen)} if communicator.rank == 0 else None


_TENSOR: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda array: array,
    "torch": lambda array: importlib.import_module("torch").from_numpy(array),
    "tensorflow": lambda array: importlib.import_module("tensorflow").convert_to_tensor(array),
}


def _init_torch(file: str) -> None:
    """Initialize torch.distributed, unless it is."""
    distributed: Any = importlib.import_module("torch.distributed")
    if distributed.is_initialized():
        return
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    else:
        size = next(int(os.environ[name]) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in os.environ)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=_rank(), world_size=size)


def _rank() -> int | None:
    """Return the rank that the launcher has given to this process; None: it has given none."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def asynchronous() -> dict[str, Any] | None:
    """Exchange with one center through MPI, without a framework; return the result on the first rank only."""
    from hvd_periodic.comm.mpi import MPICommunicator

    communicator, x = MPICommunicator(), np.zeros(1000)
    options: dict[str, Any] = {"process_set": communicator, "asynchronous": True}
    optimizer = ElasticAverageOptimizer(SGD(0.1), {"x": x}, 1, **options)
    started = time.perf_counter()
    for _ in range(10):
        optimizer.step([x - 1.0])
    seconds = (time.perf_counter() - started) / 10
    optimizer.synchronizer.finalize()
    with optimizer.center():
        right = bool((x > 0).all() and (x <= 1).all())
    rounds = optimizer.synchronizer.counters.rounds
    if communicator.rank:
        return None
    return {"ranks": communicator.size, "right": right and rounds >= 10, "seconds": seconds}


def _world() -> int | None:
    """Return the number of ranks that mpi4py sees; None: it is not installed."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return int(MPI.COMM_WORLD.Get_size())


PROBES: dict[str, Callable[..., dict[str, Any] | None]] = {
    "torch": lambda: framework("torch"),
    "tensorflow": lambda: framework("tensorflow"),
    "mpi": mpi,
    "name": name,
    "exchange": exchange,
    "asynchronous": asynchronous,
}


def main() -> None:
    """Run a probe and print its report."""
    which, *words = sys.argv[1:]
    if words and words[-1].replace(".", "").isdigit():
        faulthandler.dump_traceback_later(float(words.pop()), exit=True)
    found = PROBES[which](*words)
    if found is not None:
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
