"""Elastic states whose ranks are threads: what goes with a rank that is lost, and what does not, wherever it is."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from horovod.common.exceptions import HostsUpdatedInterrupt  # noqa: E402
from horovod.runner.elastic.worker import HostUpdateResult  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
import hvd_periodic.torch.elastic as elastic_module  # noqa: E402
import hvd_periodic.torch.synchronizer as synchronizer_module  # noqa: E402
from hvd_periodic.comm.base import Communicator  # noqa: E402
from hvd_periodic.comm.subset import Subset  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator  # noqa: E402
from tests import losing  # noqa: E402
from tests.losing import EVERYWHERE  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

PERIOD = 2

HERE = threading.local()
"""The communicator of each thread, as Horovod knows one of each process."""


class Tensors(ThreadCommunicator):
    """Threads that scatter tensors, and hear of a loss when they wait for what travels, as Horovod does."""

    def allreduce(self, *arguments: Any, **options: Any) -> Callable[[], Any]:
        """Reduce at once; wait for a loss."""
        return _in_time(super().allreduce, *arguments, **options)

    def begin_allgather(self, *arguments: Any) -> Callable[[], Any]:
        """Gather at once; wait for a loss."""
        return _in_time(super().begin_allgather, *arguments)

    def alltoall(self, *arguments: Any) -> Callable[[], Any]:
        """Exchange at once; wait for a loss."""
        return _in_time(super().alltoall, *arguments)

    def reducescatter(self, *arguments: Any) -> Callable[[], Any]:
        """Reduce at once; wait for a loss."""
        return _in_time(super().reducescatter, *arguments)

    def scatter(self, buffer: Any, counts: Any, name: str) -> Callable[[], Any]:
        """Return a new tensor."""
        received, given = super().scatter(buffer, counts, name)()
        return lambda: (torch.from_numpy(received), given)

    def tile(self, buffer: Any, times: int) -> Any:
        """Return a new tensor."""
        return buffer.repeat(times)


def _in_time(begin: Callable[..., Callable[[], Any]], *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Return what waits for a collective, also where a rank was lost in it."""
    try:
        return begin(*arguments, **options)
    except losing.LostError as error:
        lost = error

    def wait() -> Any:
        raise lost

    return wait


@dataclass
class Worker:
    """What one process has, which outlives the communicators that it is in."""

    model: Any
    optimizer: Any
    moving: Any
    state: Any

    def train(self, steps: int) -> None:
        """Descend, each rank to another place."""
        for _ in range(steps):
            self.model.x.grad = self.model.x.detach() - float(HERE.communicator.rank + 1)
            self.optimizer.step()
            self.state.batch += 1

    def load(self, value: float) -> None:
        """Put weights into the model."""
        with torch.no_grad():
            self.model.x.fill_(value)

    @property
    def rate(self) -> float:
        """The learning rate of the optimizer that moves the center."""
        rate: float = self.moving.param_groups[0]["lr"]
        return rate

    def decay(self) -> None:
        """Do what a scheduler does."""
        self.moving.param_groups[0]["lr"] *= 0.5

    def center(self) -> list[float]:
        """Return the center."""
        with self.optimizer.center():
            found: list[float] = self.model.x.tolist()
        return found

    def found(self) -> tuple[Any, ...]:
        """Return how far it has come, and where it and the center are."""
        return self.state.batch, self.optimizer.synchronizer.local_steps, self.model.x.tolist(), self.center()

    def begin_again(self) -> None:
        """Do what ``hvd.elastic.run`` does after a loss."""
        self.state.restore()
        self.state.on_reset()
        self.state.sync()


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (elastic_module, synchronizer_module):
        monkeypatch.setattr(module, "communicator_of", given_or_here)


def given_or_here(given: Any) -> Communicator:
    """Return the communicator of this thread, if none was given."""
    return given if isinstance(given, Communicator) else HERE.communicator


def pair() -> range:
    """Return the ranks of the group of this one: two neighbours."""
    first = HERE.communicator.rank // 2 * 2
    return range(first, min(first + 2, HERE.communicator.size))


