"""What each placement of the center holds in memory, sends and takes, in PyTorch.

    mpirun -np 2 python -m tests.benchmarks.placement

The model has the sizes of ResNet-50, AGN's center is moved by Adam. Memory is that of all tensors which are alive,
found by Python's garbage collector, and so does not rest on the accounts of the package. Figures of ranks are those of
the rank with the least and of the one with the most. The run fails if a rank holds more of a sharded center, or of the
state of its optimizer, than one n-th and a bucket.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from tests.benchmarks.exchange import resnet_50_shapes
from tests.benchmarks.exchange_torch import slowest, wait

BUCKET = 16 * 2**20
"""Bytes of the largest bucket."""


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory that tensors keep alive: a view counts as the whole that it is a view of."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def alive() -> int:
    """Return the bytes of all tensors of this process."""
    gc.collect()
    return size_of(thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state of twice the size of what it moves."""
    return torch.optim.Adam(parameters, lr=1e-3)


def measure(kind: str, center: str, parameters: list[torch.nn.Parameter], repetitions: int) -> dict[str, float]:
    """Return bytes held and sent by this rank, and the seconds of an exchange."""
    before = alive()
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    inner = torch.optim.SGD(parameters, lr=0.1)
    never = 2**30
    optimizer: Any = {
        "elastic": lambda: hvdp.ElasticAverageOptimizer(inner, named, never, 0.1, center=center),
        "average": lambda: hvdp.ModelAverageOptimizer(inner, named, never, center=center),
        "AGN, Adam": lambda: hvdp.AGNOptimizer(inner, named, never, outer_optimizer=adam, center=center),
    }[kind]()
    synchronizer = optimizer.synchronizer
    seconds = []
    for _ in range(repetitions + 2):
        slowest(0.0)  # a barrier
        started = time.perf_counter()
        synchronizer.sync()
        wait()
        seconds.append(slowest(time.perf_counter() - started))
    state = synchronizer.exchanged.center_optimizer.state() or {"state": {}}
    held = {
        "center": size_of(synchronizer.center_tensors()),
        "state": size_of(
            value for of_one in state["state"].values() for value in of_one.values() if isinstance(value, torch.Tensor)
        ),
    }
    del state
    synchronizer.finalize()
    return held | {
        "all": alive() - before,
        "sent": synchronizer.counters.bytes_sent / synchronizer.rounds,
        "seconds": median(seconds[2:]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="of each exchange (default: 15)")
    parser.add_argument("--small", action="store_true", help="a model of 3 tensors, to see that this runs")
    arguments = parser.parse_args()
    hvd.init()
    shapes = [(300, 20), (20,), ()] if arguments.small else resnet_50_shapes()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks; MB on the rank with the least and the one with the most; ms and their ratio")
        headings = ("center", "its state", "all of ours", "sent per exchange")
        print(f"{'':24}{''.join(f'{heading:>18}' for heading in headings)}{'ms':>8}{'ratio':>7}")
    for kind in ("elastic", "average", "AGN, Adam"):
        whole: dict[str, float] = {}
        for center in ("replicated", "root", "sharded"):
            found = measure(kind, center, parameters, arguments.repetitions)
            whole = whole or found
            if center == "sharded":
                for key in ("center", "state"):
                    limit = whole[key] / hvd.size() + BUCKET
                    assert found[key] <= limit, f"{found[key]} bytes of {key} on rank {hvd.rank()}, more than {limit}"
            ranks = hvd.allgather_object(found)
            if hvd.rank() == 0:
                cells = [sorted(rank[key] / 1e6 for rank in ranks) for key in ("center", "state", "all", "sent")]
                texts = "".join(f"{f'{values[0]:.2f}/{values[-1]:.2f}':>18}" for values in cells)
                name, ms = f"{kind}, {center}", 1e3 * found["seconds"]
                print(f"{name:24}{texts}{ms:8.1f}{found['seconds'] / whole['seconds']:7.2f}")


if __name__ == "__main__":
    main()
