"""What several test files share; numpy and threads only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hvd_periodic import Algorithm, Communicator, ReplicaSynchronizer, Schedule
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.comm.threads import run
from hvd_periodic.numpy import SGD, ArrayOptimizer, NumpyReplica, PeriodicOptimizer
from hvd_periodic.numpy.outer import ArrayOuterOptimizer
from tests.conftest import PATIENCE

T = TypeVar("T")
Array = np.ndarray[Any, Any]

TIMEOUT_SECONDS = 30.0 * PATIENCE
"""How long a rank waits for the others in one collective before the test fails instead of hanging."""


def readable(value: object) -> str:
    """Return the name of a test's parameter: the same in every process, without the addresses of objects."""
    return value.__name__ if isinstance(value, type) else re.sub(r" at 0x\w+", "", repr(value))


def run_ranks(size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Run ``function`` on ``size`` threads and return the results in rank order."""
    return run(size, function, TIMEOUT_SECONDS)


def outcomes(size: int, function: Callable[[Communicator], T]) -> list[T | Exception]:
    """Run ``function`` on ``size`` threads; a rank's exception is its outcome and disturbs no other rank."""

    def guarded(communicator: Communicator) -> T | Exception:
        try:
            return function(communicator)
        except Exception as error:
            return error

    return run(size, guarded, TIMEOUT_SECONDS)


def errors(size: int, function: Callable[[Communicator], object]) -> list[tuple[type[BaseException], str]]:
    """Return type and message of the exception that each rank ended with; fail if a rank ended without one."""
    results = outcomes(size, function)
    assert all(isinstance(result, Exception) for result in results), f"Not every rank raised: {results}"
    return [(type(result), str(result)) for result in results]  # type: ignore[arg-type]


def read_center(optimizer: PeriodicOptimizer, arrays: Sequence[Array]) -> list[Array]:
    """Return copies of the center, read as a user reads it: from the arrays, inside ``with optimizer.center()``."""
    with optimizer.center():
        return [array.copy() for array in arrays]


class NumpyTrainer:
    """A replica, its local optimizer and a synchronizer over buckets of a chosen size; steps like the front end."""

    def __init__(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        algorithm: Algorithm,
        schedule: Schedule,
        *,
        optimizer: ArrayOptimizer | None = None,
        outer_optimizer: ArrayOptimizer | None = None,
        bucket_bytes: int = 96,
        center: str = "replicated",
    ) -> None:
        self.arrays = list(arrays)
        self.optimizer = SGD(0.5) if optimizer is None else optimizer
        named = [(f"p{i}", array) for i, array in enumerate(self.arrays)]
        self.replica = NumpyReplica(named, bucket_bytes)
        moving: ArrayOptimizer | None = SGD(0.25, 0.5) if algorithm.needs_outer_optimizer else None
        if outer_optimizer is not None and algorithm.takes_outer_optimizer:
            moving = outer_optimizer
        self.synchronizer: ReplicaSynchronizer[Array] = ReplicaSynchronizer(
            self.replica,
            algorithm,
            schedule,
            communicator,
            center=center,
            outer=None if moving is None else ArrayOuterOptimizer(moving),
            rates=LearningRates(lambda: [0.5] * len(self.arrays)),
        )
        self.synchronizer.start()

    def step(self, gradients: Sequence[Array]) -> bool:
        """Take one local step; return whether an exchange took place."""
        self.replica.gradients = [np.array(gradient) for gradient in gradients]
        self.synchronizer.prepare_gradients()
        self.optimizer.step(self.arrays, self.replica.gradients)
        return self.synchronizer.step()

    def center(self) -> list[Array]:
        """Return copies of the center, in the dtype in which it is kept."""
        return [tensor.copy() for tensor in self.synchronizer.center_tensors()]


def random_arrays(seed: int, dtype: str = "float64") -> list[Array]:
    """Return arrays of awkward shapes: 0-d, empty, odd, many dimensions, and one that spans several small buckets."""
    generator = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(3,), (), (0, 4), (5, 7), (1, 1, 1, 1, 1, 1, 2), (13,)]
    return [np.asarray(generator.standard_normal(shape)).astype(dtype) for shape in shapes]
