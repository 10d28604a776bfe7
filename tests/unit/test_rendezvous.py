"""Workers that do not fit, rendezvous that cannot be reached, clocks that differ; the store is in this process."""

from __future__ import annotations

import itertools
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: E402
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (  # noqa: E402
    _NodeDesc,
    _RendezvousState,
)

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.cli.main import main  # noqa: E402
from hvd_periodic.comm import island_failures, rendezvous_store, torch_rendezvous  # noqa: E402
from hvd_periodic.comm.base import Communicator  # noqa: E402
from hvd_periodic.comm.collective_tracker import CollectiveTracker, Wait  # noqa: E402
from hvd_periodic.comm.elastic import RanksLostError  # noqa: E402
from hvd_periodic.comm.island import Island  # noqa: E402
from hvd_periodic.comm.island_failures import IslandFailures, IslandRankError  # noqa: E402
from hvd_periodic.comm.local import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.rendezvous_settings import RendezvousSettings  # noqa: E402
from hvd_periodic.comm.rendezvous_state import OtherSecretError, RendezvousState, View  # noqa: E402
from hvd_periodic.comm.torch_distributed import (  # noqa: E402
    TorchDistributedCommunicator,
    close_world,
    open_world,
)
from hvd_periodic.comm.torch_rendezvous import TorchRendezvous, _Round  # noqa: E402
from hvd_periodic.elastic import state as state_module  # noqa: E402
from hvd_periodic.torch.communicator import FRONT_END  # noqa: E402
from hvd_periodic.version import __version__  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Return the port of a store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch look at the state of a rendezvous again and again without a second in between."""
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.05))


class Worker:
    """What a job sees of the state of a worker."""

    def __init__(self, **fingerprint: Any) -> None:
        self.fingerprint = fingerprint

    def sync(self) -> None:
        raise AssertionError("It takes part")

    on_reset = forget = sync


def join(settings: RendezvousSettings, **fingerprint: Any) -> None:
    TorchRendezvous(settings).run(lambda state: None, Worker(**fingerprint))


def settings(port: int, job: str, **more: Any) -> RendezvousSettings:
    return RendezvousSettings("127.0.0.1", port, 2, 2, job, join_seconds=1.0, **more)


def test_fewer_than_the_minimum(port: int) -> None:
    message = rf"1 of at least 2 workers have come to 127\.0\.0\.1:{port} in 1 s, or they have not exchanged since"
    with pytest.raises(TimeoutError, match=message):
        join(settings(port, "few"))


@pytest.mark.parametrize("listens", [False, True])
def test_a_rendezvous_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    """Nothing is there; or another server, which accepts connections and does not answer."""
    monkeypatch.setattr(rendezvous_store, "_CONNECTING", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if listens:
            other.listen()
        message = rf"The rendezvous at 127\.0\.0\.1:{port} cannot be reached{'.* does not answer' * listens}"
        with pytest.raises(ConnectionError, match=message):
            join(settings(port, "nowhere"))
    assert "hvd_periodic.connect" not in {thread.name for thread in threading.enumerate()}, "It would wait for ever"


@pytest.mark.parametrize(("lost", "patience"), [(60.0, 60.0), (1.0, 5.0)])
def test_a_store_may_be_as_slow_as_a_worker(port: int, lost: float, patience: float) -> None:
    """It serves a busy host as well as the workers do, which count as lost after so many seconds."""
    assert rendezvous_store.connected(settings(port, "slow", lost_seconds=lost)).timeout.total_seconds() == patience


@pytest.mark.parametrize("lost", [False, True])
def test_workers_of_a_round_wait_for_one_that_is_late(port: int, lost: bool) -> None:
    """Before they connect, which has a time limit; until it has come, or is lost."""
    one, other = (TorchRendezvous(settings(port, f"late {lost}")) for _ in range(2))
    for job in (one, other):
        job._store = rendezvous_store.connected(job._settings)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(one._await_all, _Round(3, 0, 2, False))
        while one._arrivals.wait is None:
            time.sleep(0.01)
        assert not waits.done()
        if lost:
            one._end_waits(View("one", 3, frozenset({"one", "other"}), lost=True))
            with pytest.raises(RanksLostError, match="A worker gives no sign of life, or has left the others"):
                waits.result()
        else:
            other._await_all(_Round(3, 1, 2, False))
            waits.result()


def test_all_groups_of_a_round_are_opened_while_all_are_there() -> None:
    """One of the workers may then restore its commit for longer than connecting may take."""
    try:
        open_world(dist.HashStore(), 0, 1, one_host=True)
        assert [own.given for own in TorchDistributedCommunicator._own.values()] == [dist.group.WORLD]
    finally:
        close_world()


def test_another_model_or_secret(port: int) -> None:
    """The first worker of a job is right; another one does not disturb it."""
    with pytest.raises(TimeoutError):
        join(settings(port, "mine"), model="a", version=1)
    with pytest.raises(ValueError, match=r"'mine' at this rendezvous trains something else: model: b here, a there\."):
        join(settings(port, "mine"), model="b", version=1)
    with pytest.raises(ValueError, match=r"'mine' at .* has another secret than this worker: set the same"):
        join(settings(port, "mine", secret="?"), model="a", version=1)


def fingerprint(
    inputs: int = 2, algorithm: Any = None, period: int = 2, adam: bool = False, commit: Any = "call", **more: Any
) -> dict[str, Any]:
    model = torch.nn.Linear(inputs, 1)
    local = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1 * inputs)
    options = {name: more.pop(name) for name in ("center", "compression") if name in more}
    optimizer = hvdp.PeriodicOptimizer(local, model, algorithm or hvdp.Averaging(), period, **options)
    return hvdp.elastic.State(model, optimizer, commit=commit, **more).fingerprint


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({}, f"the version of hvd_periodic: another here, {__version__} there."),
        ({"inputs": 3}, "`optimizer`: names, shapes and dtypes of tensors: 2 exchanged, digest "),
        ({"algorithm": hvdp.EASGD()}, "`optimizer`: algorithm: EASGD("),
        ({"period": 4}, "`optimizer`: schedule: Every(period=4) here, Every(period=2) there"),
        ({"center": "root"}, "`optimizer`: place of the center: root here, replicated there"),
        ({"compression": hvdp.Compression.int8}, "`optimizer`: compression: "),
        ({"adam": True}, "`optimizer`: optimizer: "),
        ({"commit": "exchange"}, "`commit` of the State: exchange here, call there"),
        ({"epoch": 0}, "what the State keeps: epoch, model, optimizer here, model, optimizer there"),
    ],
)
def test_a_worker_of_another_training(
    port: int, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], what: str
) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    with pytest.raises(TimeoutError):
        join(settings(port, what), **fingerprint())
    if not other:
        monkeypatch.setattr(state_module, "__version__", "another")
    with pytest.raises(ValueError, match=f"at this rendezvous trains something else: .*{re.escape(what)}") as raised:
        join(settings(port, what), **fingerprint(**other))
    different = str(raised.value).partition(" trains something else")[2]
    assert different.count("digest ") in (0, 2), "It is said once, of here and of there"


def test_a_job_that_is_over(port: int) -> None:
    first = TorchRendezvous(settings(port, "over"))
    with pytest.raises(TimeoutError):
        first.run(lambda state: None, Worker())
    first._close()
    with pytest.raises(RuntimeError, match=r"Job 'over' at .* is over"):
        join(settings(port, "over"))
    with pytest.raises(RuntimeError, match="has ended in this process before, which takes part once"):
        first.run(lambda state: None, Worker())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RENDEZVOUS", "somewhere", "must be the host:port of an hvdp rendezvous. Received: 'somewhere'"),
        ("RENDEZVOUS", "a:99999", "must be the host:port"),
        ("RANKS", "8:2", "must be the minimum and the maximum number of ranks, as in 2:8"),
        ("RANKS", "0", "must be the minimum and the maximum"),
        ("LOST_SECONDS", "soon", "must be a number of seconds, at least 1. Received: 'soon'"),
        ("JOIN_SECONDS", "0", "must be a number of seconds, at least 1"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    monkeypatch.setenv(f"HVD_PERIODIC_{variable}", value)
    with pytest.raises(ValueError, match=f"HVD_PERIODIC_{variable} {message}"):
        hvdp.elastic.State()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "[::1]:29400")
    found = RendezvousSettings.of_environment()
    assert (found.host, found.port, found.minimum, found.one_host) == ("[::1]", 29400, 1, True)
    for name, value in (("RANKS", "2:8"), ("JOB", "a"), ("SECRET", "b"), ("LOST_SECONDS", "3")):
        monkeypatch.setenv(f"HVD_PERIODIC_{name}", value)
    expected = replace(found, minimum=2, maximum=8, job="a", secret="b", lost_seconds=3.0)
    assert RendezvousSettings.of_environment() == expected


def test_numbers_of_ranks_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    assert of_state(min_ranks=2, max_ranks=8) == (2, 8)
    assert of_state(min_ranks=3)[0] == 3
    assert of_state(max_ranks=3) == (1, 3)
    monkeypatch.setenv("HVD_PERIODIC_RANKS", "2:8")
    assert of_state() == of_state(min_ranks=2, max_ranks=8) == of_state(min_ranks=2) == of_state(max_ranks=8) == (2, 8)


def of_state(**numbers: int) -> tuple[int, int]:
    job = hvdp.elastic.State(**numbers).job  # type: ignore[arg-type]
    assert isinstance(job, TorchRendezvous)
    return job._settings.minimum, job._settings.maximum


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"min_ranks": 8, "max_ranks": 2}, ValueError, r"at least `min_ranks`\. Received: min_ranks=8, max_ranks=2"),
        ({"min_ranks": 0}, ValueError, "`min_ranks` must be an int >= 1. Received: 0"),
        ({"max_ranks": 2.5}, TypeError, r"`max_ranks` must be an int >= 1\. Received: 2\.5"),
        (
            {"min_ranks": 3},
            ValueError,
            "are 3 and 4, and the environment variable HVD_PERIODIC_RANKS says 2:4: say",
        ),
    ],
)
def test_numbers_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, numbers: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    monkeypatch.setenv("HVD_PERIODIC_RANKS", "2:4")
    with pytest.raises(error, match=message):
        hvdp.elastic.State(**numbers)


def test_numbers_without_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_PERIODIC_RENDEZVOUS", raising=False)
    with pytest.raises(ValueError, match="are for jobs at a rendezvous, and HVD_PERIODIC_RENDEZVOUS is not set"):
        hvdp.elastic.State(min_ranks=2)


def test_workers_whose_numbers_differ(port: int) -> None:
    with pytest.raises(TimeoutError, match="lower the minimum, `min_ranks` of the State or HVD_PERIODIC_RANKS"):
        join(settings(port, "numbers"))
    with pytest.raises(ValueError, match=r"trains something else: the number of ranks: 1 to 2 here, 2 to 2 there\."):
        join(replace(settings(port, "numbers"), minimum=1))


def test_training_outside_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    model = torch.nn.Linear(2, 1)
    optimizer = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 2, root_rank=1)
    hvdp.elastic.State(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="this process has not joined the other ranks: put model and optimizer into"):
        optimizer.step()


@pytest.mark.parametrize("process_set", [lambda: range(1), "a set"])
def test_a_set_of_ranks_at_a_rendezvous(monkeypatch: pytest.MonkeyPatch, process_set: Any) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    model = torch.nn.Linear(2, 1)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="so that all ranks exchange with each other, and the ranks change: leave out"):
        hvdp.ModelAverageOptimizer(local, model, 2, process_set=process_set)


def test_a_front_end_without_elastic_jobs_at_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    import hvd_periodic.numpy as arrays

    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    with pytest.raises(RuntimeError, match=r"only hvd_periodic\.torch and hvd_periodic\.tensorflow train in"):
        arrays.ModelAverageOptimizer(arrays.SGD(0.1), {"x": np.zeros(2)}, 2)


def test_only_a_state_is_run() -> None:
    with pytest.raises(TypeError, match=r"takes an hvdp\.elastic\.State as its first argument\. Received: int"):
        hvdp.elastic.run(lambda state: None)(5)


# The state in the store

ONE, OTHER = _NodeDesc("one", 1, 0), _NodeDesc("other", 1, 0)


def state_of(
    port: int, job: str, own: str, secret: bytes = b"", lost: float = 1.0, maximum: int = 9
) -> RendezvousState:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return RendezvousState(store, job, secret, own, 2.0, lost, maximum, lambda view: None)


def written(change: Callable[[Any], None]) -> bytes:
    state = _RendezvousState()
    change(state)
    return pickle.dumps(state)


def set_of(state: RendezvousState, data: bytes, token: Any = None) -> tuple[bytes, Any, bool]:
    found = state.set_state(data, token)
    assert found is not None
    return found


def read(state: RendezvousState) -> Any:
    found = state.get_state()
    assert found is not None
    return pickle.loads(found[0])


@pytest.mark.parametrize("hours", [-24, 24])
def test_the_clock_of_another_host_does_not_matter(port: int, hours: int) -> None:
    """A day ahead or behind: who gives signs of life lives, and the state is the same as long as the workers are."""
    there = datetime.now(UTC) + timedelta(hours=hours)
    one, other = (state_of(port, f"clocks {hours}", name) for name in ("one", "other"))

    def beat(state: Any, when: datetime = there) -> None:
        state.participants = {OTHER: 0}
        state.last_heartbeats = {OTHER: when}
        state.deadline = there

    def new() -> bool:  # One that is first seen by this very look is no older than the look.
        before = datetime.now(UTC)
        return bool(read(one).last_heartbeats[OTHER] >= before)

    last_call, began = timedelta(seconds=2), datetime.now(UTC)
    _, token, done = set_of(other, written(beat))
    assert done
    assert new()
    deadline = read(one).deadline
    assert began + 0.9 * last_call < deadline <= datetime.now(UTC) + last_call
    assert not new()
    assert set_of(one, pickle.dumps(read(one)), token)[1:] == (token, True)
    assert not new()
    assert set_of(other, written(lambda state: beat(state, there + timedelta(seconds=1))), token)[1] == token
    assert new()


def test_who_is_lost_and_who_waits(port: int) -> None:
    one, _ = (state_of(port, "views", name) for name in ("one", "other"))

    def complete(state: Any) -> None:
        state.round, state.complete, state.participants = 3, True, {ONE: 0, OTHER: 1}

    _, token, _ = set_of(one, written(complete))
    assert (one.view.round, one.view.members, one.view.lost) == (3, {"one", "other"}, False)

    def without(state: Any) -> None:
        complete(state)
        del state.participants[OTHER]
        state.wait_list.add(OTHER)

    one.set_state(written(without), token)
    assert (one.view.round, one.view.lost, one.view.waiting) == (3, True, True)


def test_a_round_stays_open_for_workers_of_the_former_one(port: int) -> None:
    """Until one that does not come has given no sign of life for long."""
    one, other = (state_of(port, "open", name, lost=1e6) for name in ("one", "other"))

    def complete(state: Any) -> None:
        state.complete, state.participants = True, {ONE: 0, OTHER: 1}
        state.last_heartbeats = {OTHER: datetime.now(UTC)}

    def next_round(state: Any) -> None:
        state.round, state.participants, state.deadline = 1, {ONE: 0}, datetime.now(UTC)

    _, token, _ = set_of(other, written(complete))
    assert read(one).complete
    set_of(one, written(next_round), token)
    assert read(one).deadline > datetime.now(UTC) + timedelta(hours=1)
    other.leave()
    assert read(one).deadline < datetime.now(UTC) + timedelta(hours=1)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_ends_no_signs_of_life(port: int, hours: int) -> None:
    """Torch would take the process itself for dead, or the next sign for not due."""
    one = state_of(port, f"set {hours}", "one", lost=60.0)

    def beat(state: Any) -> None:
        state.participants, state.last_heartbeats = {ONE: 0}, {ONE: datetime.now(UTC) + timedelta(hours=hours)}

    set_of(one, written(beat))
    assert timedelta(0) <= datetime.now(UTC) - read(one).last_heartbeats[ONE] < timedelta(seconds=60)


def test_a_worker_without_a_place_calls_for_no_round(port: int) -> None:
    one, _ = (state_of(port, "spare", name, maximum=2) for name in ("one", "other"))
    new = _NodeDesc("new", 1, 0)

    def full(state: Any) -> None:
        state.complete, state.participants, state.wait_list = True, {ONE: 0, OTHER: 1}, {new}

    def one_place_free(state: Any) -> None:
        full(state)
        del state.participants[OTHER]

    _, token, _ = set_of(one, written(full))
    assert not one.view.waiting
    assert (read(one).wait_list, read(one).redundancy_list) == (set(), {new})
    set_of(one, written(one_place_free), token)
    assert one.view.waiting


def test_new_workers_do_not_take_the_places_of_those_before(port: int) -> None:
    """Until these have come or are lost, a new worker sees a round in which there is no place, and waits."""
    one, other = (state_of(port, "places", name, lost=1e6) for name in ("one", "other"))

    def complete(state: Any) -> None:
        state.complete, state.participants = True, {ONE: 0, OTHER: 1}

    def next_round(state: Any) -> None:
        state.round, state.participants = 1, {ONE: 0}

    def waits(state: Any) -> None:
        next_round(state)
        state.complete = True  # As it has seen.
        state.wait_list = {_NodeDesc("new", 1, 0)}

    _, token, _ = set_of(one, written(complete))
    set_of(one, written(next_round), token)
    new = state_of(port, "places", "new", lost=1e6)
    found = new.get_state()
    assert found is not None
    assert pickle.loads(found[0]).complete
    assert set_of(new, written(waits), found[1])[2]
    assert not read(one).complete
    assert not read(other).complete
    other.leave()
    assert not read(new).complete


def test_a_worker_that_leaves_is_lost_at_once(port: int) -> None:
    """Although its process lives on, and a thread of torch's would give signs of life."""
    one, other = (state_of(port, "leaving", name) for name in ("one", "other"))

    def beat(state: Any) -> None:
        state.complete, state.participants = True, {ONE: 0, OTHER: 1}
        state.last_heartbeats = {OTHER: datetime.now(UTC)}

    set_of(other, written(beat))
    before = datetime.now(UTC) - timedelta(days=1)
    assert read(one).last_heartbeats[OTHER] > before
    other.leave()
    assert read(one).last_heartbeats[OTHER] < before
    found = other.get_state()
    assert found is not None
    set_of(other, written(beat), found[1])
    assert read(one).last_heartbeats[OTHER] < before


