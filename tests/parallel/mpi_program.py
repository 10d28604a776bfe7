"""The numpy core on mpi4py, without Horovod: the contract of communicators and the losses of the oracle.

mpirun -np 2 python -m tests.parallel.mpi_program FOLDER

With an argument more, asynchronous exchange on mpi4py by this transport, beside a Horovod that has started MPI.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from tests import oracle
from tests.conformance.communicator_contract import check_communicator


def main(folder: Path) -> None:
    """Write this rank's replica and center for each algorithm."""
    from mpi4py import MPI

    communicator = MPICommunicator()
    check_communicator(communicator)
    if find_spec("torch") is not None:
        import torch

        from hvd_periodic.torch.communicator import TensorsOverMPI

        check_communicator(TensorsOverMPI(), torch.from_numpy)
    results = {}
    for name, make in (
        ("easgd", lambda *a: ElasticAverageOptimizer(*a, 2, moving_rate=0.25, process_set=communicator)),
        ("average", lambda *a: ModelAverageOptimizer(*a, 2)),
        ("agn", lambda *a: AGNOptimizer(*a, 4, process_set=MPI.COMM_WORLD)),
    ):
        x = np.array(oracle.START)
        optimizer = make(SGD(oracle.RATE, oracle.MOMENTUM), {"w": x})
        for _ in range(oracle.STEPS):
            optimizer.step([np.array(oracle.gradient(communicator.rank, x.tolist()))])
        replica = x.tolist()
        with optimizer.center():
            results[name] = (replica, x.tolist())
    (folder / f"{communicator.rank}.json").write_text(json.dumps(results))


def beside_horovod(folder: Path, transport: str) -> None:
    """Write the replica's way that is left to the center, and the center, of gradients −1 − 2 rank.

    Arrays are exchanged over Horovod meanwhile.
    """
    import horovod.torch as hvd
    import torch

    import hvd_periodic.torch as hvdp
    from hvd_periodic.asynchronous.worker import VARIABLE
    from hvd_periodic.numpy.communicator import communicator_of

    os.environ[VARIABLE] = transport
    hvd.init()
    x = torch.nn.Parameter(torch.zeros(3))
    local = torch.optim.SGD([x], lr=1.0)
    options = {"asynchronous": True, "process_set": MPICommunicator()}
    check_communicator(communicator_of(None))
    optimizer = hvdp.ElasticAverageOptimizer(local, [("x", x)], 2, moving_rate=0.25, **options)
    for _ in range(8):
        x.grad = torch.full([3], -1.0 - 2 * hvd.rank())
        optimizer.step()
    optimizer.finalize()
    replica = x.tolist()
    with optimizer.center():
        (folder / f"{hvd.rank()}.json").write_text(json.dumps([replica, x.tolist()]))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    main(given) if len(sys.argv) == 2 else beside_horovod(given, sys.argv[2])
