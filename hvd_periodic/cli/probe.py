"""Probes that the doctor runs in other processes: imports, and exchanges between ranks.

    python -m hvd_periodic.cli.probe torch | tensorflow | mpi | name
    mpirun -np 2 python -m hvd_periodic.cli.probe exchange torch [SECONDS]
    mpirun -np 2 python -m hvd_periodic.cli.probe asynchronous [SECONDS]

Prints a line of JSON, on one rank. After SECONDS a process ends, and prints its traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_periodic.cli import ranks
from hvd_periodic.cli.processes import MARK
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


def exchange(which: str) -> dict[str, Any] | None:
    """Sum a vector over the ranks of this job; return the result on the first rank only."""
    try:
        job = ranks.FRAMEWORKS[which]()
    except RuntimeError as error:
        return {"error": str(error)}
    hvd, communicator = importlib.import_module(f"horovod.{which}"), job.communicator
    total = communicator.allreduce(job.tensor(np.full(1000, communicator.rank + 1.0, np.float32)), "hvdp.probe")()
    expected = communicator.size * (communicator.size + 1) / 2
    found: dict[str, Any] = {
        "ranks": communicator.size,
        "right": bool((np.asarray(total) == expected).all()),
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
    }
    if hvd.mpi_enabled():
        found["threads"] = bool(hvd.mpi_threads_supported())
        found["world"] = _world()
    seen = communicator.allgather_object(found, "hvdp.seen")
    return seen[0] | {"right": all(each["right"] for each in seen)} if communicator.rank == 0 else None


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
