"""Buckets are computed in blocks, on the memory of parameters where that is possible: it makes no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.covering import covering

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
import hvd_periodic.torch.replica as replica  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from hvd_periodic.torch.model import NamedTensors  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "averaging": hvdp.Averaging,
    "easgd": lambda: hvdp.EASGD(moving_rate=0.3),
    "easgd_rho": lambda: hvdp.EASGD(moving_rate=0.3, rho=0.1),
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": 1},
    "overlap_period": {"overlap": "period"},
    "int8": {"compression": hvdp.Compression.int8},
    "int8_overlap_fragments": {"compression": hvdp.Compression.int8, "overlap": 1, "fragments": 2},
    "fragments": {"fragments": 2},
    "sharded": {"center": "sharded"},
    "root": {"center": "root"},
    "average_state": {"optimizer_state": "average"},
}


class Model(torch.nn.Module):
    """Large and small tensors, one that is not contiguous, one of 16 bits, and statistics."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.small = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.large = torch.nn.Parameter(torch.randn(13, 7, generator=generator))
        self.scalar = torch.nn.Parameter(torch.randn((), generator=generator))
        self.strided = torch.nn.Parameter(torch.randn(5, 6, generator=generator).t())
        self.of_16_bits = torch.nn.Parameter(torch.randn(31, generator=generator).half())
        self.larger = torch.nn.Parameter(torch.randn(71, generator=generator))
        self.register_buffer("mean", torch.randn(19, generator=generator))


def trained(communicator: ThreadCommunicator, algorithm: str, options: dict[str, Any]) -> Any:
    """Return parameters, center and statistics after some periods, and whether the former are where they were."""
    model = Model(communicator.rank)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    groups = [{"params": list(model.parameters())[:2], "lr": 0.2}, {"params": list(model.parameters())[2:]}]
    local = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    optimizer = hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), 4, process_set=communicator, **options)
    for step in range(11):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = (parameter.detach() - i * (communicator.rank + 1)) * (0.5 + step % 3)
        model.mean.add_(communicator.rank)
        optimizer.step()
    optimizer.finalize()
    held = [tensor.tolist() for tensor in [*model.parameters(), model.mean]]
    with optimizer.center():
        center = [parameter.tolist() for parameter in model.parameters()]
    return held, center, [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize(("algorithm", "options"), covering(ALGORITHMS, OPTIONS, together=1))
def test_blocks_change_nothing(algorithm: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, on two ranks: in blocks of 16 elements as without any."""
    results = []
    for size in (2**40, 64):
        monkeypatch.setattr(replica, "_BLOCK_BYTES", size)
        results.append(run(2, lambda communicator: trained(communicator, algorithm, dict(OPTIONS[options]))))
    assert results[0] == results[1]
    assert all(stays for _, _, stays in results[1])
    (held, center, _), (other, same, _) = results[1]
    assert center == same
    if not algorithm.startswith("easgd"):
        assert held == other


def test_views_are_the_memory_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are contiguous, in the type of the center; small ones share blocks, which have no view."""
    monkeypatch.setattr(replica, "_BLOCK_BYTES", 64)
    model = Model(0)
    held = replica.TorchReplica(NamedTensors.of(model, None))
    bucket = held.parameters.layout.buckets[0]
    viewed: dict[str, int] = {}
    for block in held.blocks(bucket):
        assert block.size <= 16
        view = held.parameters.view(block)
        if view is None:
            continue
        (piece,) = block.pieces
        name = held.names[piece.tensor]
        parameter = model.get_parameter(name)
        assert view.data_ptr() == parameter.data_ptr() + 4 * piece.start
        assert view.tolist() == parameter.detach().reshape(-1)[piece.start : piece.stop].tolist()
        viewed[name] = viewed.get(name, 0) + block.size
    assert viewed == {"small": 3, "large": 91, "scalar": 1, "larger": 71}
