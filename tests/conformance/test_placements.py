"""Where the center lives changes nothing of what is computed."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, Every
from hvd_periodic.centers import PLACEMENTS
from hvd_periodic.numpy import SGD
from tests.conformance.discovery import algorithms
from tests.helpers import Array, NumpyTrainer, errors, random_arrays, run_ranks

ELSEWHERE = [name for name in PLACEMENTS if name != "replicated"]
SUMS = [cls for cls in algorithms() if cls.reduction == "sum"]

Trajectory = list[list[bytes]]


def gradients(arrays: list[Array], rank: int, step: int) -> list[Array]:
    return [np.asarray(0.3 * (x - 1 - rank - 0.1 * step), dtype=x.dtype) for x in arrays]


def trainer_of(communicator: Communicator, algorithm: Any, center: str, dtype: str = "float32") -> NumpyTrainer:
    moves = SGD(0.25, 0.5)
    return NumpyTrainer(
        communicator, random_arrays(0, dtype), algorithm, Every(2), outer_optimizer=moves, center=center
    )


def run(trainer: NumpyTrainer, rank: int, steps: range) -> Trajectory:
    """Return replica and center after every step, to the bit."""
    seen = []
    for step in steps:
        trainer.step(gradients(trainer.arrays, rank, step))
        seen.append([array.tobytes() for array in trainer.arrays])
        with trainer.synchronizer.center():
            seen[-1] += [array.tobytes() for array in trainer.arrays]
        seen[-1].append(np.float64(trainer.synchronizer.distance()).tobytes())
    return seen


def even(cls: Any, center: str, size: int, dtype: str) -> list[Trajectory]:
    """Return the trajectory of every rank, in a training that ends and goes on."""

    def work(communicator: Communicator) -> Trajectory:
        trainer = trainer_of(communicator, cls(), center, dtype)
        seen = run(trainer, communicator.rank, range(5))
        trainer.synchronizer.finalize()
        return [*seen, *run(trainer, communicator.rank, range(9, 11))]

    return run_ranks(size, work)


replicated = functools.cache(functools.partial(even, center="replicated"))


def trajectories() -> list[Any]:
    """Return algorithms, places, ranks and dtypes; every run has each pair of two."""
    found = []
    for (i, cls), (j, center), size in itertools.product(enumerate(SUMS), enumerate(ELSEWHERE), (1, 2, 3)):
        for dtype in ("float16", "float32", "float64"):
            chosen = (size, dtype) == ((2, "float16"), (3, "float32"))[(i + j) % 2]
            chosen = chosen or (size, dtype, i) == (1, "float64", j)
            marks = [] if chosen else [pytest.mark.thorough]
            if chosen or (size + i + j) % 3 == ("float16", "float32", "float64").index(dtype):
                found.append(
                    pytest.param(cls, center, size, dtype, id=f"{cls.__name__}-{center}-{size}-{dtype}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("cls", "center", "size", "dtype"), trajectories())
def test_the_trajectory_is_that_of_the_replicated_center(cls: Any, center: str, size: int, dtype: str) -> None:
    """To the bit: threads sum in the same order whether or not the sum is scattered."""
    expected = replicated(cls, size=size, dtype=dtype)
    assert even(cls, center, size, dtype) == expected
    assert size == 1 or expected[0] != expected[1]


@pytest.mark.parametrize("center", ELSEWHERE)
def test_uneven_data(center: str) -> None:
    def work(communicator: Communicator, place: str) -> list[bytes]:
        trainer = trainer_of(communicator, SUMS[0](), place)
        for step in range(4 + 3 * communicator.rank):
            trainer.step(gradients(trainer.arrays, communicator.rank, step))
        trainer.synchronizer.finalize()
        with trainer.synchronizer.center():
            return [array.tobytes() for array in trainer.arrays]

    expected = run_ranks(3, lambda communicator: work(communicator, "replicated"))
    assert run_ranks(3, lambda communicator: work(communicator, center)) == expected


@pytest.mark.parametrize("center", PLACEMENTS)
def test_what_each_rank_holds(center: str) -> None:

    def work(communicator: Communicator) -> int:
        trainer = trainer_of(communicator, SUMS[0](), center)
        return sum(tensor.size for tensor in trainer.synchronizer.center_tensors())

    total = sum(array.size for array in random_arrays(0))
    assert total == 3 + 1 + 35 + 2 + 13
    found = run_ranks(3, work)
    assert sum(found) == (3 if center == "replicated" else 1) * total
    assert max(found) <= {"sharded": -(-total // 3) + 6}.get(center, total)
    assert center != "root" or found == [total, 0, 0]


def loads() -> list[Any]:
    """Return algorithms, places, and whether the root alone loads; every run has each pair of places and loads.

    Of the replicated center it has two: ``test_algorithms`` has the others.
    """
    found = []
    for (i, cls), (j, center), alone in itertools.product(enumerate(SUMS), enumerate(PLACEMENTS), (False, True)):
        who = "the root loads and broadcasts" if alone else "every rank loads"
        chosen = alone == (i // 2 % 2 == 0) and (i + j) % 2 == 0 if center in ELSEWHERE else i == alone
        marks = [] if chosen else [pytest.mark.thorough]
        found.append(pytest.param(cls, center, alone, id=f"{cls.__name__}-{center}-{who}", marks=marks))
    return found


@pytest.mark.parametrize(("cls", "center", "alone"), loads())
def test_a_restored_state_goes_on_to_the_bit(cls: Any, center: str, alone: bool) -> None:
    def work(communicator: Communicator) -> tuple[Trajectory, Trajectory]:
        rank = communicator.rank
        trainer, resumed = (trainer_of(communicator, cls(), center) for _ in range(2))
        run(trainer, rank, range(4))
        state = trainer.synchronizer.state_dict()
        for array, value in zip(resumed.arrays, trainer.arrays, strict=True):
            array[...] = value
        resumed.optimizer = copy.deepcopy(trainer.optimizer)
        if not alone or rank == 0:
            resumed.synchronizer.load_state_dict(state)
        if alone:
            resumed.synchronizer.broadcast()
            for array, value in zip(resumed.arrays, trainer.arrays, strict=True):
                array[...] = value
        return run(trainer, rank, range(4, 8)), run(resumed, rank, range(4, 8))

    for trajectory, resumed in run_ranks(3, work):
        assert trajectory == resumed


@pytest.mark.parametrize("center", ELSEWHERE)
def test_the_center_is_saved_alike_in_every_placement(center: str) -> None:
    def work(communicator: Communicator, place: str) -> Any:
        trainer = trainer_of(communicator, SUMS[0](), place)
        run(trainer, communicator.rank, range(3))
        return trainer.synchronizer.state_dict()["vectors"]["parameters"]["center"]

    expected = run_ranks(2, lambda communicator: work(communicator, "replicated"))
    for there, here in zip(run_ranks(2, lambda communicator: work(communicator, center)), expected, strict=True):
        assert there.keys() == here.keys()
        for name, value in here.items():
            np.testing.assert_array_equal(there[name], value)


@pytest.mark.parametrize("saved_loaded", [("sharded", "replicated"), ("replicated", "sharded"), ("root", "sharded")])
def test_state_of_another_placement(saved_loaded: tuple[str, str]) -> None:
    """The center can go elsewhere; the state of an optimizer on the center cannot, and says so."""
    from hvd_periodic import AGN, EASGD

    def work(communicator: Communicator, algorithm: Any) -> None:
        trainer, other = (trainer_of(communicator, algorithm, place) for place in saved_loaded)
        run(trainer, communicator.rank, range(3))
        other.synchronizer.load_state_dict(trainer.synchronizer.state_dict())

    run_ranks(2, lambda communicator: work(communicator, EASGD()))
    for kind, message in errors(2, lambda communicator: work(communicator, AGN())):
        assert kind is ValueError
        assert "center='sharded'" in message


def test_ranks_that_disagree_on_the_placement() -> None:
    def work(communicator: Communicator) -> None:
        trainer_of(communicator, SUMS[0](), ["root", "sharded"][communicator.rank])

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "place of the center: root on rank 0; sharded on rank 1" in message


@pytest.mark.parametrize("center", ["everywhere", None, 3])
def test_unknown_placements(center: Any) -> None:
    for kind, message in errors(1, lambda communicator: trainer_of(communicator, SUMS[0](), center)):
        assert kind is ValueError
        assert f"Received: center={center!r}" in message
