"""Elastic states of Keras whose ranks are threads: parameters with policies of their own, while ranks come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras

import hvd_periodic.tensorflow as hvdp
from tests.covering import covering
from tests.unit.test_tensorflow_elastic_ranks import (
    CONSTRUCTING,
    HERE,
    PERIOD,
    Worker,
    _ranks_are_threads,
    together,
)

__all__ = ["_ranks_are_threads"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:Gradients do not exist")]

ROWS = 31
SHAPES = {"body": (3,), "led": (2,), "seldom": (2,), "table": (ROWS, 2)}
POLICIES = {"*led": "broadcast", "*seldom": "present", "*table": "rows"}
RATE, MOMENTUM = 0.125, 0.5
STEPS = 3
"""Before the commit, in the middle of a period; as many follow the loss."""

LEFT: dict[str, list[int | None]] = {
    "a rank is lost": [0, 2],
    "another one joins": [0, None, 2],
    "the root is lost": [2, 1],
    "ranks join": [0, 1, 2, None],
}
"""The ranks of three that go on, in their new order, with new ones between them."""


class Weights(keras.layers.Layer):
    """Has variables."""

    def build(self, _: Any) -> None:
        for name, shape in SHAPES.items():
            self.add_weight(shape=shape, initializer="ones", name=name)

    def call(self, inputs: Any) -> Any:
        return inputs


def new(algorithm: Any, parameters: dict[str, str], momentum: float = 0.0, **options: Any) -> Worker:
    with CONSTRUCTING:
        inputs = keras.Input((1,))
        model = keras.Model(inputs, Weights(dtype="float64")(inputs))
        local = keras.optimizers.SGD(RATE, momentum=momentum)
        optimizer = hvdp.PeriodicOptimizer(
            *(local, model, algorithm, PERIOD), process_set=HERE.communicator, parameters=parameters, **options
        )
        return Worker(model, optimizer, local, hvdp.elastic.State(model, optimizer, batch=0))


def touched(rank: int, step: int) -> np.ndarray:
    """Return the rows that a step touches, as 0 and 1: in some periods nobody touches a row."""
    return np.array([[float((rank + 2 * step + 3 * k) % ROWS == 0)] for k in range(ROWS)])


def train(worker: Worker, steps: int) -> list[dict[str, Any]]:
    """Return the values after each step, in which a rank may have no gradient of ``seldom``."""
    rank, seen = HERE.communicator.rank, []
    for _ in range(steps):
        step, gradients = worker.state.batch, []
        for variable in worker.model.trainable_variables:
            g = variable.numpy() - (0.25 + rank)
            g = g * touched(rank, step) if variable.name == "table" else g
            absent = variable.name == "seldom" and (rank + step) % 3
            gradients.append(None if absent else keras.ops.convert_to_tensor(g))
        worker.optimizer.apply(gradients)
        worker.state.batch += 1
        seen.append(values(worker))
    return seen


def values(worker: Worker) -> dict[str, Any]:
    return {variable.name: variable.numpy().tolist() for variable in worker.model.trainable_variables}


def job(left: Sequence[int | None], make: Callable[[], Worker]) -> list[Any]:
    """Return what the ranks that go on have after each step, the center at the end, and the bytes sent."""

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        train(worker, STEPS)
        worker.state.commit()
        train(worker, 1)
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        seen = [values(worker), *train(worker, STEPS)]
        with worker.optimizer.center():
            return [*seen, values(worker)], worker.optimizer.synchronizer.counters.bytes_sent

    workers = together([make] * 3, first)
    return together([make if rank is None else workers[rank] for rank in left], again)


def led(left: Sequence[int | None]) -> list[list[float]]:
    """Return ``led`` of the ranks that go on after each step, by the equations; who joins takes a momentum."""
    x, v, center = [1.0] * 3, [0.0] * 3, 1.0
    seen = []
    for step in range(1, 2 * STEPS + 1):
        if step == STEPS + 1:
            first = next(rank for rank in left if rank is not None)
            x, v = (
                [of[rank] if rank is not None else given for rank in left] for of, given in ((x, center), (v, v[first]))
            )
            seen.append(list(x))
        v = [MOMENTUM * v_i - RATE * (x_i - (0.25 + i)) for i, (v_i, x_i) in enumerate(zip(v, x, strict=True))]
        x = [x_i + v_i for x_i, v_i in zip(x, v, strict=True)]
        if step % PERIOD == 0:
            center = x[0]
            x = [center] * len(x)
        seen += [list(x)] if step > STEPS else []
    return [*seen, [center] * len(x)]


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "diloco": hvdp.DiLoCo,
    "agn": hvdp.AGN,
    "easgd": lambda: hvdp.EASGD(0.2),
    "easgd, α = 1/(n + 1)": hvdp.EASGD,
}
"""Of the third, ranks keep the sums of rows that are not touched, which are those of other ranks after a loss."""


@pytest.mark.parametrize(("algorithm", "case"), covering(ALGORITHMS, LEFT, together=1))
def test_tables_are_exchanged_as_whole_ones_are(algorithm: str, case: str) -> None:
    """Beside parameters with other policies."""
    dense = {pattern: policy for pattern, policy in POLICIES.items() if policy != "rows"}
    makers = [lambda policies=policies: new(ALGORITHMS[algorithm](), policies) for policies in (POLICIES, dense)]
    by_rows, whole = (job(LEFT[case], make) for make in makers)
    for (found, fewer), (expected, more) in zip(by_rows, whole, strict=True):
        for one, other in zip(found, expected, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-13, err_msg=name)
        assert fewer < more


@pytest.mark.parametrize(("case", "center"), covering(LEFT, ("replicated", "root", "sharded"), together=1))
def test_parameters_of_the_root(case: str, center: str) -> None:
    policies = {"*led": "broadcast", "*seldom": "present"}
    reports = job(LEFT[case], lambda: new(hvdp.DiLoCo(), policies, MOMENTUM, center=center))
    expected = led(LEFT[case])
    for rank, (found, _) in enumerate(reports):
        for of_step, of_ranks in zip(found, expected, strict=True):
            np.testing.assert_allclose(of_step["led"], [of_ranks[rank]] * 2, rtol=0, atol=1e-12)
