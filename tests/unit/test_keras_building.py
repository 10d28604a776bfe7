"""Models that learn their input shape from the first batch, or what to compute from data. One process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import Communicator, LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.stage import Stage  # noqa: E402
from tests.conformance.test_front_ends import Delegate  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402
from tests.unit.test_keras_optimizer import parameter, wrap  # noqa: E402

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("eagerly", [False, True])
def test_the_first_batch_builds_a_model_without_input_shape(eagerly: bool) -> None:
    """It is then trained as if it had known its shape; several steps per execution, and callbacks that need it."""
    found = []
    for shape in ([keras.Input((3,))], []):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([*shape, keras.layers.Dense(2), keras.layers.BatchNormalization()])
        optimizer = wrap("easgd", keras.optimizers.SGD(0.1, momentum=0.5), model, 3)
        model.compile(optimizer, loss="mse", jit_compile=False, run_eagerly=eagerly, steps_per_execution=2)
        inputs = np.arange(24.0).reshape(8, 3) / 10
        callbacks = [
            hvdp.callbacks.BroadcastAtStart(),
            hvdp.callbacks.EvaluateCenter((inputs, inputs[:, :2])),
            hvdp.callbacks.FinalizeAtEnd(),
        ]
        history = model.fit(inputs, inputs[:, :2], 1, verbose=0, shuffle=False, callbacks=callbacks)
        counters = optimizer.synchronizer.counters
        weights = [weight.tolist() for weight in model.get_weights()]
        found.append([counters.local_steps, counters.rounds, history.history, weights])
    assert found[0][:2] == [8, 3]
    assert found[0] == found[1]


@pytest.mark.parametrize("known", [True, False])
def test_variables_that_a_function_of_the_user_makes(known: bool) -> None:
    """Where what they begin with is known before its first step; and where it is not."""
    optimizer, made = wrap("average", keras.optimizers.SGD(1.0)), []

    @tf.function(autograph=False)
    def step(x: Any) -> None:
        if not made:
            made.append(keras.Variable(lambda shape, dtype: tf.ones(2) if known else x, shape=(2,), dtype="float32"))
        optimizer.apply([tf.ones(2)], made)

    refused = pytest.raises(tf.errors.InvalidArgumentError, match=r"give it its input shape with keras.Input, or call")
    with nullcontext() if known else refused:
        step(tf.ones(2))
        step(tf.ones(2))
        assert made[0].numpy().tolist() == [-1.0, -1.0]


def test_a_step_that_is_compiled_with_what_layers_were_adapted_to() -> None:
    """Rank 1 has adapted a layer anew, and takes over that of the root; the others hear of it where they meet."""

    def work(communicator: Communicator) -> list[str]:
        keras.utils.set_random_seed(1)
        normalization = keras.layers.Normalization()
        normalization.adapt(np.arange(12.0).reshape(4, 3))
        model = keras.Sequential([keras.Input((3,)), normalization, keras.layers.Dense(2)])
        ranks = Delegate(communicator)
        optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 1, process_set=ranks)
        if communicator.rank == 1:
            normalization.adapt(np.ones((4, 3)) * [1.0, 5.0, 9.0])
        variables = model.trainable_variables

        def step() -> None:
            optimizer.apply([tf.ones(variable.shape) for variable in variables], variables)

        found = []
        for take in [tf.function(step, autograph=False), step][1 - communicator.rank :]:
            try:
                take()
            except (ValueError, RuntimeError) as error:
                found.append(str(error))
        return found

    told = run_ranks(2, work)
    assert [len(found) for found in told] == [1, 2]
    assert all("Layers of this rank were adapted differently" in error for found in told for error in found)
    assert told[0][0].startswith("Rank 1 failed")


def test_the_stages_of_an_optimizer_and_of_one_that_was_loaded() -> None:
    optimizer, variable = wrap("average", keras.optimizers.SGD(1.0)), parameter()
    loaded = type(optimizer).from_config(optimizer.get_config())
    assert type(optimizer).stage is Stage.CONSTRUCTING
    assert (optimizer.stage, loaded.stage) == (Stage.UNBUILT, Stage.UNBUILT)
    for each in (optimizer, loaded):
        each.build([variable])
    assert (optimizer.stage, loaded.stage) == (Stage.STARTED, Stage.BUILT)
    with pytest.raises(RuntimeError, match="was loaded"):
        loaded.synchronizer.sync()
    loaded.attach(process_set=LocalCommunicator())
    assert loaded.stage is Stage.CREATED
    with pytest.raises(RuntimeError, match="attach\\(\\) has to come before the first use"):
        loaded.attach(process_set=LocalCommunicator())
    optimizer.apply([tf.ones(2)])
    loaded.synchronizer.finalize()
    assert (optimizer.stage, loaded.stage) == (Stage.OPEN, Stage.OPEN)
