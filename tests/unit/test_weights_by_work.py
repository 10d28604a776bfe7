"""Weights by work, on numpy: local updates or reported examples since a rank last took part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Averaging, Communicator, DiLoCo, LocalCommunicator
from hvd_periodic.numpy import SGD, ModelAverageOptimizer, PeriodicOptimizer
from tests.helpers import errors, run_ranks

CASES: dict[str, tuple[Any, Any, list[float]]] = {
    "plain": (Averaging(), None, [-0.0605, -0.11128975, -0.153927745]),
    "steps": (Averaging(), "steps", [-0.16575, -0.295739438, -0.397683654]),
    "examples": (Averaging(), "examples", [0.0658, 0.12540164, 0.179388806]),
    "AGN": (AGN("average"), None, [0.029833333, 0.057573361, 0.083366964]),
    "AGN, steps": (AGN("average"), "steps", [-0.03025, -0.058072438, -0.083662124]),
}
"""Two workers of one and of three local updates per period; c after each round."""


class Worker:
    """A worker on h (x − b)²/2 whose last iterations of every period of three may be without update."""

    def __init__(self, communicator: Communicator, algorithm: Any, weight: Any, **options: Any) -> None:
        self.rank, self.x = communicator.rank, np.zeros(1)
        self.h, self.b = [(0.5, 3.0), (1.0, -1.0)][communicator.rank]
        self.optimizer = PeriodicOptimizer(
            SGD(0.1), {"x": self.x}, algorithm, 3, process_set=communicator, weight=weight, **options
        )
        self.iterations = 0

    def step(self) -> float:
        """Take one iteration; the workers report eight examples, and two, per period."""
        if self.rank == 0 and self.iterations % 3:
            self.optimizer.skip()
        else:
            examples = 8 if self.rank == 0 else (1, 0.25, 0.75)[self.iterations % 3]
            self.optimizer.step([self.h * (self.x - self.b)], examples=examples)
        self.iterations += 1
        return float(self.x[0])


@pytest.mark.parametrize("case", CASES)
def test_numbers_worked_out_by_hand(case: str) -> None:
    algorithm, weight, centers = CASES[case]

    def work(communicator: Communicator) -> list[float]:
        worker = Worker(communicator, algorithm, weight)
        return [worker.step() for _ in range(9)][2::3]

    for found in run_ranks(2, work):
        np.testing.assert_allclose(found, centers, atol=1e-9)


@pytest.mark.parametrize("weight", ["steps", "examples"])
def test_counts_are_saved(weight: str) -> None:
    """In the middle of a period, in which one worker has taken its only step."""

    def work(communicator: Communicator) -> tuple[list[float], list[float]]:
        worker = Worker(communicator, DiLoCo(), weight)
        for _ in range(5):
            worker.step()
        state, x = worker.optimizer.synchronizer.state_dict(), worker.x.copy()
        wanted = [worker.step() for _ in range(7)]
        again = Worker(communicator, DiLoCo(), weight)
        again.optimizer.synchronizer.load_state_dict(state)
        again.x[:], again.iterations = x, 5
        return wanted, [again.step() for _ in range(7)]

    for wanted, found in run_ranks(2, work):
        assert found == wanted


def test_a_state_from_before_weights_by_work() -> None:
    """Has no count of the updates until the last exchange, which follows from the counters."""
    x = np.zeros(1)
    optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, 2, weight="steps")
    for _ in range(5):
        optimizer.step([np.ones(1)])
    state = optimizer.synchronizer.state_dict()
    for name in ("updates", "examples", "reports"):
        del state["notes"][name]
    optimizer.synchronizer.load_state_dict(state)
    assert optimizer.synchronizer.progress.notes.updates == 4
    assert optimizer.synchronizer.progress.snapshot().updates == 1


def test_nobody_worked() -> None:
    """Nothing moves, and the periods go on."""

    def work(communicator: Communicator) -> list[float]:
        x = np.array([float(communicator.rank)])
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 2, process_set=communicator, weight="steps")
        seen = []
        for _ in range(4):
            optimizer.skip()
            seen.append(float(x[0]))
        optimizer.step([np.array([-2.0 * communicator.rank])])
        optimizer.skip()
        return [*seen, float(x[0])]

    assert run_ranks(2, work) == [[0.0] * 4 + [1.0]] * 2


def test_a_rank_that_is_left_out_loses_its_counts() -> None:
    """Moves of 1 by three steps and of 3 by one; the first rank was left out of the exchange before with its steps."""

    def work(communicator: Communicator) -> float:
        x = np.zeros(1)
        options: dict[str, Any] = {"process_set": communicator, "weight": "steps", "nonfinite": "skip"}
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 3, **options)
        for gradient in (math.nan, 0.0, 0.0) if communicator.rank == 0 else (0.0, 0.0, 0.0):
            optimizer.step([np.array([gradient])])
        if communicator.rank == 0:
            for gradient in (-1.0, 0.0, 0.0):
                optimizer.step([np.array([gradient])])
        else:
            optimizer.step([np.array([-5.0])])
            optimizer.skip()
            optimizer.skip()
        return float(x[0])

    assert run_ranks(2, work) == [(3 * 1 + 1 * 5) / 4] * 2


def test_an_update_without_report() -> None:
    def work(communicator: Communicator) -> None:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 2, process_set=communicator, weight="examples")
        for _ in range(2):
            optimizer.step([np.ones(1)], examples=None if communicator.rank else 4)

    for _, message in errors(2, work):
        assert "The weight of this rank cannot be used" in message
        assert "no examples were reported in 2 local updates: pass `examples` with each" in message


@pytest.mark.parametrize("examples", [-1, math.nan, math.inf, "8", np.ones(2)], ids=str)
def test_bad_examples(examples: Any) -> None:
    """An error on all ranks, also on those that would wait at the next exchange."""

    def work(communicator: Communicator) -> None:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 2, process_set=communicator, weight="examples")
        for _ in range(2):
            optimizer.step([np.ones(1)], examples=examples if communicator.rank else 4)

    for _, message in errors(2, work):
        assert "`examples` must be a" in message


def test_bad_weights() -> None:
    model = {"x": np.zeros(1)}
    with pytest.raises(ValueError, match=r"a function, 'steps' or 'examples'\. Received: 'updates'"):
        ModelAverageOptimizer(SGD(1.0), model, weight="updates")
    with pytest.raises(ValueError, match=r"`weight='steps'` counts the work between .* Received: fragments=2"):
        ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(4), "y": np.zeros(4)}, 2, weight="steps", fragments=2)
    with pytest.raises(ValueError, match="`weight` is for algorithms that take the mean over ranks"):
        PeriodicOptimizer(SGD(1.0), model, EASGD(0.1), 2, weight="steps", process_set=LocalCommunicator())

    def work(communicator: Communicator) -> None:
        weight = "steps" if communicator.rank else "examples"
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 2, process_set=communicator, weight=weight)

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "weight" in message
