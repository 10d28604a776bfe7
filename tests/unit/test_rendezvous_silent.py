"""A rendezvous that does not answer any more: everything that waits for it ends with an error that says so."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from hvd_periodic.comm import own_sockets, rendezvous_store
from hvd_periodic.comm.rendezvous_settings import RendezvousSettings
from hvd_periodic.comm.torch_distributed import close_world
from hvd_periodic.comm.torch_rendezvous import TorchRendezvous, _Round
from tests.parallel.rendezvous_job import rendezvous_server

pytestmark = pytest.mark.timeout(120)

SILENT = r"The rendezvous at 127\.0\.0\.1:\d+ cannot be reached, .*: start it with .* It has not answered for 2 s"


class Server:
    """A rendezvous that can be stopped."""

    def __init__(self, address: str, process: int) -> None:
        self.port, self._process = int(address.rpartition(":")[2]), process

    def stop(self) -> None:
        """Return once all threads have stopped: until then, one may still answer."""
        os.kill(self._process, signal.SIGSTOP)
        threads = Path(f"/proc/{self._process}/task")
        while any((each / "stat").read_text().rpartition(")")[2].split()[0] != "T" for each in threads.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._process, signal.SIGCONT)


@pytest.fixture(scope="module")
def process() -> Iterator[Server]:
    with rendezvous_server() as (address, server):
        yield Server(address, server.pid)


@pytest.fixture
def server(process: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a rendezvous that has to answer within two seconds, and goes on when the test ends."""
    monkeypatch.setattr(rendezvous_store, "_CONNECTING", 1.0)
    yield process
    process.go_on()
    close_world()


def job(server: Server, name: str, minimum: int = 1, lost: float = 1.0) -> TorchRendezvous:
    return TorchRendezvous(RendezvousSettings("127.0.0.1", server.port, minimum, 2, name, "", lost, 1e4))


class Worker:
    """What a job sees of the state of a worker."""

    fingerprint: ClassVar[dict[str, Any]] = {}

    def sync(self) -> None:
        """There is no other worker."""

    on_reset = forget = sync


def test_while_a_worker_waits_for_others(server: Server) -> None:
    """In torch's code, which looks at the store again and again."""
    worker = job(server, "waits", minimum=2)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(worker.run, lambda state: None, Worker())
        while not worker._meets:
            time.sleep(0.01)
        server.stop()
        with pytest.raises(ConnectionError, match=SILENT):
            waits.result()
    assert of_the_rendezvous() == []


@pytest.mark.parametrize("lost", [1.0, 60.0])
def test_while_a_worker_of_a_round_waits_for_one_that_is_late(server: Server, lost: float) -> None:
    """If it answers again before it counts as lost, nothing has happened."""
    one, other = (job(server, f"late {lost}", lost=lost) for _ in range(2))
    for each in (one, other):
        each._connect(Worker())
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(one._await_all, _Round(3, 0, 2, False))
        while one._arrivals.wait is None:
            time.sleep(0.01)
        server.stop()
        if lost == 1.0:
            with pytest.raises(ConnectionError, match=SILENT):
                waits.result()
        else:
            assert not waits.done()
            server.go_on()
            other._await_all(_Round(3, 1, 2, False))
            waits.result()
    for each in (one, other):
        each._handler._stop_heartbeats()
        each._answers.stop()


class UserError(Exception):
    """An error of the user's function."""


def raises() -> None:
    raise UserError


@pytest.mark.parametrize(("end", "error"), [(raises, UserError), (lambda: None, None)])
def test_while_a_worker_leaves(server: Server, end: Callable[[], None], error: type[Exception] | None) -> None:
    """It ends as it would have ended, with an error or without."""

    def train(state: Any) -> str:
        server.stop()
        end()
        return "done"

    if error is None:
        assert job(server, "returns").run(train, Worker()) == "done"
    else:
        with pytest.raises(error):
            job(server, "raises").run(train, Worker())
    assert of_the_rendezvous() == []


def test_connections_that_are_opened_later(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that gives signs of life ends its waits for the store, and training goes on."""

    def train(state: Any) -> str:
        store = dist.distributed_c10d._get_default_store()
        server.stop()
        for call in (lambda: store.add("x", 1), store.clone):
            with pytest.raises(dist.DistNetworkError):
                call()
        return "done"

    assert job(server, "opens").run(train, Worker()) == "done"
    assert "is lost: training goes on, but no worker can join, and the loss of one ends the job. It has" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_watch_that_starts_again(server: Server, host: str) -> None:
    """After an error, train(state) may be called again; and an address may lead to another one."""
    watch = rendezvous_store.RendezvousWatch(RendezvousSettings(host, server.port, 1, 2, "again", "", 1.0, 1e4))
    for _ in range(2):
        watch.start()
        watch.stop()
    watch.start()
    server.stop()
    try:
        with pytest.raises(dist.DistNetworkError):
            watch._store.add("x", 1)
    finally:
        watch.stop()


def test_a_default_timeout_of_sockets(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for sockets that Python opens: others still wait."""
    monkeypatch.setattr(rendezvous_store, "_ASKING", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.setdefaulttimeout(30.0)
        try:
            assert job(server, "default").run(lambda state: time.sleep(0.5) or "done", Worker()) == "done"
            own_sockets.close_connections([("192.0.2.1", 1)])
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(ours.fileno())


def of_the_rendezvous() -> list[threading.Thread]:
    """Return the threads that might wait for the store when Python ends, and would abort the process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(("hvd_periodic.", "RendezvousKeep"))]
