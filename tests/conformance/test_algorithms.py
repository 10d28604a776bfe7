"""Every algorithm of the package, with its defaults: what holds whatever it computes."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Algorithm, Communicator, Every
from hvd_periodic.numpy import SGD
from hvd_periodic.vectors.space import VectorSpace
from tests.conformance.discovery import algorithms
from tests.covering import covering
from tests.helpers import Array, NumpyTrainer, random_arrays, readable, run_ranks

DTYPES = ["float16", "float32", "float64"]


@pytest.fixture(params=algorithms(), ids=lambda cls: cls.__name__)
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@dataclass
class Run:
    """What one rank saw: replicas and centers after each step, which steps exchanged, and the final state's keys."""

    replicas: list[list[Array]]
    centers: list[list[Array]]
    exchanged: list[bool]
    keys: list[str]

    def bits(self) -> list[list[bytes]]:
        return [[array.tobytes() for array in arrays] for arrays in (*self.replicas, *self.centers)]

    def center_bits(self) -> list[list[bytes]]:
        return [[array.tobytes() for array in arrays] for arrays in self.centers]


def new_trainer(communicator: Communicator, cls: type[Algorithm], dtype: str, **arguments: Any) -> NumpyTrainer:
    """Return a trainer over awkward shapes that exchanges every 3 steps."""
    return NumpyTrainer(communicator, random_arrays(0, dtype), cls(), Every(3), optimizer=SGD(0.25, 0.5), **arguments)


def gradients(trainer: NumpyTrainer, rank: int, step: int) -> list[Array]:
    """Return gradients that depend on the rank, on the step and on x; in the dtype of x."""
    return [np.asarray(0.3 * (x - 1 - rank - 0.1 * step), dtype=x.dtype) for x in trainer.arrays]


def train(cls: type[Algorithm], size: int, dtype: str = "float64", uneven: int = 0, **arguments: Any) -> list[Run]:
    """Train for 7 steps, ``uneven`` more per rank, finalize, and return what every rank saw."""

    def work(communicator: Communicator) -> Run:
        trainer = new_trainer(communicator, cls, dtype, **arguments)
        run = Run([], [], [], [])
        for step in range(1, 8 + uneven * communicator.rank):
            run.exchanged.append(trainer.step(gradients(trainer, communicator.rank, step)))
            run.replicas.append([array.copy() for array in trainer.arrays])
            run.centers.append(trainer.center())
            if run.exchanged[-1] and not uneven:
                trainer.synchronizer.audit()
        trainer.synchronizer.finalize()
        run.replicas.append([array.copy() for array in trainer.arrays])
        run.centers.append(trainer.center())
        run.keys = sorted(trainer.synchronizer.state_dict()["vectors"]["parameters"])
        return run

    return run_ranks(size, work)


seen = functools.cache(train)
"""What such a training was like, for tests that look at the same one; bits of a second one are in no test but one."""


def test_algorithms_are_found() -> None:
    assert {cls.__name__ for cls in algorithms()} >= {"EASGD", "Averaging", "AGN"}


