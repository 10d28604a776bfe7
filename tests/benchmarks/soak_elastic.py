"""Random events in elastic jobs over torch.distributed, for any time; what workers have is compared with the equations.

python -m tests.benchmarks.soak_elastic [--minutes 60] [--seed 0] [--events 20] [--job NAME ...]

Workers, in some jobs islands, are killed, stopped and woken up, ended and started, in all jobs at once, until the time
is over; every round has a seed of its own, with which it can be run again. Ends with 1 if a round has failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.parallel.rendezvous_events import play
from tests.parallel.rendezvous_scenarios import EVENTS, ISLAND_EVENTS

JOBS = EVENTS | ISLAND_EVENTS


def main() -> None:
    """Soak, and print a line for every job of every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="after which no other round begins")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--events", type=int, default=20, help="in every job of a round")
    parser.add_argument("--job", action="append", choices=JOBS, help="only these")
    arguments = parser.parse_args()
    until, seed, failed = time.monotonic() + 60 * arguments.minutes, arguments.seed, 0
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="hvd_periodic_") as folder:
            folders = {name: Path(tempfile.mkdtemp(dir=folder)) for name in arguments.job or JOBS}
            try:
                jobs = play(folders, arguments.events, seed)
            except AssertionError as error:
                print(f"seed {seed}: {error}", flush=True)
                failed, jobs = failed + 1, {}
            for name, job in jobs.items():
                try:
                    job.check()
                    result = f"{len(job.stretches())} sets of ranks, {len(job.processes)} workers: as in the equations"
                except AssertionError as error:
                    failed, result = failed + 1, str(error)
                print(f"seed {seed}, {name}: {len(job.happened)} events, {result}", flush=True)
        seed += 1
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
