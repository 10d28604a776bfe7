"""The cases in numpy, where ranks are threads.

python -m tests.golden.numpy_program FOLDER RANKS [save]
"""

from __future__ import annotations

import pickle
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hvd_periodic.numpy as hvdp
from hvd_periodic import Communicator, PostLocal
from hvd_periodic.comm.threads import run as run_threads
from tests.golden import cases, course
from tests.golden.cases import Array, Case, gradients

TIMEOUT_SECONDS = 60.0


class NumpyTrainer:
    """Arrays."""

    def __init__(self, case: Case, communicator: Communicator) -> None:
        self.case, self.rank = case, communicator.rank
        self.arrays = case.start(communicator.rank)
        inner = hvdp.SGD(cases.RATE, cases.MOMENTUM if case.local == "momentum" else 0.0)
        named = [(f"p{i}", array) for i, array in enumerate(self.arrays)]
        period = PostLocal(*cases.POST_LOCAL) if case.kind == "post_local" else cases.PERIOD
        options: dict[str, Any] = {"center": case.center, "process_set": communicator}
        if case.kind == "asynchronous":
            options["asynchronous"] = True
        self.optimizer: Any
        if case.algorithm == "average":
            self.optimizer = hvdp.ModelAverageOptimizer(inner, named, period, **options)
        elif case.algorithm.startswith("agn"):
            op = "average" if case.algorithm == "agn_average" else "sum"
            self.optimizer = hvdp.AGNOptimizer(inner, named, period, op=op, **options)
        else:
            rho = cases.RHO if case.algorithm == "elastic_rho" else 0.0
            self.optimizer = hvdp.ElasticAverageOptimizer(inner, named, period, cases.MOVING_RATE, rho=rho, **options)

    def step(self, step: int) -> None:
        self.optimizer.step(gradients(self.case, self.arrays, self.rank, step))

    def skip(self) -> None:
        self.optimizer.skip()

    def values(self) -> list[Array]:
        return [array.copy() for array in self.arrays]

    def center(self) -> list[Array]:
        with self.optimizer.center():
            return self.values()

    def distance(self) -> float:
        return float(self.optimizer.synchronizer.distance())

    def counters(self) -> tuple[int, int, int]:
        counters = self.optimizer.synchronizer.counters
        return counters.local_steps, counters.rounds, counters.skipped_updates

    def finalize(self) -> None:
        self.optimizer.synchronizer.finalize()

    def save(self, path: Path) -> None:
        state = self.optimizer.synchronizer.state_dict()
        saved = {"arrays": self.arrays, "velocities": self.optimizer.inner.velocities, "exchange": state}
        path.with_suffix(".pickle").write_bytes(pickle.dumps(saved))

    def load(self, path: Path) -> None:
        saved = pickle.loads(path.with_suffix(".pickle").read_bytes())
        for array, value in zip(self.arrays, saved["arrays"], strict=True):
            array[...] = value
        self.optimizer.inner.velocities = saved["velocities"]
        self.optimizer.synchronizer.load_state_dict(saved["exchange"])


def planned(size: int) -> list[Case]:
    """Return the cases for some ranks."""
    return [*map(without_momentum, cases.cases(size)), *cases.mixed(size)]


def without_momentum(case: Case) -> Case:
    """Return the case, but for AGN's asynchronous center: it would begin with the local optimizer's momentum."""
    return replace(case, local="sgd") if (case.algorithm, case.kind) == ("agn", "asynchronous") else case


def main(folder: Path, size: int, saving: bool) -> None:
    """Run all cases."""
    warnings.simplefilter("ignore")

    def work(communicator: Communicator) -> None:
        make = partial(NumpyTrainer, communicator=communicator)
        course.run("numpy", make, planned(size), communicator.rank, size, folder, saving)

    run_threads(size, work, TIMEOUT_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "save" in sys.argv)
