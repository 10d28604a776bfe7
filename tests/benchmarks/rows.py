"""What the exchange of an embedding table sends and takes if only the touched rows travel, in PyTorch.

    mpirun -np 2 python -m tests.benchmarks.rows
    bash run_scripts/two_hosts.sh 1gbit bash run_scripts/hosts_mpirun.sh h1:1,h2:1 tests/benchmarks/rows.py

Between two exchanges, every rank changes another part of the rows: by default 1 % of 1,000,000 rows of 64. Times are
medians of the slowest rank, and their ratio to the exchange of the whole table in the same run; the exchanges of both
kinds alternate.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from tests.benchmarks.exchange_torch import slowest, wait

KINDS = {"whole table": "average", "touched rows": "rows"}
ALGORITHMS = {"averaging": hvdp.Averaging, "DiLoCo": hvdp.DiLoCo}


def made(table: torch.nn.Parameter, algorithm: Any, policy: str) -> Any:
    """Return what exchanges a table when it is told to."""
    local = torch.optim.SGD([table], lr=0.1)
    never = 2**30
    parameters = {"table": policy}
    return hvdp.PeriodicOptimizer(local, [("table", table)], algorithm(), never, parameters=parameters).synchronizer


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table (default: 1,000,000)")
    parser.add_argument("--width", type=int, default=64, help="of a row (default: 64)")
    parser.add_argument("--touched", type=float, default=0.01, help="part of the rows, on every rank (default: 0.01)")
    parser.add_argument("--repetitions", type=int, default=9, help="of each exchange (default: 9)")
    arguments = parser.parse_args()
    hvd.init()
    count = round(arguments.rows * arguments.touched)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, a table of {arguments.rows} x {arguments.width}, {count} rows touched on each")
        print(f"{'':26}{'MB sent':>10}{'ms':>10}{'ratio':>8}")
    for name, algorithm in ALGORITHMS.items():
        tables = {kind: torch.nn.Parameter(torch.zeros(arguments.rows, arguments.width)) for kind in KINDS}
        synchronizers = {kind: made(tables[kind], algorithm, policy) for kind, policy in KINDS.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repetition in range(arguments.repetitions + 2):
            random = torch.Generator().manual_seed(1000 * repetition + hvd.rank())
            places = torch.randperm(arguments.rows, generator=random)[:count]
            for kind, synchronizer in synchronizers.items():
                with torch.no_grad():
                    tables[kind].index_add_(0, places, torch.ones(count, arguments.width))
                slowest(0.0)  # a barrier
                started = time.perf_counter()
                synchronizer.sync()
                wait()
                seconds[kind].append(slowest(time.perf_counter() - started))
        assert torch.equal(*tables.values()), "The exchange of rows is that of the whole table"
        whole = median(seconds["whole table"][2:])
        for kind, synchronizer in synchronizers.items():
            synchronizer.finalize()
            if hvd.rank() == 0:
                sent = synchronizer.counters.bytes_sent / synchronizer.rounds / 1e6
                taken = median(seconds[kind][2:])
                print(f"{name + ', ' + kind:26}{sent:10.2f}{1e3 * taken:10.1f}{taken / whole:8.3f}")


if __name__ == "__main__":
    main()
