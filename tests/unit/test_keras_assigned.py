"""Weights of a Keras model that training code assigns itself; whether the model was built makes no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from tests.covering import covering  # noqa: E402

TAKE_PART = "take part in exchanges, have never had a gradient, and were changed by other code than local steps: "
OWN = "Inside center(), these weights still have this rank's values: "

pytestmark = pytest.mark.timeout(90)

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")


class Averaged(keras.Model):  # type: ignore[misc]
    """A network, and a copy of it that ``train_step`` moves, as in a diffusion model."""

    def __init__(self, trainable: bool = True) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.network = self.new_network("network")
        self.ema_network = self.new_network("ema")
        self.ema_network.trainable = trainable

    def new_network(self, name: str) -> Any:
        """Return one layer."""
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, name=name)], name=name)

    def call(self, inputs: Any) -> Any:
        """Return what the average makes of the inputs."""
        return self.ema_network(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Move the network by gradients, and the copy by assignment."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.network(data, training=True) - 1.0))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for weight, average in zip(weights, self.ema_network.weights, strict=True):
            average.assign(0.5 * average + 0.5 * weight)
        return {"loss": loss}


OPTIMIZERS: dict[str, Any] = {
    "average": lambda m, **k: hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), m, 2, **k),
    "agn": lambda m, **k: hvdp.AGNOptimizer(keras.optimizers.SGD(0.1), m, 2, **k),
    "diloco": lambda m, **k: hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.1), m, hvdp.DiLoCo(), 2, outer_optimizer=keras.optimizers.SGD(0.7, momentum=0.9), **k
    ),
}


def trained(name: str, built: bool, eagerly: bool = False, trainable: bool = True, **options: Any) -> Any:
    model = Averaged(trainable)
    if built:
        model(X[:1])
    optimizer = OPTIMIZERS[name](model, process_set=LocalCommunicator(), **options)
    model.compile(optimizer, jit_compile=False, run_eagerly=eagerly)
    model.fit(X, batch_size=4, shuffle=False, verbose=0)
    return model


def center(model: Any) -> list[list[float]]:
    with model.optimizer.center():
        return [weight.ravel().tolist() for weight in model.get_weights()]


@pytest.mark.parametrize(("name", "eagerly"), covering(OPTIMIZERS, [False, True], together=1))
def test_parameters_without_gradients_that_are_assigned(
    name: str, eagerly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Named once, and the same whether the optimizer was built with the model or by the first step."""
    found = []
    for built in (True, False):
        caplog.clear()
        model = trained(name, built, eagerly)
        assert caplog.text.count(TAKE_PART) == 1
        assert f"{TAKE_PART}'ema/ema/kernel'. " in caplog.text
        assert "Set trainable = False on their layers" in caplog.text
        found.append(center(model))
    assert found[0] == found[1]
    assert OWN not in caplog.text


@pytest.mark.parametrize(
    ("buffers", "built", "eagerly"),
    covering([None, {"ema/*": "local"}, {"ema/*": "average"}], [True, False], [True, False], together=1),
)
def test_weights_that_no_exchange_touches(
    buffers: Any, built: bool, eagerly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Named where the center is read, unless somebody has said what exchanges make of them."""
    model = trained("agn", built, eagerly, trainable=False, buffers=buffers)
    assert TAKE_PART not in caplog.text
    kept = model.ema_network.get_weights()[0].tolist()
    center(model)
    center(model)
    assert caplog.text.count(f"{OWN}'ema/ema/kernel'. No exchange touches them") == (buffers is None)
    assert model.ema_network.get_weights()[0].tolist() == kept


def test_what_takes_part_is_given_to_build() -> None:
    """Who builds the optimizer says what takes part."""
    model = Averaged()
    optimizer = OPTIMIZERS["average"](model, process_set=LocalCommunicator())
    optimizer.build(model.network.trainable_variables)
    assert [name for name, _ in optimizer.synchronizer.replica.named.parameters] == ["network/network/kernel"]


def test_a_first_step_on_other_variables_than_the_models() -> None:
    model, temperature = Averaged(), keras.Variable(1.0, name="temperature")
    optimizer = OPTIMIZERS["average"](model, process_set=LocalCommunicator())
    optimizer.apply([tf.ones([])], [temperature])
    assert [name for name, _ in optimizer.synchronizer.replica.named.parameters] == [
        "temperature",
        "network/network/kernel",
        "ema/ema/kernel",
    ]
