"""How much one slow worker slows the others, synchronously and asynchronously, and what waiting costs, in PyTorch.

    mpirun -np 2 python -m tests.benchmarks.slow_worker --transport window

The last rank takes ten times as long for a step as it would by itself: after each it sleeps nine times as long. The
others train alone, on a process set without it, and with it, by turns. Their steps per second with it, relative to
those alone, are the figure: the median over the turns, of the fast rank which loses most. At the end they wait in
finalize() for the slow rank, and say how much of a core that takes. Horovod's own thread is in it: it meets those of
the other ranks once per HOROVOD_CYCLE_TIME (1 ms), and spins until they are there.
"""

from __future__ import annotations

import argparse
import os
import time
from math import inf
from statistics import median
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

    def steps_per_second(self, seconds: float, slow: bool, most: float) -> float:
        """Train for some time, or some steps."""
        steps, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds and steps < most:
            self.step()
            steps += 1
            if slow:
                time.sleep((SLOWER - 1) * (time.perf_counter() - started - elapsed))
        return steps / elapsed


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("window", "service", "none"), default="window", help="or none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of every run (default: 2)")
    parser.add_argument("--turns", type=int, default=7, help="of both runs (default: 7)")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden layer (default: 4096)")
    arguments = parser.parse_args()
    asynchronous = arguments.transport != "none"
    if asynchronous:
        os.environ["HVD_PERIODIC_TRANSPORT"] = arguments.transport
    torch.set_num_threads(1)
    fast = hvd.ProcessSet(range(int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1))
    hvd.init(process_sets=[fast])
    slow = hvd.rank() == hvd.size() - 1
    training = Training(arguments.width, asynchronous=asynchronous)
    alone = None if slow else Training(arguments.width, process_set=fast, asynchronous=asynchronous)
    # Synchronously, all have to take as many steps.
    seconds, most = (arguments.seconds, inf) if asynchronous else (inf, 30)
    rates = []
    for _ in range(arguments.turns):
        hvd.barrier()
        if alone is None:
            time.sleep(arguments.seconds)
        speed = 1.0 if alone is None else alone.steps_per_second(seconds, False, most)
        hvd.barrier()
        rates.append((speed, training.steps_per_second(seconds, slow, most)))
    if slow:
        time.sleep(2 * arguments.seconds)
    waited, used = time.perf_counter(), time.process_time()
    training.optimizer.synchronizer.finalize()
    waiting = (time.process_time() - used) / (time.perf_counter() - waited)
    if alone is not None:
        alone.optimizer.synchronizer.finalize()
    ranks = hvd.allgather_object((rates, waiting))
    if hvd.rank() == 0:
        ratio = min(median(together / alone for alone, together in rates) for rates, _ in ranks[:-1])
        fast_rate, slow_rate = (median(together for _, together in ranks[rank][0]) for rank in (0, -1))
        print(f"{hvd.size()} ranks, {os.cpu_count()} cores, transport {arguments.transport}")
        print(f"steps per second of a fast worker: {fast_rate:.1f}; of the slow one: {slow_rate:.1f}")
        print(f"ratio of a fast worker's to those without the slow one: {ratio:.3f}")
        print(f"core taken by waiting in finalize(): {max(waiting for _, waiting in ranks[:-1]):.3f}")


if __name__ == "__main__":
    main()
