"""What the programs of all trainers share: their ranks, and the loss that the oracle descends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests import oracle
from tests.parallel.torch_job import UNDER_TORCHRUN, hvd

PERIOD = 4


def begin(folder: Path | None = None) -> tuple[int, int]:
    """Let the ranks know of each other, by what has started them; return rank and size.

    Args:
        folder: where ranks of Horovod meet who need torch.distributed, too.
    """
    hvd.init()
    if folder is not None and not UNDER_TORCHRUN:
        where = f"file://{folder.absolute()}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=where, rank=hvd.rank(), world_size=hvd.size())
    return hvd.rank(), hvd.size()


class Quadratic(torch.nn.Module):
    """The parameters of the oracle, with its gradient for one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64))
        self.rank = rank

    def loss(self) -> torch.Tensor:
        return self.x @ torch.tensor(oracle.gradient(self.rank, self.x.tolist()), dtype=torch.float64)

    def forward(self, batch: object) -> torch.Tensor:
        """Return the loss, whatever the batch."""
        return self.loss()

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=oracle.RATE, momentum=oracle.MOMENTUM)


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """So many batches, of which nobody knows the number beforehand."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Any:
        return iter(torch.zeros(self.number, 1))


def easgd(n: int, exchanges: set[int], steps: int) -> oracle.Result:
    """Return replicas and center of elastic averaging after so many steps."""
    kept, oracle.STEPS = oracle.STEPS, steps
    try:
        return oracle.easgd(n, exchanges, lambda tau: oracle.default_rate(n), oracle.MOMENTUM)
    finally:
        oracle.STEPS = kept


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
