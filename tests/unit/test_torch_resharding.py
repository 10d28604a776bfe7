"""The state of the center's optimizer on another number of ranks, where parameters are in several buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partialmethod
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import Communicator  # noqa: E402
from hvd_periodic.elastic.backups import back_up, restore_center  # noqa: E402
from hvd_periodic.elastic.shards import own_share  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402
from hvd_periodic.torch.resharding import resharded  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402

SEEDING = threading.Lock()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 elements: every parameter is in several."""
    monkeypatch.setattr(TorchReplica, "__init__", partialmethod(TorchReplica.__init__, bucket_bytes=16))


class Few(torch.nn.Module):
    """A rank of an island may have a single element of the parameters of one tensor, and none of another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.none = torch.nn.Parameter(torch.rand(1)), torch.nn.Parameter(torch.rand(0))


def linear() -> Any:
    return torch.nn.Linear(5, 3)


def make(communicator: Communicator, center: str, of: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    with SEEDING:
        torch.manual_seed(0)
        model = of()
    local = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, hvdp.AGNOptimizer(local, model, 2, op="average", center=center, process_set=communicator, **options)


def train(model: Any, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step % 3)
        optimizer.step()


def state_of_center(optimizer: Any) -> Any:
    return optimizer.synchronizer.state_dict()["center_optimizer"]


@pytest.mark.parametrize(("of", "fragments"), [(linear, 1), (linear, 2), (Few, 1)])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_each_parameter_counts_its_own_steps(before: int, after: int, of: Callable[[], Any], fragments: int) -> None:
    """A number that all parts of a parameter shared was increased by each of them."""

    def first(communicator: Communicator) -> Any:
        model, optimizer = make(communicator, "sharded", of, fragments=fragments)
        train(model, optimizer, range(4))
        mirror = back_up(optimizer.synchronizer, own_share(optimizer.synchronizer))
        return mirror, model.state_dict(), optimizer.synchronizer.checkpoint.save_own(), optimizer.inner.state_dict()

    kept = run_ranks(before, first)

    def second(communicator: Communicator) -> Any:
        model, optimizer = make(communicator, "sharded", of, fragments=fragments)
        rank, synchronizer = communicator.rank, optimizer.synchronizer
        whole = restore_center(communicator, synchronizer, kept[rank][0] if rank < before else None, None)
        _, weights, own, inner = kept[0]
        model.load_state_dict(weights)
        cut = resharded(whole.optimizer_state, synchronizer)
        synchronizer.load_state_dict(whole.within(own) | {"center_optimizer": cut})
        optimizer.inner.load_state_dict(inner)
        train(model, optimizer, range(4, 8))
        with optimizer.center():
            return state_of_center(optimizer), [parameter.tolist() for parameter in model.parameters()]

    def alone(communicator: Communicator) -> Any:
        model, optimizer = make(communicator, "replicated", of, fragments=fragments)
        train(model, optimizer, range(8))
        with optimizer.center():
            return [parameter.tolist() for parameter in model.parameters()]

    found = run_ranks(after, second)
    steps = {
        float(entry["step"])
        for share in found[0][0]["sharded"]
        for part in (share["fragments"] if fragments > 1 else [share])
        for entry in part["state"].values()
    }
    assert steps == {4.0}
    for here, there in zip(found[0][1], run_ranks(1, alone)[0], strict=True):
        torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=0, atol=1e-6)
