"""Variables of Keras models that take part by pattern: as on numpy, see ``test_participation.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import Communicator, LocalCommunicator
from tests.helpers import errors, run_ranks
from tests.unit.test_tensorflow_edges import Delegate

pytestmark = pytest.mark.timeout(120)

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
}
POLICIES = {"expert_*": "local", "router": "broadcast"}
STEPS, PERIOD, ROOT = 5, 2, 1


def body() -> Any:
    return keras.Variable([1.0, -2.0, 0.5], name="body")


def everything(rank: int) -> list[Any]:
    expert = keras.Variable(np.ones(rank + 1), name=f"expert_{rank}")
    return [expert, body(), keras.Variable([0.25, 4.0], name="router")]


def made(variables: list[Any], communicator: Any, algorithm: str, root_rank: int = ROOT, **options: Any) -> Any:
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.5),
        None,
        ALGORITHMS[algorithm](),
        PERIOD,
        process_set=Delegate(communicator),
        root_rank=root_rank,
        **options,
    )
    optimizer.build(variables)
    return optimizer


def trained(variables: list[Any], optimizer: Any, rank: int, compiled: bool = False) -> list[list[Any]]:
    """Return all values after each step, and those of the center at the end."""

    def step() -> None:
        optimizer.apply([(0.5 + 0.25 * rank) * (x.value - (1.5 - rank)) for x in variables], variables)

    run = tf.function(step, autograph=False) if compiled else step
    seen = []
    for _ in range(STEPS):
        run()
        seen.append([x.numpy().tolist() for x in variables])
    with optimizer.center():
        seen.append([x.numpy().tolist() for x in variables])
    return seen


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("easgd", {}),
        ("agn", {"center": "sharded"}),
        ("diloco", {"overlap": 1, "optimizer_state": "reset"}),
    ],
)
def test_the_rest_is_exchanged_as_if_it_were_alone(algorithm: str, options: dict[str, Any]) -> None:
    def by_pattern(communicator: Communicator) -> Any:
        variables = everything(communicator.rank)
        optimizer = made(variables, communicator, algorithm, parameters=POLICIES, **options)
        return trained(variables, optimizer, communicator.rank)

    def alone(communicator: Communicator) -> Any:
        variables = [body()]
        return trained(variables, made(variables, communicator, algorithm, **options), communicator.rank)

    results = run_ranks(2, by_pattern)
    for rank, (found, expected) in enumerate(zip(results, run_ranks(2, alone), strict=True)):
        assert [[x] for _, x, _ in found] == [pytest.approx(np.array(x), rel=1e-6) for x in expected]
        expert, local = keras.Variable(np.ones(rank + 1)), keras.optimizers.SGD(0.1, momentum=0.5)
        for step in range(STEPS):
            local.apply([(0.5 + 0.25 * rank) * (expert.value - (1.5 - rank))], [expert])
            assert found[step][0] == pytest.approx(expert.numpy().tolist(), rel=1e-6)
        for step in range(PERIOD - 1, STEPS, PERIOD):
            assert found[step][2] == results[ROOT][step][2]
        assert found[0][2] != results[1 - rank][0][2]
        assert found[-1][2] == results[ROOT][STEPS - 2][2]


def test_ranks_that_keep_different_variables() -> None:
    """Of equal shape, and under names that only Keras has numbered."""

    def work(communicator: Communicator) -> None:
        layers = [keras.layers.Dense(2, use_bias=False, name=name) for name in ("abc", "zab")[communicator.rank]]
        for layer in layers:
            layer.build((2, 2))
        made([layer.kernel for layer in layers], communicator, "diloco", parameters={"b/*": "local"})

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "They differ in places of parameters among the trained variables" in message


def test_compiled_steps_do_the_same() -> None:
    """On one rank: ranks that are threads would share the threads of TensorFlow."""
    eager, compiled = (
        trained(variables, made(variables, LocalCommunicator(), "agn", 0, parameters=POLICIES), 0, compiled)
        for variables, compiled in ((everything(0), False), (everything(0), True))
    )
    for found, expected in zip(compiled, eager, strict=True):
        assert [*map(pytest.approx, found)] == expected


def test_the_explicit_synchronizer_takes_gradients_of_all_variables() -> None:
    own, x = keras.Variable([1.0], name="own"), body()
    synchronizer = hvdp.Synchronizer(
        [own, x], hvdp.AGN(), 2, outer_optimizer=keras.optimizers.SGD(1.0), parameters={"own": "local"}
    )
    for _ in range(2):
        gradients = [tf.ones_like(own.value), tf.ones_like(x.value)]
        assert len(synchronizer.prepare_gradients(gradients)) == 2
        own.assign_sub([0.5])
        synchronizer.step()
    assert own.numpy().tolist() == [0.0]
    assert x.numpy().tolist() == [0.0, -3.0, -0.5]


def test_moving_averages_of_the_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="`parameters` cannot be combined with use_ema=True"):
        hvdp.PeriodicOptimizer(
            keras.optimizers.SGD(0.1, use_ema=True), None, hvdp.Averaging(), 2, parameters={"own": "local"}
        )


def test_the_policies_are_in_the_configuration() -> None:
    optimizer = hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), None, hvdp.Averaging(), 2, parameters=POLICIES)
    assert type(optimizer).from_config(optimizer.get_config()).get_config()["parameters"] == POLICIES


class Pair(keras.layers.Layer):
    """Returns what it is given, and has two weights, one of which is each rank's own."""

    def build(self, shape: Any) -> None:
        self.x = self.add_weight(shape=(2,), initializer="zeros", name="x")
        self.own = self.add_weight(shape=(2,), initializer="ones", name="own")

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize("explicit", [False, True])
def test_a_checkpoint_resumes_on_other_ranks(explicit: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that were there keep their own variables, with their momentum; new ones have those of their models."""

    def model_of(communicator: Communicator) -> tuple[Any, Any, Any]:
        model = keras.Sequential([keras.Input((2,)), Pair()])
        model.layers[0].own.assign([1.0 + communicator.rank] * 2)
        local = keras.optimizers.SGD(0.1, momentum=0.5)
        local.build(model.trainable_variables)
        options: dict[str, Any] = {"process_set": Delegate(communicator), "parameters": {"*own": "local"}}
        if explicit:
            return model, hvdp.Synchronizer(model, hvdp.DiLoCo(), 2, **options), local
        optimizer = hvdp.PeriodicOptimizer(local, model, hvdp.DiLoCo(), 2, **options)
        optimizer.build(model.trainable_variables)
        return model, optimizer, local

    def train(model: Any, optimizer: Any, local: Any, steps: int) -> list[float]:
        for _ in range(steps):
            gradients = [x.value - 3.0 for x in model.trainable_variables]
            if explicit:
                local.apply(optimizer.prepare_gradients(gradients))
                optimizer.step()
            else:
                optimizer.apply(gradients, model.trainable_variables)
        found: list[float] = model.layers[0].own.numpy().tolist()
        return found

    def save(communicator: Communicator) -> None:
        model, optimizer, local = model_of(communicator)
        train(model, optimizer, local, 3)
        hvdp.save(tmp_path, model, optimizer, **({"local": local} if explicit else {}))

    def resume(communicator: Communicator) -> list[float]:
        model, optimizer, local = model_of(communicator)
        hvdp.load(tmp_path, model, optimizer, **({"local": local} if explicit else {}))
        return train(model, optimizer, local, 2)

    def own(rank: int, steps: int) -> list[float]:
        x, local = keras.Variable([1.0 + rank] * 2), keras.optimizers.SGD(0.1, momentum=0.5)
        for _ in range(steps):
            local.apply([x.value - 3.0], [x])
        found: list[float] = x.numpy().tolist()
        return found

    run_ranks(2, save)
    assert run_ranks(3, resume) == [own(0, 5), own(1, 5), own(2, 2)]
    assert caplog.text.count("has written no file of") == 1
    assert "Rank 2 has written no file of" in caplog.text
    assert run_ranks(1, resume) == [own(0, 5)]
