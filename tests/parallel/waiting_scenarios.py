"""Rank 1 does not come until all who wait for it have named it; see ``scenarios.py``.

HVD_PERIODIC_WARN_SECONDS=0.3 mpirun -np 2 python -m tests.parallel.waiting_scenarios FOLDER torch
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel.program import NotApplicableError, Scenarios


class OverMPI:
    """What these scenarios need of Horovod, over MPI alone."""

    def init(self, process_sets: str) -> None:
        from hvd_periodic.comm.mpi import MPICommunicator

        self.world = MPICommunicator()

    def rank(self) -> int:
        return self.world.rank

    def size(self) -> int:
        return self.world.size

    def mpi_enabled(self) -> bool:
        return True

    def add_process_set(self, ranks: Sequence[int]) -> Any:
        from mpi4py import MPI

        from hvd_periodic.comm.mpi import MPICommunicator

        return MPICommunicator(MPI.COMM_WORLD.Split(self.rank() in ranks, self.rank()))

    def allreduce(self, value: np.ndarray, name: str) -> None:
        self.world.allreduce(value, name)()


FRAMEWORK = next((name for name in ("tensorflow", "numpy") if name in sys.argv[2:]), "torch")
hvd: Any = (
    OverMPI()
    if FRAMEWORK == "numpy"
    else importlib.import_module("tests.parallel.torch_job").hvd
    if FRAMEWORK == "torch"
    else importlib.import_module("tests.parallel.tensorflow_job").hvd
)
hvdp: Any = importlib.import_module("hvd_periodic" if FRAMEWORK == "numpy" else f"hvd_periodic.{FRAMEWORK}")

scenario = Scenarios()
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
places = itertools.count()


class Warnings(logging.Handler):
    """Collects warnings, and tells the rank that holds the others up when its name has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.signal: Path | None = None
        self.others: list[Path] = []
        self.while_all_waited: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning."""
        self.texts.append(record.getMessage())
        if self.signal is not None and is_about_the_held_rank(self.texts[-1]):
            if all(waiting_beside(signal).exists() for signal in self.others):
                self.while_all_waited.append(self.texts[-1])
                self.signal.touch()
            waiting_beside(self.signal).touch()


def is_about_the_held_rank(text: str) -> bool:
    """Return whether a warning names rank 1, and not in a step that is merely slow on a busy machine."""
    return "rank 1" in text and ("it is in " not in text or "it is in holding_up()" in text)


def waiting_beside(signal: Path) -> Path:
    """Return the file that says that a rank waits, beside the one that says that it has warned when all others did."""
    return signal.with_suffix(".waits")


heard = Warnings()


def holding_up(function: Callable[[], Any], waiting: Sequence[int]) -> tuple[Any, list[str]]:
    """Call a function on all ranks, on rank 1 not before all that wait have warned; return what was warned of.

    Each has warned once after all others had: then all are known to wait.
    """
    place = next(places)
    signals = {rank: folder / f"{place}.{rank}.warned" for rank in waiting}
    heard.texts, heard.signal = [], signals.get(hvd.rank())
    heard.others = [signal for rank, signal in signals.items() if rank != hvd.rank()]
    while hvd.rank() == 1 and not all(signal.exists() for signal in signals.values()):
        time.sleep(0.01)
    result = function()
    heard.signal = None
    return result, list(heard.texts)


def everybody_else() -> list[int]:
    return [rank for rank in range(hvd.size()) if rank != 1]


def construct(**options: Any) -> tuple[Any, Callable[[], None]]:
    """Return an optimizer with a period of 3, and what lets it step once."""
    if FRAMEWORK == "torch":
        import torch

        model = torch.nn.Linear(3, 2)
        made = hvdp.ElasticAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 3, **options)

        def step() -> None:
            made.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            made.step()

        return made, step
    if FRAMEWORK == "numpy":
        options["process_set"] = options.get("process_set") or hvd.world
        averaging = hvdp.ElasticAverageOptimizer(hvdp.SGD(0.1), {"x": np.zeros(3)}, 3, **options)
        return averaging, lambda: averaging.step([np.ones(3)])
    import keras

    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), network, 3, **options)
    network.compile(made, loss="mse", jit_compile=False)
    return made, lambda: network.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


@scenario
def course_of_training() -> Any:
    """Wherever ranks wait for each other, in the order of training; the center is on the root, so reading it waits."""
    told = {}
    (optimizer, step), told["construction"] = holding_up(
        lambda: construct(center="root", timeout_seconds=1000.0), everybody_else()
    )
    _, told["first step"] = holding_up(step, everybody_else())
    step()
    _, told["exchange"] = holding_up(step, everybody_else())

    def read() -> None:
        with optimizer.center():
            pass

    _, told["center"] = holding_up(read, everybody_else())
    _, told["distance"] = holding_up(optimizer.synchronizer.distance, everybody_else())
    step()
    finalize = optimizer.finalize if FRAMEWORK == "torch" else optimizer.synchronizer.finalize
    _, told["finalize"] = holding_up(finalize, everybody_else())
    return told


@scenario
def some_ranks() -> Any:
    """Ranks 0 and 1 of three, or all: the others are not asked, and wait for nobody."""
    process_set = hvd.add_process_set([0, 1]) if hvd.size() > 2 else None
    told = {}
    if hvd.rank() >= 2:
        next(places), next(places)
    else:
        (_, step), told["construction"] = holding_up(lambda: construct(process_set=process_set), [0])
        step()
        step()
        _, told["exchange"] = holding_up(step, [0])
    zero: Any = importlib.import_module("torch").zeros(1) if FRAMEWORK == "torch" else np.zeros(1)
    hvd.allreduce(zero, name="together")
    return told


@scenario
def asynchronous() -> Any:
    """One rank is late with its start, where all make the center, and then with its end."""
    if FRAMEWORK == "tensorflow":
        raise NotApplicableError("needs an optimizer of PyTorch or numpy")
    from hvd_periodic.asynchronous.worker import Worker

    told: dict[str, list[str]] = {}
    opened = Worker.open

    def late(worker: Worker) -> None:
        _, told["start"] = holding_up(lambda: opened(worker), everybody_else())

    Worker.open = late  # type: ignore[method-assign]
    optimizer, step = construct(asynchronous=True, timeout_seconds=1000.0)
    Worker.open = opened  # type: ignore[method-assign]
    for _ in range(4):
        step()
    _, told["end"] = holding_up(optimizer.synchronizer.finalize, everybody_else())
    return told


@scenario
def named_while_all_waited() -> list[str]:
    """What was said of rank 1 when all others were known to wait."""
    return heard.while_all_waited


if __name__ == "__main__":
    logging.getLogger("hvd_periodic").addHandler(heard)
    hvd.init(process_sets="dynamic")
    scenario.run(folder, hvd.rank())