def test_a_state_that_others_have_signed_or_that_names_other_classes(port: int) -> None:
    state_of(port, "signed", "one", b"secret").set_state(written(lambda state: None))
    with pytest.raises(OtherSecretError):
        state_of(port, "signed", "other", b"guess").get_state()
    one, data = state_of(port, "classes", "one"), b"cposix\ngetpid\n(tR."
    with pytest.raises(pickle.UnpicklingError, match=r"names posix\.getpid, which no such state does"):
        one._received(one.sign(data) + data)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rendezvous", "--port", str(port)]) == 2
    assert f"`--port` must be a TCP port, from 0 to 65535. Received: {port}" in capsys.readouterr().err


# Islands


def test_an_island_lives_as_long_as_all_its_ranks(port: int) -> None:
    """A sign of life of the first rank counts if all others have given one since the last."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    island = RendezvousState(store, "island", b"", "one", 2.0, 1.0, 9, lambda view: None, ranks=3)
    beats, now = "hvd_periodic.island.beats.one", datetime.now(UTC)

    def beat(number: int) -> int:
        def change(state: Any) -> None:
            state.participants = {ONE: 0}
            state.last_heartbeats = {ONE: now + timedelta(seconds=number)}

        token, before = island.get_state(), datetime.now(UTC)
        set_of(island, written(change), token and token[1])
        assert read(island).last_heartbeats[ONE] >= before, "torch would give signs of life without a pause"
        return int(store.get(beats))

    assert beat(1) == 1
    store.add(f"{beats}.1", 1)
    assert beat(2) == 1
    store.add(f"{beats}.2", 1)
    assert beat(3) == 2
    assert beat(4) == 2
    for rank in (1, 2):
        store.add(f"{beats}.{rank}", 1)
    assert beat(5) == 3


@pytest.fixture
def island(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Initialize torch.distributed as a program does whose ranks are an island."""
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_islands_with_a_period_in_seconds(island: None) -> None:
    """Ranks at different positions would exchange at different steps."""
    model = torch.nn.Linear(2, 1)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdp.PeriodicOptimizer(local, model, hvdp.DiLoCo(), hvdp.Seconds(1), fragments=2)
    with pytest.raises(ValueError, match="`optimizer` has a period in Seconds, which islands of an elastic job do not"):
        hvdp.elastic.State(model, optimizer)


