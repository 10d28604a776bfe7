"""Weights that no exchange touches and that differ between ranks are named; nothing differs silently."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from hvd_periodic import Communicator, LocalCommunicator
from hvd_periodic.asynchronous import board
from hvd_periodic.asynchronous.leaving import leave
from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.comm.membership import Membership
from hvd_periodic.sync.differences import Differences
from tests.helpers import run_ranks

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Quantized(torch.nn.Module):
    """A trained weight; a queue, a seed and statistics; a frozen teacher."""

    def __init__(self, queues: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.teacher = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
        for number in range(queues):
            self.register_buffer(f"queue{number}", torch.zeros(500, dtype=torch.bfloat16))
        self.register_buffer("noise_seed", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("running_mean", torch.zeros(1))


def made(communicator: Communicator, queues: int = 1, **options: Any) -> tuple[Any, Any]:
    model = Quantized(queues)
    local = torch.optim.SGD([model.weight], lr=0.1)
    return model, hvdp.PeriodicOptimizer(local, model, hvdp.Averaging(), 2, process_set=communicator, **options)


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        model.weight.grad = torch.ones(2)
        optimizer.step()


def change(model: Any, rank: int) -> None:
    """In each way in which scripts do it."""
    with torch.no_grad():
        model.queue0[123] = rank
    model.teacher.data[77] += rank
    model.noise_seed += rank
    model.running_mean += rank


QUEUE = "Weight 'queue0', which no exchange touches, differs between ranks: rank 1 from rank 0. To exchange it, pass "
TEACHER = (
    "Weight 'teacher', which no exchange touches, differs between ranks: rank 1 from rank 0. Change it identically"
)


@pytest.mark.parametrize("call", ["finalize", "audit", "audit_every"])
def test_each_is_named_once(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """With what to write; but not statistics, which exchanges average, nor what draws numbers."""
    options = {"audit_every": 1} if call == "audit_every" else {}

    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, **options)
        train(model, optimizer)
        change(model, communicator.rank)
        train(model, optimizer)
        if call == "audit":
            optimizer.synchronizer.audit()
            optimizer.synchronizer.audit()
        if call != "audit_every":
            optimizer.finalize()

    run_ranks(2, work)
    assert caplog.text.count("differs between ranks") == 2
    assert f"{QUEUE}buffers={{'queue0': 'average'}}; to keep each rank's own, 'local'" in caplog.text
    assert f"{TEACHER} on all ranks; or, to keep each rank's own, pass parameters={{'teacher': 'local'}}" in caplog.text


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "asynchronous, memory": ("", {"asynchronous": True}),
    "asynchronous, a service": ("service", {"asynchronous": True}),
    "asynchronous, shards": ("service", {"asynchronous": True, "center": "sharded"}),
    "quorum, memory": ("", {"quorum": 2}),
    "quorum, a hub": ("service", {"quorum": 2}),
}
"""What the environment says of the transport, and options."""


@pytest.mark.parametrize("call", ["finalize", "audit"])
@pytest.mark.parametrize("way", WAYS)
def test_each_is_named_once_without_a_collective(
    way: str, call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the root, which is not rank 0; also what differs only later, and what is equal again is not named."""
    transport, options = WAYS[way]
    monkeypatch.setenv(VARIABLE, transport)

    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, 2, root_rank=1, **options)
        train(model, optimizer, 2 + communicator.rank)
        change(model, communicator.rank == 2)
        with torch.no_grad():
            model.queue1.fill_(communicator.rank)
        getattr(optimizer.synchronizer, call)()
        with torch.no_grad():
            model.queue1.zero_()
        train(model, optimizer, 3 - communicator.rank)
        for _ in range(2):
            optimizer.synchronizer.audit()
            optimizer.synchronizer.finalize()

    run_ranks(3, work)
    warnings = sorted(record.getMessage().split(". ")[0] for record in caplog.records if "differs" in record.msg)
    expected = {"queue0": "rank 2", "queue1": "ranks 1 and 2", "teacher": "rank 2"}
    text = "Weight {!r}, which no exchange touches, differs between ranks: {} from rank 0"
    assert warnings == [text.format(*pair) for pair in expected.items()]


@pytest.mark.parametrize("way", ["asynchronous, memory", "asynchronous, a service", "quorum, memory", "quorum, a hub"])
def test_a_rank_that_ends_without_finalize_is_not_compared(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, options = WAYS[way]
    monkeypatch.setenv(VARIABLE, transport)

    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, **options)
        train(model, optimizer)
        optimizer.synchronizer.audit()
        change(model, 1 + communicator.rank)
        if communicator.rank < 2:
            optimizer.finalize()
        worker = optimizer.synchronizer.exchanger.worker
        for _ in leave(communicator, [worker]):
            pass

    run_ranks(3, work)
    assert caplog.text.count("differs between ranks: rank 1 from rank 0. ") == 2
    assert caplog.text.count("differs between ranks: ") == 2


