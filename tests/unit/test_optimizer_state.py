"""What becomes of the state of local optimizers at an exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import Averaging
from hvd_periodic.local_state import Average, Local, Reset, as_local_state
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import errors, run_ranks

PERIOD, STEPS = 2, 12


class TwoMoments:
    """Moments of different length, and a counter."""

    def __init__(self) -> None:
        self.learning_rate = 0.1
        self.steps = 0
        self.first: list[np.ndarray] = []
        self.second: list[np.ndarray] = []

    def step(self, parameters: Any, gradients: Any) -> None:
        """Descend on the first moment."""
        if not self.first:
            self.first, self.second = ([np.zeros_like(x) for x in parameters] for _ in range(2))
        self.steps += 1
        for x, g, m, v in zip(parameters, gradients, self.first, self.second, strict=True):
            m[...] = 0.5 * m + g
            v[...] = 0.75 * v + g * g
            x -= self.learning_rate * m


def gradient(rank: int, step: int) -> np.ndarray:
    return np.array([1.0 + rank, 0.25 * step - rank])


def oracle(size: int, every: dict[str, int], reset: bool = False) -> list[list[np.ndarray]]:
    """Both moments of all ranks after the last step, in plain loops: after an exchange the mean, or zero."""
    moments = {"first": [np.zeros(2) for _ in range(size)], "second": [np.zeros(2) for _ in range(size)]}
    for step in range(1, STEPS + 1):
        for rank in range(size):
            g = gradient(rank, step)
            moments["first"][rank] = 0.5 * moments["first"][rank] + g
            moments["second"][rank] = 0.75 * moments["second"][rank] + g * g
        if step % PERIOD == 0:
            for name, period in every.items():
                if step // PERIOD % period == 0:
                    mean = sum(moments[name]) / size
                    moments[name] = [mean.copy() for _ in range(size)]
            if reset:
                moments = {name: [np.zeros(2) for _ in range(size)] for name in moments}
    return [[moments["first"][rank], moments["second"][rank]] for rank in range(size)]


def train(size: int, policy: Any) -> list[tuple[list[np.ndarray], int, int]]:
    def work(communicator: Communicator) -> tuple[list[np.ndarray], int, int]:
        local = TwoMoments()
        optimizer = PeriodicOptimizer(
            local, {"x": np.zeros(2)}, Averaging(), PERIOD, process_set=communicator, optimizer_state=policy
        )
        for step in range(1, STEPS + 1):
            optimizer.step([gradient(communicator.rank, step)])
        return [local.first[0], local.second[0]], local.steps, optimizer.synchronizer.counters.bytes_sent

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("policy", "every", "reset"),
    [
        ("local", {}, False),
        ("average", {"first": 1, "second": 1}, False),
        ({"first": 3, "second": 6}, {"first": 3, "second": 6}, False),
        ({"second": 2}, {"second": 2}, False),
        ("reset", {}, True),
        (Average({"first": 1}), {"first": 1}, False),
    ],
    ids=str,
)
def test_moments(policy: Any, every: dict[str, int], reset: bool, size: int) -> None:
    expected = oracle(size, every, reset)
    for (moments, steps, _), wanted in zip(train(size, policy), expected, strict=True):
        assert steps == STEPS, "counters are left alone"
        for found, value in zip(moments, wanted, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-14)


def test_what_is_averaged_is_counted() -> None:
    local, averaged = (train(2, policy)[0][2] for policy in ("local", {"first": 3}))
    assert averaged - local == STEPS // PERIOD // 3 * 2 * 8


def test_policies_by_name() -> None:
    assert as_local_state("local") == Local()
    assert as_local_state("reset") == Reset()
    assert as_local_state("average") == Average()
    assert as_local_state({"exp_avg": 3}) == Average({"exp_avg": 3})
    assert as_local_state(Reset()) == Reset()


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "name": ("mean", ValueError, r"`optimizer_state` must be one of \('average', 'local', 'reset'\).*Received: 'mean'"),
    "period": ({"first": 0}, ValueError, r"`optimizer_state\['first'\]` must be an int >= 1. Received: 0"),
    "fraction": ({"first": 1.5}, TypeError, r"must be an int >= 1. Received: 1.5"),
    "type": (3, ValueError, r"Received: 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_policies(case: str) -> None:
    policy, error, message = BAD[case]
    with pytest.raises(error, match=message):
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, Averaging(), 2, optimizer_state=policy)


def test_an_unknown_entry_is_an_error_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        policy = {"first": 1, "third": 1}
        optimizer = PeriodicOptimizer(
            TwoMoments(), {"x": np.zeros(2)}, Averaging(), 2, process_set=communicator, optimizer_state=policy
        )
        for step in range(4):
            optimizer.step([gradient(communicator.rank, step)])

    for kind, message in errors(2, work):
        assert kind is RuntimeError
        assert "names 'third', which is not in the state of the local optimizer. That has first, second" in message


@pytest.mark.parametrize("difference", ["missing", "shape", "policy"])
def test_state_that_differs_is_an_error_on_every_rank(difference: str) -> None:
    def work(communicator: Communicator) -> None:
        local = TwoMoments()
        other = communicator.rank == 1
        policy = "local" if other and difference == "policy" else "average"
        optimizer = PeriodicOptimizer(
            local, {"x": np.zeros(2)}, Averaging(), 2, process_set=communicator, optimizer_state=policy
        )
        for step in range(4):
            if other and step == 1:
                if difference == "missing":
                    local.second = [np.zeros(3)]
                elif difference == "shape":
                    local.first = [array.astype(np.float32) for array in local.first]
            try:
                optimizer.step([gradient(communicator.rank, step)])
            except ValueError as error:
                if "broadcast" in str(error):  # The local step of this test's own optimizer.
                    optimizer.skip()
                    continue
                raise

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "They differ in" in message


def test_asynchronous_exchange_leaves_it_alone() -> None:
    from hvd_periodic import EASGD

    with pytest.raises(ValueError, match=r"`optimizer_state` must be 'local' in asynchronous exchange"):
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, EASGD(0.5), 2, asynchronous=True, optimizer_state="average")
