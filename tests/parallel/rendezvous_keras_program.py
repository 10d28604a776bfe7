"""A worker of an elastic job of Keras over torch.distributed; see ``test_rendezvous.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.rendezvous_keras_program SCENARIO FOLDER NUMBER

As ``rendezvous_program.py``; beside the parameters, batch normalization keeps a mean of what every worker descends to.
"""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":  # The process from which this one was forked has imported Horovod.
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.modules["horovod"] = None  # type: ignore[assignment]

import keras
import numpy as np
import tensorflow as tf
import torch.distributed as dist

import hvd_periodic.tensorflow as hvdp
from tests.parallel.elastic_events import begin, end
from tests.parallel.elastic_keras_model import gradient_of, half_square, point_and_mean
from tests.parallel.elastic_scenarios import MOMENTUM, PERIOD, RATE, SIZE, policies_of, target
from tests.parallel.rendezvous_scenarios import KERAS, KERAS_COMPILED, OWN_TARGET, Scenario
from tests.parallel.rendezvous_worker import CountsNewStarts, arrive, happen


class State(CountsNewStarts, hvdp.elastic.State):
    """The state of a worker."""


def main(scenario: Scenario, number: int) -> None:
    """Train."""
    keras.config.set_floatx("float64")
    policies = policies_of(scenario) if scenario.loop == "eager" else {}
    model, mean = point_and_mean(scenario.fragments, own=1, further=policies)
    further = [variable for variable in model.trainable_variables if variable.name in policies]
    own = next(variable for variable in model.trainable_variables if variable.name == "own")
    own.assign([number])
    trained = [variable for variable in model.trainable_variables if variable.name not in policies]
    algorithms = {"averaging": hvdp.Averaging, "diloco": hvdp.DiLoCo, "easgd": hvdp.EASGD, "agn": hvdp.AGN}
    local = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer = hvdp.PeriodicOptimizer(
        local,
        model,
        algorithms[scenario.algorithm](),
        PERIOD,
        center=scenario.center,
        overlap=scenario.overlap,
        fragments=scenario.fragments,
        compression=hvdp.Compression.int8 if scenario.int8 else hvdp.Compression.none,
        parameters={"*own": "local", **{f"*{name}": policy for name, policy in policies.items()}},
    )
    model.compile(optimizer, loss=half_square, jit_compile=False)
    state = State(model, commit="exchange", batch=0)

    def descend(targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = half_square(targets, model(targets, training=True))
        gradients = dict(zip(map(id, trained), tape.gradient(loss, trained), strict=True))
        gradients |= {id(v): gradient_of(v, dist.get_rank(), state.batch - 1) for v in further}
        optimizer.apply([gradients[id(v)] for v in model.trainable_variables])

    step = tf.function(descend) if scenario.loop == "compiled" else descend

    def before_step() -> None:
        happen(scenario, state.batch, state)
        state.batch += 1

    arrive(scenario, number)

    @hvdp.elastic.run
    def train(state: Any) -> str:
        steps, number = optimizer.synchronizer.local_steps, state.job._state.view.round
        begin(dist.get_rank(), dist.get_world_size(), steps, round=number, forgotten=state.forgotten)
        targets = np.array([[*target(dist.get_rank(), step), OWN_TARGET] for step in range(scenario.steps)])
        if scenario.loop == "fit":
            callback = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: before_step())
            left = targets[state.batch :]
            model.fit(left, left, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])
        while state.batch < scenario.steps:
            targets_of_step = tf.constant(targets[state.batch : state.batch + 1])
            before_step()
            step(targets_of_step)
        optimizer.finalize()
        return "done"

    assert train(state) == "done"
    replica = values(model)
    ends = {variable.name: variable.numpy().ravel().tolist() for variable in further}
    with optimizer.center():
        center = values(model)
        ends |= {f"{variable.name}_center": variable.numpy().ravel().tolist() for variable in further}
    end(
        dist.get_rank(),
        x=replica,
        center=center,
        mean=mean.moving_mean.numpy()[:SIZE].tolist(),
        own=own.numpy().item(),
        number=number,
        steps=optimizer.synchronizer.local_steps,
        batch=state.batch,
        **ends,
    )


def values(model: keras.Model) -> list[float]:
    """Return the parameters of the equations."""
    exchanged = [variable.numpy() for variable in model.trainable_variables if variable.name.startswith("x")]
    found: list[float] = np.concatenate(exchanged).tolist()
    return found


if __name__ == "__main__":
    main((KERAS | KERAS_COMPILED)[sys.argv[1]], int(sys.argv[3]))
