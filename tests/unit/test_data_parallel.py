"""How a ``DistributedDataParallel`` around parameters is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hvd_periodic.torch.data_parallel import averaging_among, refuse_averaging, remember_wrappers, switch_off  # noqa: E402


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield in a job of one rank, which takes its group for one of two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_the_wrapper_of_parameters_is_found() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    assert averaging_among(model.parameters(), [0, 1]) == []
    wrapper = DistributedDataParallel(model)
    assert averaging_among(model.parameters(), [0, 1]) == [wrapper]
    assert averaging_among(other.parameters(), [0, 1]) == []
    assert averaging_among(model.parameters(), [0, 1, 2]) == []
    with pytest.raises(RuntimeError, match="DistributedDataParallel averages the gradients of ranks that exchange"):
        refuse_averaging(model.parameters(), [0, 1])
    switch_off(wrapper)
    assert averaging_among(model.parameters(), [0, 1]) == []


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapper_that_was_found_stays_so_when_objects_are_frozen() -> None:
    model = torch.nn.Linear(2, 1)
    wrapper = DistributedDataParallel(model)
    remember_wrappers()
    gc.freeze()  # For good: gc.unfreeze() would also thaw what tests/conftest.py has frozen.
    assert averaging_among(model.parameters(), [0, 1]) == [wrapper]


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapper_whose_construction_failed_is_none() -> None:
    frozen, model = torch.nn.Linear(2, 1).requires_grad_(False), torch.nn.Linear(2, 1)
    with pytest.raises(RuntimeError) as failed:  # Its traceback has the wrapper.
        DistributedDataParallel(frozen)
    assert averaging_among([*model.parameters(), *frozen.parameters()], [0, 1]) == []
    assert failed.tb is not None


def test_the_wrapper_of_a_group_that_is_gone_is_none() -> None:
    model = torch.nn.Linear(2, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapper = DistributedDataParallel(model)
    dist.destroy_process_group()
    assert averaging_among(model.parameters(), [0, 1]) == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert averaging_among(model.parameters(), [0, 1]) == []
    finally:
        dist.destroy_process_group()
    assert wrapper.module is model


def test_without_torch_distributed_there_is_none() -> None:
    assert averaging_among(torch.nn.Linear(2, 1).parameters(), [0, 1]) == []
