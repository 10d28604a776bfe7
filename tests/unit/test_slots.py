"""Units in shared memory, changed by workers of which some are stopped anywhere, go on later, or never."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.algorithms.diloco import DelayedDiLoCo
from hvd_periodic.asynchronous import slots as module
from hvd_periodic.asynchronous.slots import Slots
from hvd_periodic.comm.shared_memory import WindowMemory, open_window
from hvd_periodic.comm.threads import run
from hvd_periodic.comm.transports import LocalMemory
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.conftest import PATIENCE

pytestmark = pytest.mark.timeout(120)

SIZES = [64, 4096, 64]
WORKERS = 3


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)


@contextmanager
def window(nbytes: int) -> Iterator[tuple[WindowMemory, str, int]]:
    """Open a window; also return its path and its size, with which other processes open it."""
    with tempfile.NamedTemporaryFile() as file:
        size = -(-nbytes // 2**16) * 2**16
        os.ftruncate(file.fileno(), size)
        memory = WindowMemory(os.open(file.name, os.O_RDWR), size)
        yield memory, file.name, size
        memory.close()


class OfWorker:
    """The memory of several workers in one process, as one of them has it: it does not lock out itself."""

    def __init__(self, memory: LocalMemory, owners: dict[int, OfWorker]) -> None:
        self.buffer, self.owners = memory.buffer, owners
        self.append, self.records, self.forget = memory.append, memory.records, memory.forget
        self.reserve: Callable[[int, int], bool] = memory.reserve

    def try_lock(self, number: int) -> bool:
        return self.owners.setdefault(number, self) is self

    def unlock(self, number: int) -> None:
        assert self.owners.pop(number) is self


def workers_of(large: int = 0) -> tuple[list[Slots], list[OfWorker], dict[int, OfWorker]]:
    """Return the slots of all workers, their memories, and who holds which lock."""
    memory, owners = LocalMemory(sum(Slots.nbytes(SIZES, WORKERS, large))), dict[int, OfWorker]()
    memories = [OfWorker(memory, owners) for _ in range(WORKERS)]
    slots = [Slots(cast(Any, each), SIZES, (rank, WORKERS), True, large) for rank, each in enumerate(memories)]
    return slots, memories, owners


def push(slots: Slots, unit: int = 1) -> int:
    """Add 1 to all numbers of a unit; return what they were."""

    def add(memory: np.ndarray) -> int:
        numbers = memory.view(np.int64)
        assert numbers.min() == numbers.max(), "a copy of one version"
        numbers += 1
        return int(numbers[0]) - 1

    with slots.turn(unit):
        return slots.change(unit, add)


def total(slots: Slots, unit: int = 1) -> int:
    low, high = slots.read(unit, lambda memory: (memory.view(np.int64).min(), memory.view(np.int64).max()))
    assert low == high
    return int(low)


CALLS = ("try_lock", "unlock", "append", "records", "forget")
"""Between two calls of these, a worker touches nothing that others see but slots that are its own."""


def stopping(memory: Any, at: int, when: str, meanwhile: Callable[[], object]) -> Callable[[], int]:
    """Let a worker's call of a number be preceded or followed by what others do; return what counts the calls."""
    seen, inside = 0, False

    def stopped(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal seen, inside
            if inside:
                return call(*arguments)
            seen += 1
            mine = seen == at
            inside = mine
            if mine and when == "before":
                meanwhile()
            result = call(*arguments)
            if mine and when == "after":
                meanwhile()
            inside = False
            return result

        return run

    for name in CALLS:
        setattr(memory, name, stopped(getattr(memory, name)))
    return lambda: seen


@pytest.mark.parametrize("large", [0, WORKERS])
@pytest.mark.parametrize("kept", [2, 2**13])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pushes", [1, 2, 7])
def test_a_worker_may_be_stopped_anywhere(
    large: int, kept: int, when: str, pushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call, for one push of others or many, whether or not the log is forgotten meanwhile: each push counts.

    A push returns what it has moved: all pushes see different numbers.
    """
    monkeypatch.setattr(module, "_KEPT", kept)
    at, unit = 0, int(not large)
    while True:
        at += 1
        (one, *others), memories, owners = workers_of(large)
        seen = [push(each, unit) for each in (*others, one)]

        def meanwhile(others: list[Slots] = others, seen: list[int] = seen) -> None:
            seen += [push(others[number % 2], unit) for number in range(pushes)]

        calls = stopping(memories[0], at, when, meanwhile)
        seen.append(push(one, unit))
        if calls() < at:
            break
        seen += [push(each, unit) for each in (one, *others, one)]
        assert sorted(seen) == list(range(len(seen))) == list(range(8 + pushes))
        assert {total(each, unit) for each in (one, *others)} == {len(seen)}
        assert not owners
    assert at > 8


def test_a_worker_that_never_goes_on_takes_its_own_slot_only() -> None:
    """Wherever it dies, the others go on, and it has pushed or it has not. If it was only interrupted, it goes on."""

    class KilledError(Exception):
        pass

    def killed() -> None:
        raise KilledError

    at = 0
    while True:
        at += 1
        (one, *others), memories, _ = workers_of()
        push(one)
        calls = stopping(memories[0], at, "after", killed)
        try:
            push(one)
        except KilledError:
            pass
        else:
            assert calls() < at
            break
        done = total(others[0])
        assert done in (1, 2)
        for _ in range(5):
            for each in others:
                push(each)
        assert {total(each) for each in others} == {done + 10}
        seen = [push(each) for each in (one, others[0], one, others[1])]
        assert seen == list(range(done + 10, done + 14))
        assert total(one) == done + 14
    assert at > 8


def test_a_worker_does_not_wait_for_one_that_is_stopped_while_others_go_on() -> None:
    """They have passed the stopped one before, and change the unit all the time."""
    (_, two, three), (of_one, _, of_three), _ = workers_of()
    assert of_one.try_lock(1)
    before = of_three.try_lock

    def try_lock(number: int) -> bool:
        if number == 1:
            assert push(two) < 10_000
        return before(number)

    of_three.try_lock = try_lock  # type: ignore[method-assign]
    push(three)
    assert total(three) == total(two) > 1


def test_memory_for_those_who_are_stopped() -> None:
    """A large unit has one spare slot; a second one gets memory when somebody is stopped in the first."""
    (one, two, three), memories, _ = workers_of(large=WORKERS)
    asked: list[tuple[int, int]] = []
    for memory in memories:
        memory.reserve = lambda start, stop: not asked.append((start, stop))  # type: ignore[func-returns-value]
    now, later = Slots.nbytes(SIZES, WORKERS, large=WORKERS)
    assert later == 2 * (SIZES[0] + 64), "copies of the unit, and of what each worker has changed"
    for _ in range(3):
        for each in (one, two, three):
            push(each, 0)
    assert asked == []
    calls = stopping(memories[0], 7, "after", lambda: [push(each, 0) for each in (two, two, three)])
    push(one, 0)
    assert calls() > 7
    assert {start for start, _ in asked} == {now}
    assert len(asked) == 2, "once by each of the two"
    assert {total(each, 0) for each in (one, two, three)} == {13}


def test_without_memory_for_those_who_are_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """Others wait until they go on, or end, and say so once."""
    (_, two, _), (of_one, of_two, _), owners = workers_of(large=WORKERS)
    asked = []
    with two._spare(0) as slot:
        spare = module._SLOT_LOCKS + slot

    def full(start: int, stop: int) -> bool:
        asked.append(start)
        if len(asked) == 5:
            del owners[spare]
        return False

    assert not owners
    assert of_one.try_lock(spare)
    of_two.reserve = full
    push(two, 0)
    assert total(two, 0) == 1
    assert len(asked) == 6
    assert caplog.messages == [
        "Rank 1 waits for pushes of others to end: shared memory has no room for another copy of the center"
    ]


def test_units_of_one_size_and_of_others() -> None:
    workers, _, _ = workers_of()
    for number in range(20):
        push(workers[number % 3], number % 2)
        push(workers[0], 2)
    assert [total(workers[1], unit) for unit in range(3)] == [10, 10, 20]


def test_threads_that_change_one_unit_at_a_time() -> None:
    def each(communicator: Any) -> int:
        memory = communicator.shared_memory(*Slots.nbytes(SIZES, 4))
        slots = Slots(memory, SIZES, (communicator.rank, 4), in_turn=communicator.rank < 2)
        for _ in range(50):
            push(slots)
        communicator.allgather_object(None, "done")
        return total(slots)

    assert run(4, each) == [200] * 4


def of_process(memory: WindowMemory, rank: int) -> Slots:
    """Return the slots of a process that hurries; the first unit is large."""
    module.PATIENCE, module._KEPT = 0.01, 256
    return Slots(memory, SIZES, (rank, WORKERS), large=WORKERS)


def child(path: str, size: int, rank: int, pushes: int, unit: int) -> None:
    """Push, in a process of its own."""
    slots = of_process(WindowMemory(os.open(path, os.O_RDWR), size), rank)
    for _ in range(pushes):
        push(slots, unit)


def started(path: str, *arguments: int) -> subprocess.Popen[bytes]:
    call = "import sys; from tests.unit.test_slots import child; child(sys.argv[1], *map(int, sys.argv[2:]))"
    return subprocess.Popen([sys.executable, "-c", call, path, *map(str, arguments)], cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("unit", [0, 1])
def test_processes_that_are_stopped_anywhere(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are stopped wherever they are, until another has pushed, over and over. The log is forgotten many times."""
    monkeypatch.setattr(module, "_KEPT", module._KEPT)
    pushes = 1000
    with window(sum(Slots.nbytes(SIZES, WORKERS, large=WORKERS))) as (memory, path, size):
        mine, own = of_process(memory, 0), 0
        children = [started(path, size, rank, pushes, unit) for rank in (1, 2)]
        try:
            while not total(mine, unit) and all(each.poll() is None for each in children):
                time.sleep(0.01)
            while total(mine, unit) - own < pushes and all(each.poll() is None for each in children):
                for each in children:
                    each.send_signal(signal.SIGSTOP)
                push(mine, unit)
                own += 1
                for each in children:
                    each.send_signal(signal.SIGCONT)
                time.sleep(0.001)
            assert [each.wait(PATIENCE * 30) for each in children] == [0, 0]
        finally:
            for each in children:
                each.kill()
                each.wait()
        assert total(mine, unit) == own + 2 * pushes


def test_processes_that_are_killed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on, more often than there are slots, and nothing of a push that was under way is seen."""
    monkeypatch.setattr(module, "_KEPT", module._KEPT)
    with window(sum(Slots.nbytes(SIZES, WORKERS, large=WORKERS))) as (memory, path, size):
        mine = of_process(memory, 0)
        for _ in range(2 * WORKERS):
            before = total(mine, 0)
            children = [started(path, size, rank, 10**9, 0) for rank in (1, 2)]
            try:
                while total(mine, 0) < before + 20:
                    assert all(each.poll() is None for each in children)
                    time.sleep(0.001)
            finally:
                for each in children:
                    each.kill()
                    each.wait()
            seen = [push(mine, 0) for _ in range(3)]
            assert seen == list(range(seen[0], seen[0] + 3))
            assert total(mine, 0) == seen[-1] + 1


def test_the_log_of_a_window_is_forgotten(tmp_path: Path) -> None:
    """Zeros are in place of whole pages of records."""
    with window(1) as (memory, *_):
        records = [[number, 1, 2, 3] for number in range(1, 2**13)]
        for record in records:
            memory.append(record)
        read: list[list[int]] = []
        while some := memory.records(len(read)):
            read += some
        assert read == records
        before = os.fstat(memory._file).st_blocks
        memory.forget(5000)
        memory.forget(4000)
        assert memory.records(0)[0] == [0] * 4
        assert memory.records(5000)[0] == records[5000]
        assert os.fstat(memory._file).st_blocks < before


def test_memory_of_a_window_that_is_provided_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none at first; the log, which follows it, has its own."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    memory = open_window(0, lambda value: [value], 2**20, spare=0, later=2**22)
    try:
        taken = [512 * os.fstat(memory._file).st_blocks]
        memory.append([1, 2, 3, 4])
        assert memory.reserve(2**20, 2**21)
        memory.buffer[2**21 - 1] = 7
        taken.append(512 * os.fstat(memory._file).st_blocks)
        assert taken[0] < 2**20 + 2**16
        assert 2**21 <= taken[1] < 2**21 + 2**17
        monkeypatch.setattr(os, "posix_fallocate", full)
        assert not memory.reserve(2**21, 2**22)
        assert memory.records(0) == [[1, 2, 3, 4]]
        assert (memory.buffer.size, memory.buffer[2**21 - 1]) == (2**20 + 2**22, 7)
    finally:
        memory.close()


class Overwrites(DiLoCo):
    """Has an asynchronous variant that overwrites messages, as it may."""

    def asynchronous_variant(self, size: int) -> Algorithm:
        class Variant(DelayedDiLoCo):
            def move(self, space: Any, center: Any, total: Any, exchange: Any) -> Any:
                found = super().move(space, center, space.copy(total), exchange)
                total *= 0.5
                return found

        return Variant(0.5, 0.5)


ALGORITHMS: dict[str, Algorithm] = {
    "one that overwrites messages": Overwrites(),
    "elastic averaging": EASGD(0.25),
    "accumulated gradient normalization": AGN(),
    "averaging": Averaging(),
    "diloco": DiLoCo(),
    "slowmo": SlowMo(),
    "bmuf": BMUF(),
}


def trained(algorithm: Algorithm, interrupted: bool) -> list[Any]:
    """Two workers push in turn; in the second turn, one is stopped before it swaps until the other has pushed, or not.

    Return what both have then, all vectors of the center, the state of its optimizer, and the counts of pushes.
    """
    begun, pushed = Event(), Event()

    def each(communicator: Communicator) -> Any:
        rank, x = communicator.rank, np.zeros(5)
        local = SGD(0.1, momentum=0.5)  # A copy moves the center of accumulated gradients.
        optimizer = PeriodicOptimizer(local, {"x": x}, algorithm, 1, asynchronous=True, process_set=communicator)
        synchronizer = optimizer.synchronizer
        synchronizer.begin()

        def step(turns: list[int]) -> None:
            for turn in turns:
                if rank == turn:
                    optimizer.step([(1.0 + rank) * (x - np.arange(5.0) - rank)])
                communicator.allgather_object(None, "turn")

        step([0, 1])
        if not interrupted:
            step([1, 0])
        elif rank == 1:
            assert begun.wait(PATIENCE * 30)
            optimizer.step([(1.0 + rank) * (x - np.arange(5.0) - rank)])
            pushed.set()
        else:
            versions = synchronizer.exchanger.worker.transport._slots.versions
            propose = versions.propose

            def stopped(unit: int, *arguments: int) -> None:
                if unit == 0 and not begun.is_set():
                    begun.set()
                    assert pushed.wait(PATIENCE * 30)
                propose(unit, *arguments)

            versions.propose = stopped
            optimizer.step([(1.0 + rank) * (x - np.arange(5.0) - rank)])
        communicator.allgather_object(None, "pushed")
        step([0, 1])
        state = synchronizer.state_dict()
        vectors = {key: value["x"].tolist() for key, value in state["vectors"]["parameters"].items()}
        communicator.allgather_object(None, "seen")
        return (
            x.tolist(),
            vectors,
            str(state["center_optimizer"]),
            state["pushes"]["windows"],
            state["pushes"]["pushes"],
        )

    return run(2, each)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_who_is_stopped_pushes_on_the_center_as_it_is_then(name: str) -> None:
    """To the bit what workers have that push one after the other."""
    assert trained(ALGORITHMS[name], interrupted=True) == trained(ALGORITHMS[name], interrupted=False)


def test_states_are_read_while_a_worker_is_stopped_in_its_turn() -> None:
    """At every unit of the window."""

    def train(communicator: Communicator) -> Any:
        x = np.zeros(5)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, DiLoCo(), 1, asynchronous=True, process_set=communicator)
        optimizer.step([np.ones(5)])
        memory = optimizer.synchronizer.exchanger.worker.transport._memory
        communicator.allgather_object(None, "pushed")
        held = [number for number in range(2) if communicator.rank == 1 and memory.try_lock(number)]
        communicator.allgather_object(None, "held")
        found = None
        if communicator.rank == 0:
            with optimizer.center():
                center = x.tolist()
            vectors = optimizer.synchronizer.state_dict()["vectors"]["parameters"]
            found = center, vectors["center"]["x"].tolist()
        communicator.allgather_object(None, "read")
        for number in held:
            memory.unlock(number)
        optimizer.finalize()
        return held, found

    (_, (center, saved)), (held, _) = run(2, train)
    assert held == [0, 1]
    assert center == saved


def test_a_full_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit is as before, and changes again once there is room."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with window(sum(Slots.nbytes(SIZES, WORKERS))) as (memory, _, _):
        slots = Slots(memory, SIZES, (0, WORKERS))
        push(slots)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(OSError, match=r"set HVD_PERIODIC_TRANSPORT=service. Received: No space left"):
                push(slots)
        assert total(slots) == 1
        push(slots)
        assert total(slots) == 2
