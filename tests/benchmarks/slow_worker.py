"""How much one slow worker slows the others, synchronously and asynchronously, and what waiting costs, in PyTorch.

    mpirun -np 3 python -m tests.benchmarks.slow_worker --transport window

The last rank takes ten times as long for a step as it would by itself: after each it sleeps nine times as long. The
others train alone first, on a process set without it, and then with it. Their steps per second in the second run,
relative to the first, are the figure; it is that of the fast rank which lost most. Then they wait in finalize() for the
slow rank, and say how much of a core that takes.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp

SLOWER = 10
"""Times that the slow worker is slower."""


class Training:
    """A perceptron on random data of this rank."""

    def __init__(self, width: int, **options: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer = hvdp.ElasticAverageOptimizer(inner, self.model, 10, 0.1, **options)
        self.data = torch.randn(32, 64)

    def step(self) -> None:
        """Take a local step, and at every tenth exchange."""
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()

    def steps_per_second(self, seconds: float, slow: bool = False) -> float:
        """Train for some time."""
        steps, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            self.step()
            steps += 1
            if slow:
                time.sleep((SLOWER - 1) * (time.perf_counter() - started - elapsed))
        return steps / elapsed


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("window", "service", "none"), default="window", help="or none")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two runs (default: 10)")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden layer (default: 4096)")
    arguments = parser.parse_args()
    asynchronous = arguments.transport != "none"
    if asynchronous:
        os.environ["HVD_PERIODIC_TRANSPORT"] = arguments.transport
    torch.set_num_threads(1)
    fast = hvd.ProcessSet(range(int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1))
    hvd.init(process_sets=[fast])
    slow = hvd.rank() == hvd.size() - 1
    alone = 0.0
    if slow:
        time.sleep(arguments.seconds)
    else:
        training = Training(arguments.width, process_set=fast, asynchronous=asynchronous)
        alone = training.steps_per_second(arguments.seconds)
        training.optimizer.synchronizer.finalize()
    training = Training(arguments.width, asynchronous=asynchronous)
    hvd.barrier()
    together = training.steps_per_second(arguments.seconds, slow)
    if slow:
        time.sleep(arguments.seconds / 2)
    waited, used = time.perf_counter(), time.process_time()
    training.optimizer.synchronizer.finalize()
    waiting = (time.process_time() - used) / (time.perf_counter() - waited)
    ranks = hvd.allgather_object((alone, together, waiting))
    if hvd.rank() == 0:
        lost = min(ranks[:-1], key=lambda rank: rank[1] / rank[0])
        print(f"{hvd.size()} ranks, {os.cpu_count()} cores, transport {arguments.transport}")
        print(f"steps per second alone: {lost[0]:.1f}; with it: {lost[1]:.1f}; ratio: {lost[1] / lost[0]:.3f}")
        print(f"steps per second of the slow worker: {ranks[-1][1]:.1f}")
        print(f"core taken by waiting in finalize(): {max(rank[2] for rank in ranks[:-1]):.3f}")


if __name__ == "__main__":
    main()
