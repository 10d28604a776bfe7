"""A job of Keras under elastic Horovod that goes on while ranks come and go; see ``test_elastic_state.py``.

horovodrun --gloo --host-discovery-script ... python -m tests.parallel.elastic_keras_program SCENARIO FOLDER

As ``elastic_state_program.py``; beside the parameters, batch normalization keeps a mean of what every worker descends
to.
"""

from __future__ import annotations

import sys
from typing import Any

import horovod.keras.elastic
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.tensorflow import elastic
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from tests.parallel import elastic_scenarios as scenarios
from tests.parallel.elastic_events import begin, end, happen
from tests.parallel.elastic_keras_model import half_square, point_and_mean


def main(scenario: scenarios.Scenario) -> None:
    """Train; die where the scenario says so."""
    keras.config.set_floatx("float64")
    hvd.init()
    if scenario.collectives:
        HorovodCommunicator.piggyback_limit_bytes = 0
    model, mean = point_and_mean()
    local = keras.optimizers.SGD(scenarios.RATE, momentum=scenarios.MOMENTUM)
    algorithms = {"easgd": hvdp.EASGD, "averaging": hvdp.Averaging, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}
    algorithm, note = algorithms[scenario.algorithm](), tf.Variable(0)
    if scenario.inner:
        of_host, ranks = algorithms[scenario.inner](), hvdp.node_ranks if scenario.grouped else None
        local = hvdp.PeriodicOptimizer(local, model, of_host, scenarios.INNER_PERIOD, process_set=ranks)
    options: dict[str, Any] = {"center": scenario.center, "overlap": scenario.overlap}
    if scenario.loop == "synchronizer":
        synchronizer: Any = hvdp.Synchronizer(model, algorithm, scenarios.PERIOD, **options)
        optimizer: Any = local
        state = elastic.State(model, local, commit="exchange", exchange=synchronizer, note=note, batch=0)
    else:
        optimizer = hvdp.PeriodicOptimizer(local, model, algorithm, scenarios.PERIOD, **options)
        model.compile(optimizer, loss=half_square, jit_compile=False)
        state = elastic.State(model, commit="exchange", note=note, batch=0, epoch=0)
        synchronizer = optimizer.synchronizer
    state.register_reset_callbacks([lambda: note.assign(hvd.size())])

    def descend(targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = half_square(targets, model(targets, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        if scenario.loop == "synchronizer":
            synchronizer.step()

    step = descend if scenario.loop == "eager" else tf.function(descend)

    def before_step() -> None:
        happen(scenario.events, state.batch, hvd.rank(), hvd.size(), state, TensorFlowCommunicator)
        state.batch += 1

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin(hvd.rank(), hvd.size(), synchronizer.local_steps)
        targets = np.array([scenarios.target(hvd.rank(), step) for step in range(scenarios.STEPS)])
        if scenario.loop == "fit":
            callbacks = [
                keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: before_step()),
                horovod.keras.elastic.UpdateEpochStateCallback(state),
            ]
            left = targets[state.batch :]
            model.fit(left, left, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
        while state.batch < scenarios.STEPS:
            target = tf.constant(targets[state.batch : state.batch + 1])
            before_step()
            step(target)
        synchronizer.finalize()

    train(state)
    point, moving = model.trainable_variables[0], mean.moving_mean
    with synchronizer.center():
        center = point.numpy().tolist()
    found: dict[str, Any] = {"x": point.numpy().tolist(), "center": center, "mean": moving.numpy().tolist()}
    if scenario.loop == "fit":
        found["epoch"] = state.epoch
    end(hvd.rank(), **found, note=int(note), steps=synchronizer.local_steps, batch=state.batch)


if __name__ == "__main__":
    main(scenarios.KERAS[sys.argv[1]])
