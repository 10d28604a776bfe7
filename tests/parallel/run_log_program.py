"""Trains a line of numbers with PyTorch or Keras, keeps a run log, and reports what each rank has counted by itself.

python -m tests.parallel.run_log_program torch | tensorflow FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.parallel.program import end_together

STEPS, PERIOD, RATE = 10, 3, 0.25
"""All of them are exact in float32, so are sums of few."""

SWITCH = 4
"""Local steps after which gradients are no longer averaged, in the run that begins so."""

IN_TURN = STEPS - STEPS % PERIOD
"""Local steps of asynchronous runs, after which nothing is left to be pushed while others train."""


def of_torch(folder: Path) -> tuple[Any, Callable[[float], None]]:
    """Return a synchronizer, and a step by a constant gradient."""
    import torch

    import hvd_periodic.torch as hvdp

    x = torch.nn.Parameter(torch.zeros(4))
    inner = torch.optim.SGD([x], lr=0.5)
    optimizer = hvdp.ElasticAverageOptimizer(inner, [("x", x)], PERIOD, RATE, run_log=folder)

    def step(gradient: float) -> None:
        x.grad = torch.full_like(x, gradient)
        optimizer.step()

    return optimizer.synchronizer, step


def of_tensorflow(folder: Path) -> tuple[Any, Callable[[float], None]]:
    """Return the same of Keras, compiled."""
    import keras
    import tensorflow as tf

    import hvd_periodic.tensorflow as hvdp

    x = keras.Variable(tf.zeros([4]))
    optimizer = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.5), None, PERIOD, RATE, run_log=folder)
    optimizer.build([x])
    compiled = tf.function(lambda gradient: optimizer.apply([tf.fill([4], gradient)]))
    return optimizer.synchronizer, lambda gradient: compiled(tf.constant(gradient))


def main(framework: str, folder: Path) -> None:
    """Train, and write what this rank saw."""
    hvd = import_module(f"horovod.{framework}")
    hvd.init()
    synchronizer, step = {"torch": of_torch, "tensorflow": of_tensorflow}[framework](folder / "run")
    rank = hvd.rank()
    for i in range(STEPS):
        synchronizer.report(4.0 * rank + 16.0 - i)
        step(rank + 1.0)
    synchronizer.finalize()
    counters = synchronizer.counters
    seen = {"bytes": counters.bytes_sent, "rounds": counters.rounds, "seconds": counters.exchange_seconds}
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    end_together()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
