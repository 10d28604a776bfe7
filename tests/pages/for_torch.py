"""What the blocks in PyTorch talk about."""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from hvd_periodic import torch as hvdp

hvd.init()
torch.manual_seed(hvd.rank())
epochs = 2


class Net(torch.nn.Sequential):
    """Any model, with statistics."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def make_loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Twelve batches."""
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(12)]


def evaluate(model: torch.nn.Module) -> float:
    """Any number."""
    return float(cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])))


loader = make_loader()
dataset = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
model = Net()
local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = local

__all__ = [
    "Net",
    "cross_entropy",
    "dataset",
    "epochs",
    "evaluate",
    "hvd",
    "hvdp",
    "loader",
    "local",
    "make_loader",
    "model",
    "optimizer",
    "torch",
]