def new(
    algorithm: Any = hvdp.DiLoCo,
    moving: bool = False,
    batch: int = 0,
    inside: Any = None,
    paired: bool = True,
    kind: Any = torch.optim.SGD,
    **options: Any,
) -> Worker:
    """Return a worker with a local optimizer of a kind; ``moving`` its center by another one than a copy of that.

    Pairs of ranks, or all of them if they are not ``paired``, exchange by an algorithm ``inside`` at every step.
    """
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    local = kind(model.parameters(), lr=0.1, momentum=0.5)
    outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) if moving else None
    inner = local
    if inside is not None:
        ranks = {"process_set": Subset(HERE.communicator, pair)} if paired else options
        inner = hvdp.PeriodicOptimizer(local, model, inside, 1, **ranks)
    optimizer = hvdp.PeriodicOptimizer(inner, model, algorithm, PERIOD, outer_optimizer=outer, **options)
    return Worker(model, optimizer, outer or local, hvdp.elastic.State(model, optimizer, batch=batch))


def together(workers: Sequence[Worker | Callable[[], Worker]], work: Callable[[Worker], Any], **lost: Any) -> list[Any]:
    """Return what as many ranks find, or that a rank was lost, as :func:`tests.losing.together`.

    Args:
        workers: in the order of ranks; functions make new ones.
        work: what they do together.
        lost: when a rank is.
    """

    def rank(communicator: ThreadCommunicator) -> Any:
        communicator = Tensors(communicator.rank, communicator._group)
        communicator.elastic = True
        communicator.process_set = SimpleNamespace(process_set_id=0)  # type: ignore[attr-defined]
        worker = workers[communicator.rank]
        HERE.communicator = communicator
        return work(worker if isinstance(worker, Worker) else worker())

    return losing.together(len(workers), rank, **lost)


def lost_anywhere(
    prepare: Callable[[], Sequence[Worker]],
    work: Callable[[Worker], Any],
    ahead: int,
    places: tuple[int, int],
) -> list[Sequence[Worker]]:
    """Return what is left of workers, one of which is lost in any collective, as :func:`tests.losing.lost_anywhere`."""
    return losing.lost_anywhere(prepare, lambda workers, **lost: together(workers, work, **lost), ahead, places)


@pytest.mark.parametrize(
    ("center", "ahead", "places"),
    [
        *(("replicated", 1, (0, 3)), ("root", 0, (1, 3)), ("sharded", 1, (2, 3))),
        *(thorough("replicated", 0, EVERYWHERE), thorough("root", 1, EVERYWHERE), thorough("sharded", 0, EVERYWHERE)),
    ],
)
def test_a_rank_is_lost_in_sync(center: str, ahead: int, places: tuple[int, int]) -> None:
    """After another one was lost: those that are left go on from what was committed before."""
    committed = {}

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.found()
        worker.train(1)
        return worker

    def prepare() -> list[Worker]:
        zero, one, two, _ = together([lambda: new(center=center)] * 4, first)
        return [zero, one, two]  # Rank 0 has the copy of the share of rank 2.

    def again(worker: Worker) -> Any:
        worker.begin_again()
        return worker.found()

    left = lost_anywhere(prepare, Worker.begin_again, ahead, places)
    assert len(left) > 10 // places[1]
    for zero, one in left:
        found = together([zero, lambda: new(center=center), one], again)
        at_center = committed[0][-1]
        assert found == [committed[0], (3, 3, at_center, at_center), committed[1]]