def test_islands_with_several_levels_a_sampler_or_a_group(island: None) -> None:
    model = torch.nn.Linear(2, 1)
    inner = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 2)
    with pytest.raises(ValueError, match="`optimizer` has several levels of optimizers, which islands"):
        hvdp.elastic.State(model, hvdp.ModelAverageOptimizer(inner, model, 4))
    with pytest.raises(ValueError, match="`sampler` is an ElasticSampler, which divides examples between single ranks"):
        hvdp.elastic.State(model, inner, sampler=hvdp.elastic.ElasticSampler(range(4)))
    with pytest.raises(RuntimeError, match=r"adopt\(\) is not available between islands"):
        inner.adopt()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="so that all ranks exchange with each other, and the ranks change: leave out"):
        hvdp.ModelAverageOptimizer(local, model, 2, process_set=dist.group.WORLD)


def test_islands_do_not_save_in_several_sets(island: None, tmp_path: Path) -> None:
    """Each position in the islands would have a root of its own, which writes to the same files."""
    model = torch.nn.Linear(2, 1)
    optimizer = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 2)
    for call in (
        lambda: hvdp.save(tmp_path, model, optimizer),
        lambda: hvdp.load(tmp_path, model, optimizer),
        lambda: hvdp.SaveBestCenter(tmp_path / "best.pt", model, optimizer),
    ):
        with pytest.raises(ValueError, match="SaveBestCenter do not work in islands of an elastic job"):
            call()
    assert list(tmp_path.iterdir()) == []


