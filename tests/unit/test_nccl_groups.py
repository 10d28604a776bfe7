"""NCCL in elastic jobs, with a backend of PyTorch's that only pretends; nothing here has run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from hvd_periodic.comm import nccl_groups, torch_distributed, torch_rendezvous  # noqa: E402
from hvd_periodic.comm.elastic import RanksLostError  # noqa: E402
from hvd_periodic.comm.rendezvous_settings import RendezvousSettings  # noqa: E402
from hvd_periodic.comm.torch_distributed import (  # noqa: E402
    TorchDistributedCommunicator,
    close_world,
    open_world,
)
from hvd_periodic.comm.torch_rendezvous import TorchRendezvous  # noqa: E402

pytestmark = pytest.mark.timeout(60)

PRETENDS = "cpu:gloo,cuda:fake"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Return what happens to groups whose CUDA tensors a backend carries that only pretends."""
    from torch.testing._internal.distributed import fake_pg  # Importing it makes the backend known.

    assert fake_pg
    happened: list[tuple[str, Any]] = []
    fake = torch._C._distributed_c10d.FakeProcessGroup
    for name in ("abort", "_group_start", "_group_end"):
        monkeypatch.setattr(fake, name, lambda backend, name=name: happened.append((name, backend)), raising=False)
    monkeypatch.setattr(
        fake,
        "eager_connect_single_device",
        lambda backend, device: happened.append(("connect", backend)),
        raising=False,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    begin, destroy = dist.init_process_group, dist.destroy_process_group

    def told_of(name: str, call: Any) -> Any:
        return lambda *args, **kwargs: (happened.append((name, None)), call(*args, **kwargs))[1]

    monkeypatch.setattr(dist, "init_process_group", told_of("open", begin))
    monkeypatch.setattr(dist, "destroy_process_group", told_of("destroy", destroy))
    yield happened
    close_world()


def backends() -> set[Any]:
    own = TorchDistributedCommunicator()._group
    return {group._get_backend(torch.device("cuda")) for group in (dist.group.WORLD, own)}


def test_all_groups_are_aborted_together_before_others_are_opened(told: list[tuple[str, Any]]) -> None:
    open_world(dist.HashStore(), 0, 1, True, PRETENDS)
    first = backends()
    assert len(first) == 2
    assert [name for name, _ in told] == ["open", "connect"]
    assert told[1][1] in first
    told.clear()
    close_world()
    open_world(dist.HashStore(), 0, 1, True, PRETENDS)
    assert [name for name, _ in told] == ["_group_start", "abort", "abort", "_group_end", "destroy", "open", "connect"]
    assert {backend for name, backend in told if name == "abort"} == first
    assert told[-1][1] in backends() - first


def test_collectives_have_ended_before_their_group_is_destroyed(told: list[tuple[str, Any]]) -> None:
    """They are aborted first: a collective with a rank that is lost ends in no other way."""
    open_world(dist.HashStore(), 0, 1, True, PRETENDS)
    told.clear()
    work = Mock()
    work.is_completed.side_effect = lambda: any(name == "_group_end" for name, _ in told)
    torch_distributed._elastic.under_way.append(work)
    close_world()
    work.is_completed.assert_called()
    assert [name for name, _ in told][-1] == "destroy"
    assert torch_distributed._elastic.under_way == []


def test_the_backend_carries_cuda_tensors(told: list[tuple[str, Any]]) -> None:
    """Gloo those in host memory, as handshakes."""
    open_world(dist.HashStore(), 0, 1, True, PRETENDS)
    communicator = TorchDistributedCommunicator()
    communicator.check_devices(["cpu", "cuda"])
    assert communicator.description == "torch.distributed (gloo, fake)"


def test_an_aborted_collective_is_a_lost_rank(told: list[tuple[str, Any]]) -> None:
    """With NCCL, whoever waits gets the error, as ``TORCH_NCCL_BLOCKING_WAIT`` is set."""
    open_world(dist.HashStore(), 0, 1, True, PRETENDS)
    work = Mock()
    work.is_completed.return_value = True
    work.wait.side_effect = dist.DistBackendError("NCCL communicator was aborted on rank 0")
    with pytest.raises(RanksLostError, match=r"torch\.distributed has failed in .*NCCL communicator was aborted"):
        TorchDistributedCommunicator()._begin(lambda: work, None)()


def test_gloo_is_left_to_its_connections() -> None:
    """Of Gloo, abort would wait for what is under way."""
    try:
        open_world(dist.HashStore(), 0, 1, True)
        assert nccl_groups._backends(list(dist.distributed_c10d._world.pg_names)) == []
    finally:
        close_world()


@pytest.mark.parametrize(("value", "nccl"), [("", False), ("0", False), ("1", True)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, nccl: bool) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    monkeypatch.setenv("HVD_PERIODIC_NCCL", value)
    found = RendezvousSettings.of_environment()
    assert found.nccl == nccl
    assert found.terms["what carries CUDA tensors"] == ("NCCL" if nccl else "Gloo")


def test_a_value_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    monkeypatch.setenv("HVD_PERIODIC_NCCL", "yes")
    with pytest.raises(ValueError, match=r"HVD_PERIODIC_NCCL must be 0 or 1\. Received: 'yes'"):
        RendezvousSettings.of_environment()


@pytest.mark.parametrize(
    ("nccl", "gpu", "message"),
    [
        (False, True, "is set, and this process has no NCCL in its PyTorch: unset it for all workers"),
        (True, False, "is set, and this process has no GPU: unset it for all workers"),
        (True, True, ""),
    ],
)
def test_a_worker_without_nccl(monkeypatch: pytest.MonkeyPatch, nccl: bool, gpu: bool, message: str) -> None:
    """It does not join."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    job = TorchRendezvous(RendezvousSettings("nowhere.invalid", 1, nccl=True))
    if message:
        with pytest.raises(RuntimeError, match=f"HVD_PERIODIC_NCCL {message}"):
            job.run(Mock(), Mock())
        assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    else:
        monkeypatch.setattr(job, "_arrive", Mock(side_effect=KeyError("It goes on")))
        with pytest.raises(KeyError, match="It goes on"):
            job.run(Mock(), Mock())
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


def test_islands_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rendezvous, "island_here", Mock)
    monkeypatch.setattr(torch_rendezvous, "take_part_as", Mock())
    job = TorchRendezvous(RendezvousSettings("nowhere.invalid", 1, nccl=True))
    with pytest.raises(RuntimeError, match="HVD_PERIODIC_NCCL is set, and islands exchange over Gloo: unset it"):
        job.run(Mock(), Mock())
