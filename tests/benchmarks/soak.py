"""Many exchanges in every mode: memory, file descriptors, threads and shared memory of a rank do not grow.

mpirun -np 2 python -m tests.benchmarks.soak [--exchanges 20000] [--framework torch] [--mode NAME ...]
torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.soak [...]

What a rank holds is looked at forty times in the course of a mode, after a quarter as many exchanges to warm up. It has
grown where the median of the last quarter is above that of the second: of resident memory by more than a MiB.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

LOOKS = 40
TOLERANCE_MIB = 1.0

Sample = dict[str, float]


def sample() -> Sample:
    """Return what this process holds of the system."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": sum("/dev/shm/" in line for line in maps),
    }


@contextmanager
def transport(name: str) -> Iterator[None]:
    """Let an asynchronous optimizer take a transport."""
    os.environ["HVD_PERIODIC_TRANSPORT"] = name
    yield
    del os.environ["HVD_PERIODIC_TRANSPORT"]


def grown(found: list[Sample]) -> list[str]:
    """Return what has grown from the second quarter of the samples to the last."""
    quarter = max(len(found) // 4, 1)
    early, late = found[quarter : 2 * quarter], found[-quarter:]
    texts = []
    for key in found[0]:
        before, after = (statistics.median(held[key] for held in part) for part in (early, late))
        if after - before > (TOLERANCE_MIB if key == "MiB" else 0):
            texts.append(f"{key} from {before:g} to {after:g}")
    return texts


def main() -> None:
    """Soak, print a table, and end with 1 if something has grown on some rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=20_000, help="in every mode")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--mode", action="append", help="only these, by name")
    arguments = parser.parse_args()
    program = import_module(f"tests.benchmarks.soak_{arguments.framework}")
    ranks = program.init()
    gc.freeze()  # What was imported need not be looked at again and again.
    failed, exchanges = [], arguments.exchanges
    if ranks.rank == 0:
        print(f"{exchanges} exchanges: what rank 0 held after the warm-up, and at the end")
        print(f"{'mode':40}{'MiB':>16}{'files':>10}{'threads':>10}{'segments':>10}", flush=True)
    for mode in arguments.mode or program.MODES:
        name, options, asynchronous = program.MODES[mode]
        with transport(asynchronous):
            exchange, finalize = program.trainer(name, options | ({"asynchronous": True} if asynchronous else {}))
        found = []
        for done in range(-exchanges // 4, exchanges):
            exchange()
            if done >= 0 and done % max(exchanges // LOOKS, 1) == 0:
                found.append(sample())
        finalize()
        of_ranks = ranks.allgather_object((found[0], found[-1], grown(found)), mode)
        failed += [f"{mode}, rank {rank}: {what}" for rank, (*_, texts) in enumerate(of_ranks) for what in texts]
        first, last, _ = of_ranks[0]
        if ranks.rank == 0:
            columns = (f"{first[key]:.0f} {last[key]:.0f}" for key in ("files", "threads", "segments"))
            print(f"{mode:40}{first['MiB']:8.1f}{last['MiB']:8.1f}", *(f"{text:>9}" for text in columns), flush=True)
    if ranks.rank == 0:
        print("\n".join(["Grown:", *failed]) if failed else "Nothing has grown.", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