def test_without_memory_for_digests_they_are_not_compared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, asynchronous=True)
        train(model, optimizer)
        change(model, communicator.rank)
        optimizer.finalize()

    monkeypatch.setattr(board, "ROOM", 2 * 48 - 1)
    run_ranks(2, work)
    for rank in range(2):
        text = "No shared memory for digests of 96 bytes: what no exchange touches is not compared with that of rank"
        assert f"{text} {rank}" in caplog.text
    assert "differs" not in caplog.text


def test_equal_changes_and_those_that_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, buffers={"queue*": "local"}, parameters={"teacher": "local"})
        change(model, communicator.rank)
        train(model, optimizer)
        optimizer.finalize()
        model, optimizer = made(communicator)
        change(model, 1)
        train(model, optimizer)
        optimizer.finalize()

    run_ranks(2, work)
    assert "differs between ranks" not in caplog.text


def test_ranks_are_told_apart_and_many_weights_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        model, optimizer = made(communicator, 14)
        train(model, optimizer)
        with torch.no_grad():
            for number in range(14):
                getattr(model, f"queue{number}")[0] = communicator.rank == 1 or (number == 5 and communicator.rank)
        optimizer.finalize()

    run_ranks(3, work)
    assert caplog.text.count("differs between ranks: ") == 9
    assert caplog.text.count("rank 1 from rank 0. ") == 8
    assert caplog.text.count("ranks 1 and 2 from rank 0. ") == 1
    others = ", ".join(f"'queue{number}'" for number in range(9, 14))
    assert f"So do 5 other weights that no exchange touches: {others}" in caplog.text


def test_ranks_that_resume_compare_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        for resumed in (False, True):
            model, optimizer = made(communicator)
            if resumed:
                hvdp.load(tmp_path, model, optimizer)
            else:
                train(model, optimizer)
                change(model, communicator.rank)
                hvdp.save(tmp_path, model, optimizer)
        assert "differs" not in caplog.text
        communicator.allgather_object(None, "before")
        train(model, optimizer, 1)

    run_ranks(2, work)
    assert caplog.text.count("differs between ranks") == 2


def test_tensors_that_have_not_changed_are_hashed_once() -> None:
    model, optimizer = made(LocalCommunicator())
    replica = optimizer.synchronizer.exchanger.context.exchanged.replica
    counts = []
    for changes in (0, 1, 0):
        if changes:
            change(model, 1)
        with patch("hvd_periodic.torch.replica.hashlib", wraps=hashlib) as seen:
            before = replica.digests()
        counts.append(seen.sha256.call_count)
        assert list(before) == ["teacher", "queue0"]
    assert counts[1:] == [2, 0], "the teacher was hashed when the optimizer was made"


def test_weights_that_some_ranks_do_not_have_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As a variable that a graph has on the root alone: the others are compared by name."""

    def work(communicator: Communicator) -> None:
        queue, extra = bytes([communicator.rank]), {"best": b"0"} if communicator.rank == 0 else {}
        replica: Any = Mock(digests=lambda: {**extra, "teacher": b"1", "queue": queue}, advice_on_difference=str)
        Differences(replica, Membership(communicator, 0, "model.1")).compare()

    run_ranks(3, work)
    assert caplog.text.count("differs between ranks: ") == 1
    assert "Weight 'queue', which no exchange touches, differs between ranks: ranks 1 and 2 from rank 0." in caplog.text


def test_names_that_differ_alone_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As those of Keras, which numbers layers; values are compared by position."""

    def work(communicator: Communicator) -> list[str]:
        sent, gather = list[str](), communicator.allgather_object
        for queue in (b"1", bytes([communicator.rank])):
            replica: Any = Mock(
                digests=lambda queue=queue: {f"teacher_{communicator.rank}": b"1", f"queue_{communicator.rank}": queue},
                advice_on_difference=str,
            )
            with patch.object(
                communicator, "allgather_object", lambda value, name: sent.append(name) or gather(value, name)
            ):
                Differences(replica, Membership(communicator, 0, "model.1")).compare()
        return sent

    for sent in run_ranks(2, work):
        assert sent == ["model.1.unexchanged"] * 2 + ["model.1.unexchanged.weights"]
    assert caplog.text.count("differs between ranks: ") == 1
    assert "Weight 'queue_0', which no exchange touches, differs between ranks: rank 1 from rank 0." in caplog.text