class Kept:
    """The state of a worker that restores nothing."""

    fingerprint: dict[str, Any] = {}  # noqa: RUF012

    def sync(self) -> None:
        """Resume from nothing."""

    on_reset = forget = sync


class InRounds(TorchRendezvous):
    """An island whose rounds of the rendezvous are made here.

    Args:
        ranks: of the island.
        replaced: whether the other island is another one in each round.
        met: whether the islands meet in each round, or only in the last one.
        commits: whether they reach a commit in each round.
        losses: number of rounds before the last one.
    """

    def __init__(self, ranks: Communicator, replaced: bool, met: bool, commits: bool, losses: int) -> None:
        super().__init__(RendezvousSettings("here", 1))
        self._losses = losses
        self.island, self._replaced, self._meets_each_time, self._commits = Island(ranks), replaced, met, commits
        self._numbers = itertools.count(1)

    def _next_round(self) -> None:
        assert self.island is not None
        self._rounds = number = self.island.of_first(lambda: next(self._numbers))
        if self.island.is_first:
            other = f"other {number if self._replaced else 0}"
            self._state = Mock(view=View("own", number, frozenset({"own", other})))
        self._met = self._meets_each_time
        if not self._met and number <= self._losses:
            raise RanksLostError("A worker gives no sign of life, or has left the others after a loss")

    def train(self, state: Any) -> None:
        """Lose the other island in each round but the last, always with the same error."""
        if self._commits:
            self.change_due(LocalCommunicator(), [])
        if self._rounds <= self._losses:
            raise RanksLostError("A worker gives no sign of life, or has left the others after a loss")
        raise KeyError("trained")