@pytest.mark.parametrize("center", ["replicated", thorough("sharded")])
def test_local_parameters_stay_with_their_worker(center: str) -> None:
    """Of any shape: commits hold them, nobody takes the root's, and a worker that joins has those it was made with."""

    def head_of(value: float) -> Callable[[], Worker]:
        def make() -> Worker:
            model = torch.nn.Module()
            model.x = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
            model.head = torch.nn.Parameter(torch.full((HERE.communicator.rank + 1,), value, dtype=torch.float64))
            model.head.grad = torch.ones_like(model.head)
            local = torch.optim.SGD(model.parameters(), lr=0.125)
            options = {"center": center, "parameters": {"head": "local"}}
            optimizer = hvdp.PeriodicOptimizer(local, model, hvdp.DiLoCo, PERIOD, **options)
            return Worker(model, optimizer, local, hvdp.elastic.State(model, optimizer, batch=0))

        return make

    def first(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed = worker.found(), worker.model.head.tolist()
        worker.train(1)
        return worker, committed

    def again(worker: Worker) -> Any:
        worker.begin_again()
        at_once = worker.found(), worker.model.head.tolist()
        worker.train(1)
        return at_once, worker.model.head.tolist(), worker.model.x.tolist()

    ((zero, committed), _, (two, of_last)) = together([head_of(1.0), head_of(2.0), head_of(3.0)], first)
    assert (committed[1], of_last[1]) == ([0.625], [2.625] * 3)
    found = together([zero, head_of(4.0), two], again)
    at_center = committed[0][-1]
    assert [at_once for at_once, *_ in found] == [committed, ((3, 3, at_center, at_center), [4.0] * 2), of_last]
    assert [head for _, head, _ in found] == [[0.5], [3.875] * 2, [2.5] * 3]
    assert len({str(x) for *_, x in found}) == 1


@pytest.mark.parametrize("left", [[0], [3, 1]])
@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_ranks_are_removed(center: str, left: list[int]) -> None:
    """Any number of them, also with their neighbours: they have handed over the center of the newest commit."""
    committed = {}

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.found()
        worker.train(1)
        if HERE.communicator.rank == 0:
            worker.state.on_hosts_updated(1.0, HostUpdateResult.removed)
        with pytest.raises(HostsUpdatedInterrupt):
            worker.state.check_host_updates()
        return worker

    def again(worker: Worker) -> Any:
        worker.state.on_reset()
        worker.state.sync()
        return worker.found()

    workers = together([lambda: new(center=center)] * 4, first)
    at_center = committed[0][-1]
    found = together([lambda: new(center=center), *(workers[rank] for rank in left)], again)
    assert found == [(3, 3, at_center, at_center), *(committed[rank] for rank in left)]


@pytest.mark.parametrize(
    ("inside", "places"),
    [(hvdp.EASGD, (0, 4)), thorough(hvdp.EASGD, (1, 2)), thorough(hvdp.DiLoCo, EVERYWHERE)],
)
def test_a_rank_is_lost_in_sync_by_groups(inside: Any, places: tuple[int, int]) -> None:
    """Those that are left are in other groups, of which each has one center, and replicas are what was committed."""
    committed = {}

    def inner(worker: Worker) -> Any:
        return worker.optimizer.inner.synchronizer

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.found(), [c.tolist() for c in inner(worker).center_tensors()]
        worker.train(1)
        return worker

    def prepare() -> list[Worker]:
        return together([lambda: new(inside=inside)] * 4, first)[:3]

    def again(worker: Worker) -> Any:
        worker.begin_again()
        found = worker.found(), [c.tolist() for c in inner(worker).center_tensors()]
        worker.train(2 * PERIOD)
        inner(worker).audit()
        worker.optimizer.finalize()
        return *found, worker.center()

    left = lost_anywhere(prepare, Worker.begin_again, 0, places)
    assert len(left) > 20 // places[1]
    for workers in left:
        found = together([*workers, *[lambda: new(inside=inside)] * 2], again)
        at_center = committed[0][0][-1]
        joined = (3, 3, at_center, at_center)
        assert [each for each, *_ in found] == [committed[0][0], committed[1][0], joined, joined]
        assert [each for _, each, _ in found] == [committed[0][1]] * 2 + [[at_center]] * 2
        assert len({str(end) for *_, end in found}) == 1


@pytest.mark.parametrize(
    ("center", "places"),
    [
        *(("sharded", (1, 3)), thorough("sharded", EVERYWHERE)),
        *(thorough("replicated", (0, 2)), thorough("root", (1, 2))),
    ],
)
def test_a_rank_is_lost_in_sync_on_two_levels(center: str, places: tuple[int, int]) -> None:
    """Of all ranks: both centers are what was committed; who joins starts from that of the inner one."""
    committed = {}

    def found(worker: Worker) -> Any:
        with worker.optimizer.inner.center():
            inside = worker.model.x.tolist()
        return *worker.found(), inside

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = found(worker)
        worker.train(1)
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        at_once = found(worker)
        worker.train(2 * PERIOD)
        worker.optimizer.finalize()
        return at_once, worker.center()

    def make() -> Worker:
        return new(inside=hvdp.EASGD, paired=False, center=center)

    def prepare() -> list[Worker]:
        zero, one, two, _ = together([make] * 4, first)
        return [zero, one, two]  # Rank 0 has the copy of the share of rank 2.

    left = lost_anywhere(prepare, Worker.begin_again, 0, places)
    assert len(left) > 15 // places[1]
    *_, at_center, inside = committed[0]
    for zero, one in left:
        ends = together([zero, make, one], again)
        assert [each for each, _ in ends] == [committed[0], (3, 3, inside, at_center, inside), committed[1]]
        assert len({str(end) for _, end in ends}) == 1


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("inside", [hvdp.EASGD, None])
def test_groups_that_are_loaded_before_the_first_sync(everywhere: bool, inside: Any) -> None:
    """On the root alone, all go on from what that has; on every rank, each from its own."""
    saved: dict[int, Any] = {}

    def first(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(3)
        saved[HERE.communicator.rank] = copy.deepcopy((worker.model.state_dict(), worker.optimizer.state_dict()))
        return worker.found()

    def resumed() -> Worker:
        worker = new(inside=inside, batch=3)
        if everywhere or HERE.communicator.rank == 0:
            model, optimizer = saved[HERE.communicator.rank]
            worker.model.load_state_dict(model)
            worker.optimizer.load_state_dict(optimizer)
        return worker

    def again(worker: Worker) -> Any:
        worker.state.sync()
        worker.optimizer.synchronizer.begin()
        found = worker.found()
        worker.train(PERIOD)
        return found

    expected = together([lambda: new(inside=inside)] * 4, first)
    assert together([resumed] * 4, again) == [expected[rank if everywhere else 0] for rank in range(4)]


FIRST_SYNC = [
    *(("replicated", False, 0), ("replicated", True, 1), ("root", False, 1), ("root", True, 2)),
    *(("sharded", False, 2), ("sharded", True, 0)),
]
"""Each center with states loaded on the root alone and on every rank; each rank twice as the one that has heard."""


@pytest.mark.parametrize(
    ("center", "everywhere", "ahead", "places"),
    [
        (*case, (FIRST_SYNC.index(case) % 3, 3)) if case in FIRST_SYNC else thorough(*case, (case[2] % 2, 2))
        for case in itertools.product(("replicated", "root", "sharded"), (False, True), (0, 1, 2))
    ],
)
def test_a_rank_is_lost_in_the_first_sync(center: str, everywhere: bool, ahead: int, places: tuple[int, int]) -> None:
    """What was loaded before it is loaded still, on the root alone or on every rank.

    Also where only one rank has heard that all were there, one that is left or the one that is lost.
    """
    saved: dict[int, Any] = {}

    def first(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(3)
        rank = HERE.communicator.rank
        saved[rank] = copy.deepcopy((worker.model.state_dict(), worker.optimizer.state_dict()))
        return worker.found()

    expected = together([lambda: new(center=center)] * 3, first)

    def prepared(rank: int) -> Worker:
        worker = new(center=center, batch=3)
        if everywhere or rank == 0:
            worker.model.load_state_dict(saved[rank][0])
            worker.optimizer.load_state_dict(copy.deepcopy(saved[rank][1]))
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        found = worker.found()
        worker.train(2 * PERIOD)
        worker.optimizer.finalize()
        return found, worker.center()

    def prepare() -> list[Worker]:
        return together([lambda: prepared(HERE.communicator.rank)] * 3, lambda worker: worker)

    left = lost_anywhere(prepare, lambda worker: worker.state.sync(), ahead, places)
    assert len(left) > 5 // places[1]
    for workers in left:
        (zero, end), (one, other_end) = together(workers, again)
        assert ([zero, one], end) == ([expected[0], expected[everywhere]], other_end)


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_weights_that_are_loaded_before_the_first_step(center: str, everywhere: bool, committed: bool) -> None:
    """Between ``sync()`` and that step, on all ranks or on the root: training begins from them, after a loss as well.

    Where they were not committed, the program loads them again.
    """

    def load(worker: Worker, everywhere: bool) -> None:
        if everywhere or HERE.communicator.rank == 0:
            worker.load(7.0)

    def lose(worker: Worker) -> Worker:
        worker.state.sync()
        load(worker, everywhere)
        if committed:
            worker.state.commit()
        return worker

    def train(worker: Worker) -> Any:
        worker.train(2 * PERIOD)
        return worker.found()

    def again(worker: Worker) -> Any:
        worker.begin_again()
        if not committed:
            load(worker, everywhere)
        return train(worker)

    def undisturbed(everywhere: bool) -> Any:
        def work(worker: Worker) -> Any:
            worker.state.sync()
            load(worker, everywhere)
            return train(worker)

        return together([make] * 2, work)

    def make() -> Worker:
        return new(center=center)

    left = together([make] * 3, lose)[:2]
    assert together(left, again) == undisturbed(everywhere)
    left = together([make] * 2, lose)[:1]
    assert together([left[0], make], again) == undisturbed(everywhere or committed), "who joins takes what is committed"


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_a_rank_joins_after_the_rate_of_the_center_has_decayed(center: str) -> None:
    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(PERIOD)
        worker.decay()
        worker.state.commit()
        worker.decay()
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        worker.train(PERIOD)
        return worker.rate, worker.center()

    def make() -> Worker:
        return new(moving=True, center=center)

    one, joined = together([together([make], first)[0], make], again)
    assert one == joined
    assert one[0] == 0.25


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_the_root_that_was_asked_for(center: str) -> None:
    """Rank 1 goes, and another one becomes rank 1."""

    def first(worker: Worker) -> Worker:
        worker.load(float(HERE.communicator.rank))
        worker.state.sync()
        worker.train(PERIOD)
        worker.state.commit()
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        root = worker.optimizer.synchronizer.membership.root
        worker.state.commit()
        worker.train(PERIOD)
        return root, worker.found()

    def make() -> Worker:
        return new(center=center, root_rank=1)

    left = together([make] * 2, first)[0]
    assert together([left], again)[0][0] == 0
    found = together([left, make], again)
    assert [root for root, _ in found] == [1, 1]
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_commits_inside_of_center_are_refused(center: str) -> None:
    """They would take the center for the replica."""

    def work(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(PERIOD)
        with worker.optimizer.center(), pytest.raises(RuntimeError, match=r"commit\(\) inside the center\(\) block"):
            worker.state.commit()
        worker.state.commit()
        return sorted(worker.state.commits.held)

    assert together([lambda: new(center=center)] * 2, work) == [[0, 1]] * 2


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_a_rate_that_has_decayed_is_loaded_on_the_root(center: str, moving: bool) -> None:
    """With the checkpoint that it is in, before ``sync()``: of the local optimizer or of the center's."""
    saved = {}

    def first(worker: Worker) -> None:
        worker.state.sync()
        worker.train(PERIOD)
        worker.decay()
        state = worker.model.state_dict(), worker.optimizer.state_dict()
        saved[HERE.communicator.rank] = copy.deepcopy(state)

    def resumed(everywhere: bool) -> Callable[[Worker], Any]:
        def work(worker: Worker) -> Any:
            rank = HERE.communicator.rank
            if everywhere or rank == 0:
                model, optimizer = copy.deepcopy(saved[0])
                worker.model.load_state_dict(model)
                worker.optimizer.load_state_dict(optimizer)
            if rank > 0:
                worker.optimizer.state.clear()  # Momentum of the local optimizer stays on the root.
            worker.state.sync()
            worker.train(PERIOD)
            return worker.rate, worker.found()

        return work

    def make() -> Worker:
        return new(hvdp.AGN, moving, center=center, batch=PERIOD)

    together([make] * 2, first)
    found = together([make] * 2, resumed(everywhere=False))
    assert found == together([make] * 2, resumed(everywhere=True))
    assert [rate for rate, _ in found] == [0.25 if moving else 0.05] * 2


class CountsInGroup(torch.optim.SGD):
    """Counts its steps in the parameter group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("algorithm", [hvdp.Averaging, hvdp.AGN])
def test_who_joins_takes_over_settings_and_no_steps(algorithm: Any) -> None:
    """The rest of the local optimizer's state is new as well."""

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.optimizer.param_groups[0]["lr"] = 0.05
        worker.state.commit()
        return worker

    def again(worker: Worker) -> tuple[Any, ...]:
        worker.begin_again()
        group = worker.optimizer.param_groups[0]
        return group["lr"], group.get("count")

    def make() -> Worker:
        return new(algorithm, kind=CountsInGroup)

    workers = together([make] * 2, first)
    assert together([*workers, make], again) == [(0.05, 3), (0.05, 3), (0.05, None)]


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_presence_is_committed(center: str) -> None:
    """Of the ranks that are left, one had a gradient in the period that was committed: all take its replica."""
    committed = {}

    def step(worker: Worker, ranks: Sequence[int]) -> None:
        rank = HERE.communicator.rank
        worker.model.x.grad = worker.model.x.detach() - float(rank + 1) if rank in ranks else None
        worker.optimizer.step()

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        for ranks in ([0, 1, 2, 3], [], [1, 2]):
            step(worker, ranks)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.model.x.tolist()
        step(worker, [0, 3])
        return worker

    def again(worker: Worker) -> list[float]:
        worker.begin_again()
        step(worker, [])
        found: list[float] = worker.model.x.tolist()
        return found

    def make() -> Worker:
        return new(hvdp.Averaging, center=center, parameters={"x": "present"})

    zero, one, _, _ = together([make] * 4, first)  # They have the copies of the shares of ranks 2 and 3.
    assert together([zero, make, one], again) == [pytest.approx(committed[1])] * 3
