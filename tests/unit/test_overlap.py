"""Exchanges that travel during local steps, on threads: a slow oracle, the numbers of the papers' formulas, resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, SGD, Averaging, DiLoCo, PeriodicOptimizer, PostLocal, SlowMo
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.threads import ThreadCommunicator
from tests import oracle
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
        inner, {"x": x}, ALGORITHMS[name](), schedule, communicator=late(communicator), overlap=overlap
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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.startswith("easgd")])
def test_no_local_progress_is_lost(name: str, size: int) -> None:
    for overlap in OVERLAPS:
        found = run_ranks(size, lambda communicator, d=overlap: train(communicator, name, d))  # type: ignore[misc]
        for step, of_workers in enumerate(expected(name, size, overlap)):
            for worker, x in enumerate(of_workers):
                assert found[worker][step] == pytest.approx(x, rel=1e-9, abs=1e-9), (overlap, step, worker)
        assert all(report[-2:] == found[0][-2:] for report in found), "one center, which all have at the end"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["easgd", "easgd_rho"])
def test_elastic_averaging_goes_where_it_goes_without_overlap(name: str, size: int) -> None:
    """To the bit: threads sum in the order of ranks."""
    blocking = run_ranks(size, lambda communicator: train(communicator, name, 0))
    for overlap in OVERLAPS:
        found = run_ranks(size, lambda communicator, d=overlap: train(communicator, name, d))  # type: ignore[misc]
        assert found == blocking, overlap


def test_numbers_worked_out_by_hand() -> None:
    """Averaging of ½ h (x − b)² with h = .5 and 1, b = 3 and −1, rate .1, period 3, one step of overlap."""

    def run(communicator: Communicator) -> list[float]:
        curvature, minimum = ((0.5, 3.0), (1.0, -1.0))[communicator.rank]
        x, seen = np.zeros(1), []
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 3, communicator=late(communicator), overlap=1)
        for _ in range(7):
            optimizer.step([curvature * (x - minimum)])
            seen.append(float(x[0]))
        return seen

    first, second = run_ranks(2, run)
    assert first == pytest.approx([0.15, 0.2925, 0.427875, 0.20704375, 0.346691562, 0.479356984, 0.27295333], abs=1e-9)
    assert second == pytest.approx([-0.1, -0.19, -0.271, 0.0055375, -0.09501625, -0.185514625, 0.065472642], abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_looking_changes_nothing(name: str) -> None:
    """Centers, distances and states are read after every step."""
    for overlap in (1, "period"):
        plain, looked = (
            run_ranks(2, lambda communicator, d=overlap, see=look: train(communicator, name, d, look=see))  # type: ignore[misc]
            for look in (False, True)
        )
        assert looked == plain


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_under_way_is_saved_and_resumed(name: str) -> None:
    """At every step of two periods, in new objects: the same to the bit."""

    def run(communicator: Communicator) -> None:
        rank = communicator.rank
        late(communicator)

        def make(arrays: list[Any], inner: SGD) -> PeriodicOptimizer:
            return PeriodicOptimizer(
                inner, list(zip("ab", arrays, strict=True)), ALGORITHMS[name](), PERIOD, communicator=communicator,
                overlap=2,
            )  # fmt: skip

        def step(optimizer: PeriodicOptimizer, arrays: list[Any], number: int) -> None:
            optimizer.step([0.3 * (array - 1 - rank - 0.1 * number) for array in arrays])

        for saved_at in range(3, 3 + 2 * PERIOD):
            arrays = random_arrays(rank)[3:5]
            optimizer = make(arrays, SGD(oracle.RATE))
            for number in range(saved_at):
                step(optimizer, arrays, number)
            others = [array.copy() for array in arrays]
            state = optimizer.synchronizer.state_dict()
            again = make([np.zeros_like(array) for array in arrays], SGD(oracle.RATE))
            values = again.synchronizer.replica.arrays  # type: ignore[attr-defined]
            again.synchronizer.load_state_dict(state)
            for value, other in zip(values, others, strict=True):
                value[...] = other
            for number in range(saved_at, saved_at + 5):
                step(optimizer, arrays, number)
                step(again, values, number)
                for value, array in zip(values, arrays, strict=True):
                    assert value.tobytes() == array.tobytes(), (saved_at, number)
            optimizer.synchronizer.finalize()
            again.synchronizer.finalize()

    run_ranks(2, run)


def test_a_state_with_an_exchange_under_way_needs_an_optimizer_that_overlaps() -> None:
    def run(communicator: Communicator) -> None:
        x = np.zeros(2)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 2, communicator=communicator, overlap=1)
        for _ in range(2):
            optimizer.step([x - 1.0])
        state = optimizer.synchronizer.state_dict()
        other = PeriodicOptimizer(SGD(0.1), {"x": np.zeros(2)}, Averaging(), 2, communicator=communicator)
        with pytest.raises(ValueError, match="was saved while an exchange was under way: load it into an optimizer"):
            other.synchronizer.load_state_dict(state)

    run_ranks(2, run)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_with_other_numbers_of_steps(name: str) -> None:
    """Rank r has 5 + 3 r: all end together, with one center; elastic averaging conserves the sum of all."""

    def run(communicator: Communicator) -> tuple[list[float], list[float], int]:
        x, algorithm = np.array([1.0, 2.0]), ALGORITHMS[name]()
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, algorithm, PERIOD, communicator=late(communicator), overlap=2)
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


def test_statistics_take_the_new_value() -> None:
    """A difference would make a variance negative."""
    torch = pytest.importorskip("torch")
    hvdp = pytest.importorskip("hvd_periodic.torch")

    def run(communicator: Communicator) -> tuple[list[float], int]:
        torch.set_num_threads(1)
        model = torch.nn.BatchNorm1d(2)
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, Averaging(), 2, process_set=communicator, overlap=1
        )
        for step in range(3):
            model.running_var.fill_(10.0 ** (communicator.rank - step))
            model.num_batches_tracked.fill_(step + communicator.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            variance = model.running_var.clone()
            model.running_var.copy_(variance)
            optimizer.step()
        return model.running_var.tolist(), int(model.num_batches_tracked)

    reports = run_ranks(2, run)
    assert reports[0][0] == reports[1][0], "the mean of step 2, not what step 3 has made of it"
    assert min(reports[0][0]) > 0
    assert reports[0][1] == reports[1][1]


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
            PeriodicOptimizer(SGD(0.1), {"x": np.zeros(2)}, EASGD(0.25), 2, communicator=communicator, **options)

    for kind, message in errors(2, make):
        assert kind is error
        assert text in message


def test_ranks_have_to_overlap_alike() -> None:
    def make(communicator: Communicator) -> None:
        PeriodicOptimizer(
            SGD(0.1), {"x": np.zeros(2)}, EASGD(0.25), 2, communicator=communicator, overlap=1 + communicator.rank
        )

    for kind, message in errors(2, make):
        assert kind is ValueError
        assert "overlap: 1 on rank 0" in message
