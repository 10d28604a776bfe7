"""Compiled Keras and graphs of TensorFlow 1 keep run logs: asynchronously, after a synchronous phase, in sessions.

mpirun -np 2 python -m tests.parallel.run_log_graphs_program FOLDER

Asynchronously rank 1 begins to step when rank 0 has done all of its steps, so that there is one trajectory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from mpi4py import MPI

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.journal import base
from hvd_periodic.journal.files import VARIABLE
from hvd_periodic.tensorflow import contrib_opt
from tests.parallel.program import end_together
from tests.parallel.run_log_program import IN_TURN, PERIOD, RATE, STEPS, SWITCH


def take(step: Callable[[], object], in_turn: bool) -> None:
    """Take all steps; in turn, rank 1 goes on from the first, at which ranks meet, when rank 0 has taken all of its."""
    step()
    if in_turn and hvd.rank() == 1:
        MPI.COMM_WORLD.Barrier()
    for _ in range((IN_TURN if in_turn else STEPS) - 1):
        step()
    if in_turn and hvd.rank() == 0:
        MPI.COMM_WORLD.Barrier()


def compiled(folder: Path, period: Any = PERIOD, distributed: bool = False, **options: Any) -> None:
    """Train with Keras, in a compiled function."""
    x = keras.Variable(tf.zeros([4]))
    inner = keras.optimizers.SGD(0.5)
    optimizer = hvdp.ElasticAverageOptimizer(
        hvd.DistributedOptimizer(inner) if distributed else inner, None, period, RATE, run_log=folder, **options
    )
    optimizer.build([x])
    step = tf.function(lambda gradient: optimizer.apply([tf.fill([4], gradient)]))
    take(lambda: step(tf.constant(hvd.rank() + 1.0)), bool(options.get("asynchronous")))
    optimizer.synchronizer.finalize()


def session(folder: Path, hook: bool = True, **options: Any) -> None:
    """Train in a session of TensorFlow 1, with the hook of the optimizer or without a session that knows its end."""
    v1 = tf.compat.v1
    os.environ[VARIABLE] = str(folder)
    with tf.Graph().as_default():
        getter = contrib_opt.ElasticAverageCustomGetter("")
        with v1.variable_scope("", custom_getter=getter):
            x = v1.get_variable("x", initializer=tf.zeros([4]))
        optimizer = contrib_opt.ElasticAverageOptimizer(
            v1.train.GradientDescentOptimizer(0.5), hvd.size(), getter, PERIOD, RATE, rho=0.0, **options
        )
        train = optimizer.minimize(tf.reduce_sum(x) * (hvd.rank() + 1.0))
        if hook:
            made: Any = v1.train.MonitoredTrainingSession(hooks=[optimizer.make_session_run_hook(True, hvd.rank())])
        else:
            start = optimizer.get_init_op(hvd.rank())
            made = v1.Session()
            made.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            made.run(start)
        with made as running:
            take(lambda: running.run(train), bool(options.get("asynchronous")))
        optimizer.finalize()
    del os.environ[VARIABLE]


RUNS: dict[str, Callable[[Path], None]] = {
    "compiled asynchronous": lambda folder: compiled(folder, asynchronous=True),
    "compiled phase": lambda folder: compiled(folder, hvdp.PostLocal(SWITCH, PERIOD), distributed=True),
    "session": session,
    "session asynchronous": lambda folder: session(folder, asynchronous=True),
    "plain session": lambda folder: session(folder, hook=False),
}

if __name__ == "__main__":
    base.MEASURING_SHARE = float("inf")
    hvd.init()
    for name, train in RUNS.items():
        train(Path(sys.argv[1]) / name)
    end_together()
