"""Rank 1 ends in the middle of a period, or never goes on; see ``test_waiting.py``.

mpirun -np 2 python -m tests.parallel.ending_program torch error
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

LIMIT = 0.5
"""Seconds for which ranks wait once both have started, which takes as long as it takes."""


def end(how: str) -> None:
    """Do not come to the next exchange."""
    if how == "hang":
        while True:
            signal.pause()
    if how == "error":
        raise ValueError("a bad batch")
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit(3)


def prepared(framework: str) -> tuple[Any, Any, Callable[[], Any]]:
    """Return Horovod, an optimizer, and what trains for a step."""
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        import hvd_periodic.torch as hvdp

        hvd.init()
        model = torch.nn.Linear(3, 2)
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.ModelAverageOptimizer(local, model, 3, timeout_seconds=1000.0)

        def step() -> None:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        return hvd, optimizer, step
    import horovod.tensorflow as hvd
    import keras

    import hvd_periodic.tensorflow as hvdp

    hvd.init()
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    periodic = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), network, 3, timeout_seconds=1000.0)
    network.compile(periodic, "mse")
    return hvd, periodic, lambda: network.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


if __name__ == "__main__":
    hvd, made, step = prepared(sys.argv[1])
    for number in range(8):
        if number == 4:
            made.synchronizer.membership.communicator.attendance.timeout = LIMIT
            if hvd.rank() == 1:
                end(sys.argv[2])
        step()
