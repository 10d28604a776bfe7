"""Rewrites the golden files by what the code does now.

python -m tests.golden.record               # the trajectories
python -m tests.golden.record checkpoints   # before them the checkpoints, which later versions have to read
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.golden import files, jobs
from tests.parallel.program import THOROUGH

PATIENT = 600.0
"""Seconds for a job: nobody waits for a recording."""


def main(anew: bool) -> None:
    """Run all jobs."""
    os.environ[THOROUGH] = "1"
    found = {}
    for front_end in jobs.FRONT_ENDS:
        for size in jobs.SIZES:
            with tempfile.TemporaryDirectory() as folder:
                if anew and size == 2:
                    jobs.run(front_end, size, Path(folder), "save", timeout_seconds=PATIENT)
                found[front_end, size] = jobs.run(front_end, size, Path(folder), timeout_seconds=PATIENT)
                print(front_end, size, len(found[front_end, size][0]), "cases", flush=True)
    files.write(found)


if __name__ == "__main__":
    main("checkpoints" in sys.argv)