@pytest.mark.parametrize(
    ("replaced", "met", "commits", "losses", "ends"),
    [
        (True, True, False, 12, None),
        (False, False, False, 9, None),
        (False, True, True, 12, None),
        (False, True, False, 12, 3),
        (False, False, False, 12, 10),
    ],
    ids=["others each time", "not met at first", "with commits", "the same ones", "never met"],
)
def test_an_island_ends_only_if_rounds_of_the_same_workers_fail(
    replaced: bool, met: bool, commits: bool, losses: int, ends: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rank alone knows who the others are, and decides for all of its ranks."""
    monkeypatch.setattr(torch_rendezvous, "island_here", lambda: None)
    monkeypatch.setattr(torch_rendezvous, "close_world", lambda: None)

    def work(ranks: Communicator) -> tuple[int, str]:
        job = InRounds(ranks, replaced, met, commits, losses)
        with pytest.raises((KeyError, RanksLostError)) as caught:
            job._in_rounds(job.train, Kept(), (), {})
        return job._rounds, type(caught.value).__name__

    assert run_ranks(2, work) == [(losses + 1, "KeyError") if ends is None else (ends, "RanksLostError")] * 2


def test_an_island_hears_of_a_round_that_its_first_rank_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks of it may wait in that round for a worker that is silent."""
    monkeypatch.setattr(torch_rendezvous, "island_here", Mock)
    job = TorchRendezvous(RendezvousSettings("here", 1))
    job._signs = store = dist.HashStore()
    job._end_waits(View("own", 3, frozenset({"own", "other"}), lost=True))
    assert store.check([job._lost(3)])


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def test_an_island_hears_of_the_first_error(connected: tuple[socket.socket, socket.socket]) -> None:
    """Its ranks close the connections to a rank with an error, so that collectives with it fail."""
    store = dist.HashStore()
    ranks = [IslandFailures(store, "failed", rank, 3) for rank in range(3)]
    assert [rank.heard() for rank in ranks] == [None] * 3
    ranks[1].tell(KeyError("batch"))
    text = "Rank 1 of this island has raised an error, so the island has left the job: KeyError: 'batch'"
    assert ranks[1].heard() is None
    connected[0].settimeout(30)
    assert str(ranks[0].heard()) == text
    assert connected[0].recv(1) == b"", "It is closed"
    ranks[0].tell(RuntimeError("Connection closed by peer"))
    assert str(ranks[2].heard()) == text


def test_errors_that_another_rank_of_an_island_has_caused() -> None:
    store = dist.HashStore()
    first, second = (IslandFailures(store, "failed", rank, 2) for rank in range(2))
    first.tell(RuntimeError("no more data"))
    assert "RuntimeError: no more data" in str(second.cause(RuntimeError("Connection closed by peer")))
    of_its_own = [RuntimeError("no more data"), RanksLostError("in vain"), ValueError("of its own"), second.heard()]
    assert [second.cause(error) for error in of_its_own if error is not None] == [None] * 4
    assert first.cause(RuntimeError("no more data")) is None
    assert "RuntimeError: no more data" in str(second.cause(TimeoutError("no other island has come")))


def test_an_error_without_text_that_all_ranks_of_an_island_raise() -> None:
    store = dist.HashStore()
    first, second = (IslandFailures(store, "failed", rank, 2) for rank in range(2))
    first.tell(RuntimeError())
    assert str(second.heard()).endswith(": RuntimeError")
    assert second.cause(RuntimeError()) is None


class WithoutTextError(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize("error", [WithoutTextError(), OSError("too many open files")])
def test_a_rank_of_an_island_leaves_also_if_it_cannot_tell_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_rendezvous, "island_here", Mock)
    job = TorchRendezvous(RendezvousSettings("here", 1))
    job._state, job._handler = Mock(), Mock()
    job._failures_within = IslandFailures(dist.HashStore(), "failed", 0, 2)
    if isinstance(error, OSError):
        monkeypatch.setattr(island_failures, "links", Mock(side_effect=error))
    assert job._leave(error) is None
    job._state.leave.assert_called_once_with()
    job._handler._stop_heartbeats.assert_called_once_with()


def test_waits_of_an_island_end_with_the_error_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those within the island as well as those for other islands; its first rank leaves the job."""
    within, between = CollectiveTracker("within", 0, [0, 1]), CollectiveTracker("between", 0, [0, 2])
    between.elastic = True
    for tracker in (within, between):
        tracker.wait = Wait(1, raises=True)
    monkeypatch.setattr(torch_rendezvous, "island_here", lambda: Mock(ranks=Mock(tracker=within)))
    monkeypatch.setattr(torch_rendezvous, "trackers", lambda: [between])
    job = TorchRendezvous(RendezvousSettings("here", 1))
    job._state, heard = Mock(), IslandRankError("Rank 1")
    job._failures_within = Mock()
    job._failures_within.heard.return_value = None
    job._look_within()
    job._state.leave.assert_not_called()
    job._failures_within.heard.return_value = heard
    job._look_within()
    job._state.leave.assert_called_once_with()
    assert [tracker.wait.error for tracker in (within, between) if tracker.wait is not None] == [heard] * 2


def test_an_island_that_waits_for_the_next_round_hears_of_an_error(port: int) -> None:
    """The first rank of it waits in code of torch's, which looks at the state again and again."""
    job = TorchRendezvous(replace(settings(port, "waits"), join_seconds=1e4))
    job._failures_within = Mock()
    job._failures_within.heard.return_value = None
    job.island = Mock()
    job.island.ranks = LocalCommunicator()
    job._connect(Worker())
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(job._meet)
        while not job._meets:
            time.sleep(0.01)
        job._failures_within.heard.return_value = heard = IslandRankError("Rank 1")
        job._look_within()
        assert waits.exception() is heard
    job._handler._stop_heartbeats()
    job._answers.stop()


def test_islands_of_another_front_end(island: None) -> None:
    front_end = replace(FRONT_END, elastic_islands=False)
    with pytest.raises(RuntimeError, match=r"only hvd_periodic\.torch has islands in elastic jobs"):
        front_end.communicator_of(None)
