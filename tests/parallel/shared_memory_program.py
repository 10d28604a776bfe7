"""Asynchronous training of a center of a chosen size, on numpy and mpi4py; see ``test_shared_memory.py``.

mpirun -np 2 python -m tests.parallel.shared_memory_program MIB END
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile

import numpy as np

from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.shared_memory import FOLDER, SPARE_BYTES_PER_RANK
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer


def main(mib: float, end: str) -> None:
    """Train, and end in one of many ways."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    communicator = MPICommunicator()
    last = communicator.rank == communicator.size - 1
    x = np.zeros(int(mib * 2**20) // 8)
    optimizer = ElasticAverageOptimizer(
        SGD(1.0), {"x": x}, 1, moving_rate=0.25, asynchronous=True, process_set=communicator
    )
    optimizer.step([np.full_like(x, -1.0)])
    with tempfile.TemporaryFile(dir=FOLDER) as other:
        if end == "full" and last:
            left = os.statvfs(FOLDER)
            most = left.f_bavail * left.f_frsize - communicator.size * SPARE_BYTES_PER_RANK
            os.posix_fallocate(other.fileno(), 0, most)
        communicator.allgather_object(None, "full")
        optimizer.step([np.full_like(x, -1.0)])
        communicator.allgather_object(None, "trained")
        print("in training", flush=True)
        if end == "exception" and last:
            raise ArithmeticError("something wrong")
        if end == "killed" and last:
            os.kill(os.getpid(), signal.SIGKILL)
        if end in ("exception", "killed", "signal"):
            signal.pause()
        optimizer.synchronizer.finalize()
    with optimizer.center():
        print(f"The center is {x.min():.3f} to {x.max():.3f}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
