"""Train experts for handwritten digits, each on some workers only, and compare ways to exchange them.

    horovodrun -np 4 python examples/torch_experts.py

Images come in four orientations, each with an expert of its own behind features that all share. Every worker reads
upright images; those of the other orientations are divided among the workers, so that an expert is trained where its
images are. The average over all workers moves such an expert by a fraction of its steps, as the workers without its
images bring it back; with parameters={"experts.*": "present"}, only those that have trained it contribute.
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import torch
import workers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvd_periodic.torch as hvdp

ORIENTATIONS = ("upright", "left", "upside down", "right")


class Experts(nn.Module):
    """Shared features, and one expert for each orientation of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in ORIENTATIONS
        )

    def forward(self, images: Tensor, expert: int) -> Tensor:
        """Return the scores of the ten digits by one expert; the others get no gradients."""
        scores: Tensor = self.experts[expert](self.features(images))
        return scores


def train(policy: str, args: argparse.Namespace) -> tuple[list[float], int]:
    """Return the accuracy of the center for each orientation, and the bytes sent, with a policy for the experts."""
    torch.manual_seed(args.seed)
    data, test = digits.load(workers.rank(), workers.size())
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    own = [0, *(k for k in range(1, len(ORIENTATIONS)) if k % workers.size() == workers.rank())]
    model = Experts()
    optimizer = hvdp.PeriodicOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9),
        model,
        hvdp.Averaging(),
        args.period,
        parameters={"experts.*": policy},
    )
    for _ in range(args.epochs):
        order = torch.randperm(len(images))
        for number, batch in enumerate(order.split(args.batch_size)):
            expert = own[number % len(own)]
            optimizer.zero_grad()
            cross_entropy(model(turned(images[batch], expert), expert), labels[batch]).backward()
            optimizer.step()
    optimizer.finalize()
    with optimizer.center(), torch.no_grad():
        tests, expected = torch.from_numpy(test.images), torch.from_numpy(test.labels)
        found = [
            float((model(turned(tests, k), k).argmax(1) == expected).float().mean()) for k in range(len(ORIENTATIONS))
        ]
    return found, optimizer.synchronizer.counters.bytes_sent


def turned(images: Tensor, quarters: int) -> Tensor:
    """Return images in one of the orientations."""
    return images.rot90(quarters, (2, 3))


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["average", "present"], help="default: average present")
    parser.add_argument("--period", type=int, default=10, help="local steps between exchanges (default: 10)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the shard of each worker (default: 20)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD (default: 0.02)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the weights and of the order of the images (default: 1)"
    )
    return parser.parse_args()


def main() -> None:
    """Train with each policy, and print a table."""
    args = parse()
    workers.init()
    runs: list[Any] = [(policy, *train(policy, args)) for policy in args.policies]
    if workers.rank() > 0:
        return
    table = Table(title="Accuracy of the center")
    table.add_column(f"experts.*, {workers.size()} workers")
    for title in (*ORIENTATIONS, "mean", "MB sent per worker"):
        table.add_column(title, justify="right")
    for policy, accuracies, sent in runs:
        mean = sum(accuracies) / len(accuracies)
        table.add_row(policy, *(f"{accuracy:.4f}" for accuracy in (*accuracies, mean)), f"{sent / 1e6:.2f}")
    Console(width=120, color_system=None).print(table)


if __name__ == "__main__":
    main()
