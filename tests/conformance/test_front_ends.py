"""Every algorithm runs alike in every front end: the trajectory on numpy arrays is the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, PostLocal
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.conformance.discovery import algorithms
from tests.covering import covering
from tests.helpers import Array, random_arrays, readable, run_ranks

RATE, MOMENTUM, STEPS = 0.25, 0.5, 9
SCHEDULES = {"every 3": 3, "post-local": PostLocal(2, 3)}

Trajectory = list[list[list[float]]]


def gradient(x: Array, rank: int, step: int) -> Array:
    return np.asarray(0.3 * (x - 1 - rank - 0.1 * step))


def on_numpy(algorithm: Any, schedule: Any, communicator: Communicator) -> Trajectory:
    arrays = random_arrays(communicator.rank)
    named = {f"p{i}": array for i, array in enumerate(arrays)}
    optimizer = PeriodicOptimizer(SGD(RATE, MOMENTUM), named, algorithm, schedule, process_set=communicator)
    seen = []
    for step in range(STEPS):
        optimizer.step([gradient(array, communicator.rank, step) for array in arrays])
        seen.append([array.ravel().tolist() for array in arrays])
    optimizer.synchronizer.finalize()
    with optimizer.center():
        seen.append([array.ravel().tolist() for array in arrays])
    return seen


def on_torch(algorithm: Any, schedule: Any, communicator: Communicator) -> Trajectory:
    torch = pytest.importorskip("torch")
    import hvd_periodic.torch as hvdp

    parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in random_arrays(communicator.rank)]
    optimizer = hvdp.PeriodicOptimizer(
        torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM),
        [(f"p{i}", parameter) for i, parameter in enumerate(parameters)],
        algorithm,
        schedule,
        process_set=communicator,
    )
    seen = []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.from_numpy(gradient(parameter.detach().numpy(), communicator.rank, step))
        optimizer.step()
        seen.append([parameter.detach().reshape(-1).tolist() for parameter in parameters])
    optimizer.synchronizer.finalize()
    with optimizer.center():
        seen.append([parameter.detach().reshape(-1).tolist() for parameter in parameters])
    return seen


class Delegate(Communicator):
    """Hands collectives on to another communicator; changes no buffer."""

    def __init__(self, other: Communicator) -> None:
        self.rank, self.size, self._other = other.rank, other.size, other

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Any:
        return self._other.allreduce(np.array(buffer), name, op)

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        return self._other.broadcast(np.array(buffer), name, root)

    def reducescatter(self, buffer: Any, name: str) -> Any:
        return self._other.reducescatter(np.array(buffer), name)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        return self._other.allgather(np.array(buffer), name)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        return self._other.allgather_object(value, name)


def on_tensorflow(algorithm: Any, schedule: Any, communicator: Communicator) -> Trajectory:
    """Local steps by hand: Keras keeps momentum and learning rate in float32."""
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")
    import hvd_periodic.tensorflow as hvdp

    variables = [tf.Variable(array) for array in random_arrays(communicator.rank)]
    velocities = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
    center = keras.optimizers.SGD(RATE, MOMENTUM) if algorithm.needs_outer_optimizer else None
    synchronizer = hvdp.Synchronizer(
        variables,
        algorithm,
        schedule,
        optimizer=keras.optimizers.SGD(RATE),
        outer_optimizer=center,
        process_set=Delegate(communicator),
    )
    seen = []
    for step in range(STEPS):
        gradients = [tf.constant(gradient(variable.numpy(), communicator.rank, step)) for variable in variables]
        for variable, velocity, g in zip(variables, velocities, synchronizer.prepare_gradients(gradients), strict=True):
            velocity.assign(MOMENTUM * velocity + g)
            variable.assign_sub(RATE * velocity)
        synchronizer.step()
        seen.append([variable.numpy().ravel().tolist() for variable in variables])
    synchronizer.finalize()
    with synchronizer.center():
        seen.append([variable.numpy().ravel().tolist() for variable in variables])
    return seen


FRONT_ENDS = {"torch": on_torch, "tensorflow": on_tensorflow}


@functools.cache
def expected_of(cls: Any, name: str, size: int) -> list[Trajectory]:
    """Return where the front end of numpy goes."""
    return run_ranks(size, lambda communicator: on_numpy(cls(), SCHEDULES[name], communicator))


@pytest.mark.parametrize(
    ("framework", "cls", "name", "size"), covering(FRONT_ENDS, algorithms(), SCHEDULES, (3, 1)), ids=readable
)
def test_front_ends_agree_with_numpy(framework: str, cls: Any, name: str, size: int) -> None:
    pytest.importorskip(framework)
    schedule, expected = SCHEDULES[name], expected_of(cls, name, size)
    found = run_ranks(size, lambda communicator: FRONT_ENDS[framework](cls(), schedule, communicator))
    for rank in range(size):
        for step, (left, right) in enumerate(zip(found[rank], expected[rank], strict=True)):
            for a, b in zip(left, right, strict=True):
                assert a == pytest.approx(b, rel=1e-12, abs=1e-12), f"rank {rank}, step {step}"
