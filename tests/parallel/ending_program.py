"""Rank 1 ends in the middle of training, or never goes on; see ``test_waiting.py``.

mpirun -np 2 python -m tests.parallel.ending_program torch loader error
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_periodic.schedules import Clock, Schedule

LIMIT = 0.5
"""Seconds for which ranks wait once both have started, which takes as long as it takes."""

STEPS, LAST, PERIOD = 8, 4, 3
"""Local steps of all ranks, of rank 1, and between exchanges."""

FRAMEWORK, PLACE, END, *MODE = sys.argv[1:] if len(sys.argv) > 3 else ("", "", "")
OPTIONS: dict[str, Any] = {"asynchronous": True} if MODE else {"timeout_seconds": 1000.0}
steps = 0
"""That were taken here."""
ranks: list[int] = []
"""This one, once it is known."""
made: list[Any] = []
"""The optimizer, once it is there."""


def end_at(place: str, steps_taken: int = LAST) -> None:
    """Do not go on from a place in the program, if this rank is to end there."""
    if place != PLACE or ranks != [1] or steps < steps_taken:
        return
    if END == "hang":
        while True:
            signal.pause()
    if END == "error":
        raise ValueError("a bad batch")
    if END == "interrupt":
        raise KeyboardInterrupt
    sys.exit(0 if END == "exit 0" else 3)


@dataclass(frozen=True)
class Ending(Schedule):
    """A schedule on which one rank may end."""

    def __call__(self, clock: Clock) -> int:
        """Return the period."""
        if clock.step >= PERIOD:
            end_at("schedule", PERIOD - 1)
        return PERIOD


def weight() -> float:
    """Let all ranks count alike; this is asked in exchanges."""
    end_at("exchange", PERIOD - 1)
    return 1.0


def batches() -> Iterator[tuple[Any, Any]]:
    """Load the batches of all steps."""
    for _ in range(STEPS):
        end_at("loader")
        yield np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


def count() -> None:
    """Note that a step was taken; from the last one of rank 1 on, waiting has a limit."""
    global steps
    steps += 1
    if END == "hang" and steps == LAST:
        made[0].synchronizer.membership.communicator.tracker.timeout = LIMIT


def of_torch() -> tuple[Any, Callable[[], None]]:
    """Return an optimizer, and what trains."""
    import horovod.torch as hvd
    import torch

    import hvd_periodic.torch as hvdp

    hvd.init()
    ranks.append(hvd.rank())
    model = torch.nn.Linear(3, 2)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = optimizer_of(hvdp, local, model)
    optimizer.register_step_post_hook(lambda *_: end_at("callback", LAST - 1))

    def train() -> None:
        for inputs, _ in batches():
            end_at("training")

            def closure(inputs: Any = inputs) -> Any:
                end_at("closure")
                loss = model(torch.from_numpy(inputs)).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            count()

    return optimizer, train


def of_tensorflow() -> tuple[Any, Callable[[], None]]:
    """Return an optimizer, and what trains."""
    import horovod.tensorflow as hvd
    import keras

    import hvd_periodic.tensorflow as hvdp

    class Counting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            count()
            end_at("callback")

    hvd.init()
    ranks.append(hvd.rank())
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = optimizer_of(hvdp, keras.optimizers.SGD(0.1), network)
    network.compile(optimizer, "mse")

    def train() -> None:
        if PLACE == "loader":
            network.fit(batches(), steps_per_epoch=STEPS, verbose=0, callbacks=[Counting()])
            return
        for inputs, outputs in batches():
            end_at("training")
            network.fit(inputs, outputs, verbose=0, callbacks=[Counting()])

    return optimizer, train


def of_numpy() -> tuple[Any, Callable[[], None]]:
    """Return an optimizer, and what trains; over MPI alone."""
    import hvd_periodic.numpy as hvdp
    from hvd_periodic.comm.mpi import MPICommunicator

    communicator = MPICommunicator()
    ranks.append(communicator.rank)
    OPTIONS["process_set"] = communicator
    optimizer = optimizer_of(hvdp, hvdp.SGD(0.1), {"x": np.zeros(3)})

    def train() -> None:
        for _ in batches():
            end_at("training")
            optimizer.step([np.ones(3)])
            count()

    return optimizer, train


def breaking(exchange: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return an asynchronous exchange in which one rank may end when it has pulled the first bucket."""

    def run(*arguments: Any) -> Iterator[Any]:
        for pulled in exchange(*arguments):
            end_at("exchange", PERIOD - 1)
            yield pulled

    return run


def optimizer_of(package: Any, local: Any, model: Any) -> Any:
    """Return the optimizer of a front end."""
    if MODE:
        return package.ElasticAverageOptimizer(local, model, PERIOD, **OPTIONS)
    weighed = {"weight": weight} if PLACE == "exchange" else {}
    return package.ModelAverageOptimizer(local, model, Ending(), **OPTIONS, **weighed)


if __name__ == "__main__":
    optimizer, train = {"torch": of_torch, "tensorflow": of_tensorflow, "numpy": of_numpy}[FRAMEWORK]()
    made.append(optimizer)
    if MODE and PLACE == "exchange":
        transport = optimizer.synchronizer.exchanger.worker.transport
        transport.exchange = breaking(transport.exchange)
    train()
    if MODE == ["asynchronous", "broadcast"] and ranks != [1]:
        optimizer.synchronizer.broadcast()
    optimizer.synchronizer.finalize()
