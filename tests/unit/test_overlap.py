"""Exchanges that travel during local steps, on threads: a slow oracle, the numbers of the papers' formulas, resume."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Averaging, DiLoCo, PostLocal, SlowMo
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests import oracle
from tests.covering import covering
from tests.helpers import errors, random_arrays, readable, run_ranks
from tests.overlap_oracle import PERIOD, expected

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(0.25),
    "easgd_rho": lambda: EASGD(0.25, rho=0.5),
    "average": Averaging,
    "agn": AGN,
    "agn_average": lambda: AGN("average"),
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": lambda: BMUF(0.5),
    "bmuf_classic": lambda: BMUF(0.5, nesterov=False),
}
OVERLAPS = (1, 2, 3, 5, "period")


class Late(ThreadCommunicator):
    """Reduces when it is waited for; until then nobody may read what travels, which is NaN, nor write into it."""

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        mine = np.array(buffer)
        buffer[...] = np.nan
        reduced = super().allreduce(mine, name, op)

        def wait() -> Any:
            assert np.isnan(buffer).all(), "written into while it travels"
            buffer[...] = reduced()
            return buffer

        return wait


def late(communicator: Any) -> Communicator:
    communicator.__class__ = Late
    return communicator  # type: ignore[no-any-return]


def train(
    communicator: Communicator,
    name: str,
    overlap: int | str,
    steps: int = oracle.STEPS,
    look: bool = False,
    schedule: Any = PERIOD,
) -> list[Any]:
    """Return x after every step, and x and c at the end."""
    rank, x = communicator.rank, np.array(oracle.START)
    inner = SGD(oracle.RATE, oracle.MOMENTUM)
    optimizer = PeriodicOptimizer(
        inner, {"x": x}, ALGORITHMS[name](), schedule, process_set=late(communicator), overlap=overlap
    )
    seen = []
    for _ in range(steps):
        optimizer.step([np.array(oracle.gradient(rank, x.tolist()))])
        if look:
            with optimizer.center():
                pass
            optimizer.synchronizer.distance()
            optimizer.synchronizer.state_dict()
        seen.append(x.tolist())
    optimizer.synchronizer.finalize()
    with optimizer.center():
        seen.append(x.tolist())
    return [*seen, x.tolist()]


@functools.cache
def trained(size: int, name: str, overlap: int | str, **options: Any) -> list[list[Any]]:
    """Return what :func:`train` returns on so many ranks."""
    return run_ranks(size, lambda communicator: train(communicator, name, overlap, **options))


ELASTIC = [name for name in ALGORITHMS if name.startswith("easgd")]
OTHERS = [name for name in ALGORITHMS if name not in ELASTIC]


@pytest.mark.parametrize(
    ("name", "overlap", "size"),
    covering(
        OTHERS,
        OVERLAPS,
        (1, 2, 3),
        together=1,
        always=[(name, *case) for name in OTHERS for case in ((1, 2), ("period", 3))],
    ),
)
def test_no_local_progress_is_lost(name: str, overlap: int | str, size: int) -> None:
    found = trained(size, name, overlap)
    for step, of_workers in enumerate(expected(name, size, overlap)):
        for worker, x in enumerate(of_workers):
            assert found[worker][step] == pytest.approx(x, rel=1e-9, abs=1e-9), (step, worker)
    assert all(report[-2:] == found[0][-2:] for report in found), "one center, which all have at the end"


@pytest.mark.parametrize(("name", "overlap", "size"), covering(ELASTIC, OVERLAPS, (2, 3, 1), together=1))
def test_elastic_averaging_goes_where_it_goes_without_overlap(name: str, overlap: int | str, size: int) -> None:
    """To the bit: threads sum in the order of ranks."""
    assert trained(size, name, overlap) == trained(size, name, 0)


def test_numbers_worked_out_by_hand() -> None:
    """Averaging of ½ h (x − b)² with h = .5 and 1, b = 3 and −1, rate .1, period 3, one step of overlap."""

    def run(communicator: Communicator) -> list[float]:
        curvature, minimum = ((0.5, 3.0), (1.0, -1.0))[communicator.rank]
        x, seen = np.zeros(1), []
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 3, process_set=late(communicator), overlap=1)
        for _ in range(7):
            optimizer.step([curvature * (x - minimum)])
            seen.append(float(x[0]))
        return seen

    first, second = run_ranks(2, run)
    assert first == pytest.approx([0.15, 0.2925, 0.427875, 0.20704375, 0.346691562, 0.479356984, 0.27295333], abs=1e-9)
    assert second == pytest.approx([-0.1, -0.19, -0.271, 0.0055375, -0.09501625, -0.185514625, 0.065472642], abs=1e-9)


@pytest.mark.parametrize(("name", "overlap"), covering(ALGORITHMS, (1, "period"), together=1))
def test_looking_changes_nothing(name: str, overlap: int | str) -> None:
    """Centers, distances and states are read after every step."""
    assert trained(2, name, overlap, look=True) == trained(2, name, overlap)


def test_replicas_are_not_kept_while_messages_travel() -> None:
    """What local steps change meanwhile would be copied, where memory is shared."""
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": np.ones(3)}, AGN(), 2, overlap=3)
    for _ in range(2):
        optimizer.step([np.ones(3)])
    (part,) = optimizer.synchronizer.exchanger._in_flight  # type: ignore[attr-defined]
    assert part.pending
    for pending in part.pending:
        assert all((block.x, block.published, block.worker) == (None, None, {}) for block in pending.blocks)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_under_way_is_saved_and_resumed(name: str) -> None:
    """At every step of two periods, in new objects: the same to the bit."""

    def run(communicator: Communicator) -> None:
        rank = communicator.rank
        late(communicator)

        def make(arrays: list[Any], inner: SGD) -> PeriodicOptimizer:
            return PeriodicOptimizer(
                inner, list(zip("ab", arrays, strict=True)), ALGORITHMS[name](), PERIOD, process_set=communicator,
                overlap=2,
            )  # fmt: skip

        def step(optimizer: PeriodicOptimizer, arrays: list[Any], number: int) -> None:
            optimizer.step([0.3 * (array - 1 - rank - 0.1 * number) for array in arrays])

        arrays, saved, trajectory = random_arrays(rank)[3:5], {}, {}
        optimizer, end = make(arrays, SGD(oracle.RATE)), 3 + 2 * PERIOD + 2
        for number in range(end):
            step(optimizer, arrays, number)
            trajectory[number] = [array.tobytes() for array in arrays]
            if 3 <= number + 1 < 3 + 2 * PERIOD:
                saved[number + 1] = optimizer.synchronizer.state_dict(), [array.copy() for array in arrays]
        optimizer.synchronizer.finalize()
        for saved_at, (state, others) in saved.items():
            again = make([np.zeros_like(array) for array in arrays], SGD(oracle.RATE))
            values = again.synchronizer.replica.arrays  # type: ignore[attr-defined]
            again.synchronizer.load_state_dict(state)
            for value, other in zip(values, others, strict=True):
                value[...] = other
            for number in range(saved_at, end):
                step(again, values, number)
                assert [value.tobytes() for value in values] == trajectory[number], (saved_at, number)
            again.synchronizer.finalize()

    run_ranks(2, run)


def test_a_state_with_an_exchange_under_way_needs_an_optimizer_that_overlaps() -> None:
    def run(communicator: Communicator) -> None:
        x = np.zeros(2)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 2, process_set=communicator, overlap=1)
        for _ in range(2):
            optimizer.step([x - 1.0])
        state = optimizer.synchronizer.state_dict()
        other = PeriodicOptimizer(SGD(0.1), {"x": np.zeros(2)}, Averaging(), 2, process_set=communicator)
        with pytest.raises(ValueError, match="was saved while an exchange was in flight: load it into an optimizer"):
            other.synchronizer.load_state_dict(state)

    run_ranks(2, run)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_with_other_numbers_of_steps(name: str) -> None:
    """Rank r has 5 + 3 r: all end together, with one center; elastic averaging conserves the sum of all."""

    def run(communicator: Communicator) -> tuple[list[float], list[float], int]:
        x, algorithm = np.array([1.0, 2.0]), ALGORITHMS[name]()
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, algorithm, PERIOD, process_set=late(communicator), overlap=2)
        for step in range(5 + 3 * communicator.rank):
            optimizer.step([np.full(2, -1.0 * communicator.rank * (step == 0))])
        optimizer.synchronizer.finalize()
        replica = x.tolist()
        with optimizer.center():
            return replica, x.tolist(), optimizer.synchronizer.rounds

    found = run_ranks(3, run)
    assert all(report[1:] == found[0][1:] for report in found)
    assert found[0][2] == 4
    if name == "easgd":
        total = np.sum([replica for replica, _, _ in found], axis=0) + found[0][1]
        assert total == pytest.approx([4.0 + (0 + 1 + 2), 8.0 + (0 + 1 + 2)])


def test_a_synchronous_beginning() -> None:
    """Nothing overlaps until gradients are no longer averaged."""
    found = run_ranks(2, lambda communicator: train(communicator, "average", 1, schedule=3))
    later = run_ranks(2, lambda communicator: train(communicator, "average", 1, schedule=PostLocal(0, 3)))
    assert found == later


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"overlap": -1}, ValueError, "`overlap` must be an int >= 0. Received: -1"),
        ({"overlap": 1.5}, TypeError, "`overlap` must be an int"),
        ({"overlap": True}, TypeError, "`overlap` must be an int"),
        ({"overlap": None}, TypeError, "`overlap` must be an int"),
        ({"overlap": "week"}, ValueError, "`overlap` must be an int >= 0 or 'period'. Received: 'week'"),
        ({"overlap": 1, "center": "root"}, ValueError, "`overlap` needs center='replicated'"),
        ({"overlap": "period", "center": "sharded"}, ValueError, "`overlap` needs center='replicated'"),
        ({"overlap": 1, "asynchronous": True}, ValueError, "`overlap` is for synchronous exchange"),
    ],
    ids=readable,
)
def test_refusals(options: dict[str, Any], error: type[Exception], text: str) -> None:
    def make(communicator: Communicator) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PeriodicOptimizer(SGD(0.1), {"x": np.zeros(2)}, EASGD(0.25), 2, process_set=communicator, **options)

    for kind, message in errors(2, make):
        assert kind is error
        assert text in message


def test_ranks_have_to_overlap_alike() -> None:
    def make(communicator: Communicator) -> None:
        PeriodicOptimizer(
            SGD(0.1), {"x": np.zeros(2)}, EASGD(0.25), 2, process_set=communicator, overlap=1 + communicator.rank
        )

    for kind, message in errors(2, make):
        assert kind is ValueError
        assert "overlap: 1 on rank 0" in message


class Falling(SGD):
    """A learning rate that falls at every step."""

    def step(self, parameters: Any, gradients: Any) -> None:
        super().step(parameters, gradients)
        self.learning_rate *= 0.7


def fall(communicator: Communicator, name: str, overlap: int | str, look_on: tuple[int, ...], steps: int) -> list[Any]:
    """Train with a scheduled rate; some ranks look at the center in mid-flight. Return the center at the end."""
    x = np.array(oracle.START)
    optimizer = PeriodicOptimizer(
        Falling(oracle.RATE), {"x": x}, ALGORITHMS[name](), PERIOD, process_set=late(communicator), overlap=overlap
    )
    for _ in range(steps):
        optimizer.step([np.array(oracle.gradient(communicator.rank, x.tolist()))])
        if communicator.rank in look_on:
            optimizer.synchronizer.distance()
    optimizer.synchronizer.finalize()
    with optimizer.center():
        return list(x.tolist())


@pytest.mark.parametrize(
    ("name", "overlap", "more"), covering(ALGORITHMS, (2, "period"), (0, 3), together=1, always=[("average", 2, 3)])
)
def test_the_center_moves_by_the_rates_of_the_step_at_which_the_exchange_began(
    name: str, overlap: int | str, more: int
) -> None:
    """Whoever looks, and whoever ends, in mid-flight."""

    def centers(look: tuple[int, ...]) -> list[list[Any]]:
        return run_ranks(2, lambda ranks: fall(ranks, name, overlap, look, 7 - more + 2 * more * ranks.rank))

    found = centers(())
    assert found[0] == found[1]
    assert centers((0,)) == centers((0, 1)) == found


def test_the_end_is_the_center_to_the_bit() -> None:
    """Where no local step was taken since the last exchange, in single precision."""

    def run(communicator: Communicator, name: str) -> None:
        x = random_arrays(communicator.rank, "float32")[3]
        optimizer = PeriodicOptimizer(
            SGD(0.1), {"x": x}, ALGORITHMS[name](), PERIOD, process_set=late(communicator), overlap=2
        )
        for step in range(2 * PERIOD):
            optimizer.step([0.3 * (x - 1 - communicator.rank - np.float32(0.1 * step))])
        optimizer.synchronizer.finalize()
        replica = x.copy()
        with optimizer.center():
            assert replica.tobytes() == x.tobytes()

    for name in ("average", "diloco", "agn", "bmuf_classic"):
        run_ranks(2, lambda communicator, name=name: run(communicator, name))  # type: ignore[misc]


class Broken(Late):
    """Its second bucket never arrives on rank 0, the first time."""

    failing = True

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        wait = super().allreduce(buffer, name, op)
        if not (name.endswith("parameters.1") and self.rank == 0 and self.failing):
            return wait

        def fail() -> Any:
            self.failing = False
            raise RuntimeError("the wire is cut")

        return fail


@pytest.mark.parametrize("caught", [True, False])
def test_an_exchange_that_fails_in_flight_is_an_error_on_all_ranks(caught: bool) -> None:
    """Also where the user catches it on the rank that has it, while looking."""

    def run(communicator: Any) -> str:
        communicator.__class__ = Broken
        arrays = {"a": np.zeros(3), "b": np.zeros(3, "float32")}
        optimizer = PeriodicOptimizer(SGD(0.1), arrays, Averaging(), 2, process_set=communicator, overlap=1)
        for step in range(5):
            optimizer.step({name: np.ones(3, array.dtype) for name, array in arrays.items()})
            if caught and step == 1 and communicator.rank == 0:
                with pytest.raises(RuntimeError, match="the wire is cut"):
                    optimizer.synchronizer.state_dict()
                with pytest.raises(RuntimeError, match="The exchange at step 2 failed: the wire is cut"):
                    optimizer.synchronizer.distance()
        return ""

    for kind, message in errors(2, run):
        assert kind is RuntimeError
        assert "the wire is cut" in message


def test_a_restarted_center_forgets_what_was_under_way() -> None:
    def run(communicator: Communicator) -> list[float]:
        x = np.zeros(2)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 2, process_set=late(communicator), overlap=2)
        for _ in range(3):
            optimizer.step([x - 1.0 - communicator.rank])
        x[:] = 100.0
        optimizer.synchronizer.restart_center()
        optimizer.step([np.zeros(2)])
        return list(x.tolist())

    assert run_ranks(2, run) == [[100.0, 100.0]] * 2


def test_weights_are_put_into_the_model_after_landing() -> None:
    def run(communicator: Communicator) -> float:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 2, process_set=late(communicator), overlap=1)
        for _ in range(2):
            optimizer.step([np.array([-1.0 - communicator.rank])])
        optimizer.synchronizer.land()
        assert x[0] == 3.0
        x[:] = 7.0
        optimizer.step([np.zeros(1)])
        return float(x[0])

    assert run_ranks(2, run) == [7.0, 7.0]


@pytest.mark.parametrize("yields", [None, "0", "1"])
def test_open_mpi_that_spins_is_noticed(
    yields: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the ranks of a host have no cores besides those that train, and Open MPI was not told to yield."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    if yields is not None:
        monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", yields)
    found = HorovodCommunicator.__new__(HorovodCommunicator)
    for cores, spins in ((2, yields != "1"), (4, False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found._hvd = SimpleNamespace(mpi_enabled=lambda: True, local_size=lambda: 2)
        assert found.busy_waits == spins
        found._hvd.mpi_enabled = lambda: False
        assert not found.busy_waits
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
        over_mpi = MPICommunicator.__new__(MPICommunicator)
        over_mpi._mover = None
        assert not over_mpi.busy_waits, "without a thread, nothing waits during local steps"
        over_mpi._mover = cast(Any, object())
        assert over_mpi.busy_waits == spins

    def make(communicator: Communicator, overlap: int) -> None:
        communicator.busy_waits = yields != "1"
        PeriodicOptimizer(SGD(0.1), {"x": np.ones(2)}, Averaging(), 4, process_set=communicator, overlap=overlap)

    run_ranks(2, lambda communicator: make(communicator, 0))
    assert not caplog.records
    run_ranks(2, lambda communicator: make(communicator, 2))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (yields != "1"), "on the root alone"
    assert all("mpi_yield_when_idle" in record.message for record in caplog.records)