def test_it_is_a_value(cls: type[Algorithm]) -> None:
    """Ranks compare what they are about to run as text; a text with an address in it never agrees."""
    algorithm = cls()
    for other in (cls(), pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
        assert other == algorithm
        assert str(other) == str(algorithm)
    assert cls.__name__ in str(algorithm)
    assert " at 0x" not in str(algorithm)


def test_its_defaults_suit_any_number_of_workers(cls: type[Algorithm]) -> None:
    for size in (1, 2, 3, 5, 1000):
        cls().check(size)


@pytest.mark.parametrize(("cls", "dtype"), covering(algorithms(), ("float32", "float64"), together=1), ids=readable)
def test_init(cls: type[Algorithm], dtype: str) -> None:
    x = np.arange(5, dtype=dtype)
    state = cls().init_center(VectorSpace(), x) | cls().init_worker(VectorSpace(), x)
    np.testing.assert_array_equal(state["center"], x)
    for key, value in state.items():
        assert (value.shape, value.dtype) == (x.shape, x.dtype), key
        assert not np.shares_memory(value, x), key
    vectors = list(state.values())
    assert not any(np.shares_memory(a, b) for i, a in enumerate(vectors) for b in vectors[:i])


@pytest.mark.parametrize(("cls", "size"), covering(algorithms(), (1, 2, 3), together=1), ids=readable)
def test_exchanges_take_place_and_move_the_center(cls: type[Algorithm], size: int) -> None:
    for run in seen(cls, size):
        assert run.exchanged == [False, False, True, False, False, True, False]
        centers = run.center_bits()
        assert centers[0] == centers[1], "the center moves between exchanges"
        assert len({str(center) for center in (centers[1], centers[2], centers[5], centers[7])}) == 4
        assert all(np.isfinite(array).all() for arrays in (*run.replicas, *run.centers) for array in arrays)


@pytest.mark.parametrize(("cls", "size", "dtype"), covering(algorithms(), (2, 3), DTYPES, together=1), ids=readable)
def test_the_center_is_the_same_on_all_ranks(cls: type[Algorithm], size: int, dtype: str) -> None:
    """To the bit, after every step, with different data on every rank."""
    runs = seen(cls, size, dtype)
    assert all(run.center_bits() == runs[0].center_bits() for run in runs)
    assert runs[0].bits() != runs[1].bits(), "the ranks have seen the same data"


@pytest.mark.parametrize(("cls", "uneven"), covering(algorithms(), (1, 4), together=1), ids=readable)
def test_all_ranks_leave_with_the_same_center(cls: type[Algorithm], uneven: int) -> None:
    runs = train(cls, 3, uneven=uneven)
    assert len({len(run.exchanged) for run in runs}) == 3
    assert all(run.center_bits()[-1] == runs[0].center_bits()[-1] for run in runs)


@pytest.mark.parametrize(("cls", "dtype"), covering(algorithms(), DTYPES, together=1), ids=readable)
def test_dtypes_are_kept(cls: type[Algorithm], dtype: str) -> None:
    for run in seen(cls, 2, dtype):
        for arrays in run.replicas:
            assert {array.dtype for array in arrays} == {np.dtype(dtype)}
        for arrays in run.centers:
            assert {array.dtype for array in arrays} == {np.promote_types(dtype, "float32")}


@pytest.mark.parametrize(("cls", "bucket_bytes"), covering(algorithms(), (40, 2**20, 8, 128), together=1), ids=readable)
def test_results_do_not_depend_on_the_buckets(cls: type[Algorithm], bucket_bytes: int) -> None:
    assert [run.bits() for run in train(cls, 3, bucket_bytes=bucket_bytes)] == [run.bits() for run in seen(cls, 3)]


def test_it_is_deterministic(cls: type[Algorithm]) -> None:
    assert [run.bits() for run in train(cls, 2)] == [run.bits() for run in seen(cls, 2)]


def test_the_vectors_of_its_state_are_those_of_init(cls: type[Algorithm]) -> None:
    keys = sorted(cls().init_center(VectorSpace(), np.zeros(1)) | cls().init_worker(VectorSpace(), np.zeros(1)))
    assert all(run.keys == keys for run in seen(cls, 2))


def test_nothing_moves_without_gradients(cls: type[Algorithm]) -> None:
    """All start at the center; with no gradient, nobody has anything to say."""

    def work(communicator: Communicator) -> None:
        trainer = new_trainer(communicator, cls, "float64")
        start = [array.copy() for array in trainer.arrays]
        for _ in range(7):
            trainer.step([np.zeros_like(array) for array in trainer.arrays])
        for array, center, values in zip(trainer.arrays, trainer.center(), start, strict=True):
            np.testing.assert_array_equal(array, values)
            np.testing.assert_array_equal(center, values)

    run_ranks(2, work)


@pytest.mark.parametrize(("cls", "saved_at"), covering(algorithms(), (2, 3, 4), together=1), ids=readable)
def test_a_restored_state_continues_bit_for_bit(cls: type[Algorithm], saved_at: int) -> None:
    def work(communicator: Communicator) -> None:
        trainer, resumed = (new_trainer(communicator, cls, "float32") for _ in range(2))
        for step in range(saved_at):
            trainer.step(gradients(trainer, communicator.rank, step))
        state, arrays, optimizer = pickle.loads(
            pickle.dumps((trainer.synchronizer.state_dict(), trainer.arrays, trainer.optimizer))
        )
        for array, values in zip(resumed.arrays, arrays, strict=True):
            array[...] = values
        resumed.optimizer = optimizer
        resumed.synchronizer.load_state_dict(state)
        for step in range(saved_at, saved_at + 5):
            exchanged = [t.step(gradients(t, communicator.rank, step)) for t in (trainer, resumed)]
            assert exchanged == [(step + 1) % 3 == 0] * 2
            for one, two in zip(
                (*trainer.arrays, *trainer.center()), (*resumed.arrays, *resumed.center()), strict=True
            ):
                assert one.tobytes() == two.tobytes()

    run_ranks(2, work)
