"""Rounds with a quorum: the numbers of the reference, who takes part, limits, invariants, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging, DiLoCo
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import run_ranks

CURVATURE, MINIMUM, RATE, PERIOD = (0.5, 1.0, 2.0), (3.0, -1.0, 0.5), 0.1, 2
"""Of workers with F_i = h_i (x − b_i)²/2."""

SETS = [[0, 1], [0, 1, 2], [1, 2], [0, 1, 2]]


class Trainer:
    """A worker on its quadratic."""

    def __init__(self, communicator: Communicator, algorithm: Algorithm, **options: Any) -> None:
        self.rank, self.x, self.communicator = communicator.rank, np.zeros(1), communicator
        self.local = SGD(RATE)
        self.optimizer = PeriodicOptimizer(
            self.local, {"x": self.x}, algorithm, PERIOD, process_set=communicator, **options
        )
        self.optimizer.synchronizer.begin()

    def replay(self, sets: Sequence[Sequence[int]]) -> None:
        self.optimizer.synchronizer.exchanger.replay(sets)  # type: ignore[attr-defined]
        self.communicator.allgather_object(None, "replayed")

    def period(self) -> None:
        for _ in range(PERIOD):
            self.optimizer.step([CURVATURE[self.rank] * (self.x - MINIMUM[self.rank])])

    def center(self) -> float:
        return float(self.optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"][0])


def rounds(algorithm: Algorithm, sets: Sequence[Sequence[int]] = SETS, **options: Any) -> list[tuple[Any, Any, float]]:
    """Return of every worker its rounds, with x after each, and c at the end."""

    def work(communicator: Communicator) -> tuple[Any, Any, float]:
        trainer = Trainer(communicator, algorithm, quorum=2, **options)
        trainer.replay(sets)
        seen = []
        for number, members in enumerate(sets):
            if communicator.rank in members:
                trainer.period()
                seen.append((number, float(trainer.x[0])))
        communicator.allgather_object(None, "done")
        return seen, trainer.optimizer.synchronizer.counters, trainer.center()

    return run_ranks(3, work)


TABLE: dict[str, tuple[Algorithm, dict[str, Any], Sequence[float]]] = {
    "averaging": (Averaging(), {}, [0.05125, 0.140505208, 0.096866276, 0.168707706]),
    "averaging, discounted": (
        Averaging(),
        {"staleness_power": 0.5},
        [0.05125, 0.130687149, 0.089748183, 0.140894034],
    ),
    "diloco": (DiLoCo(), {}, [0.0681625, 0.213775038, 0.204778413, 0.302937413]),
    "elastic averaging": (EASGD(0.25), {}, [0.025625, 0.097671484, 0.023871586, 0.14610129]),
    "agn, sum": (AGN(), {"outer_optimizer": SGD(0.1)}, [0.05125, 0.185132812, 0.129221289, 0.22591021]),
    "agn, average": (
        AGN("average"),
        {"outer_optimizer": SGD(0.1, 0.9)},
        [0.025625, 0.094542969, 0.141069482, 0.215558986],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_numbers(case: str) -> None:
    algorithm, options, expected = TABLE[case]
    for length in range(1, len(SETS) + 1):
        for _, _, center in rounds(algorithm, SETS[:length], **options):
            assert center == pytest.approx(expected[length - 1], abs=5e-9)


def test_replicas_of_elastic_averaging() -> None:
    results = rounds(EASGD(0.25))
    last = [seen[-1][1] for seen, _, _ in results]
    assert last == pytest.approx([0.478677379, -0.290441984, 0.250068475], abs=5e-9)
