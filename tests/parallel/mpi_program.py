"""The numpy core on mpi4py, without Horovod: the contract of communicators and the losses of the oracle.

mpirun -np 2 python -m tests.parallel.mpi_program FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from hvd_periodic import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.comm.mpi import MPICommunicator
from tests import oracle
from tests.conformance.communicator_contract import check_communicator


def main(folder: Path) -> None:
    """Write this rank's replica and center for each algorithm."""
    communicator = MPICommunicator()
    check_communicator(communicator)
    results = {}
    for name, make in (
        ("easgd", lambda *a: ElasticAverageOptimizer(*a, 2, moving_rate=0.25, communicator=communicator)),
        ("average", lambda *a: ModelAverageOptimizer(*a, 2, communicator=communicator)),
        ("agn", lambda *a: AGNOptimizer(*a, 4, communicator=communicator)),
    ):
        x = np.array(oracle.START)
        optimizer = make(SGD(oracle.RATE, oracle.MOMENTUM), {"w": x})
        for _ in range(oracle.STEPS):
            optimizer.step([np.array(oracle.gradient(communicator.rank, x.tolist()))])
        replica = x.tolist()
        with optimizer.center():
            results[name] = (replica, x.tolist())
    (folder / f"{communicator.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
