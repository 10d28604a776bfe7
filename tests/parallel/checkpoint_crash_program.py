"""Goes on from what is there, saves, and is killed while it saves again; see ``test_checkpoints.py``.

mpirun -np 2 python -m tests.parallel.checkpoint_crash_program FOLDER [RANK FILE]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp


def kill_before(name: str) -> None:
    """Let this process be killed before a file gets its name."""
    rename = Path.replace

    def watched(path: Path, target: Path) -> Any:
        if target.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.replace = watched  # type: ignore[method-assign]


def main(folder: Path, rank: int = -1, name: str = "") -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvdp.ElasticAverageOptimizer(local, model, 2)
    first = hvdp.load(folder, model, optimizer, steps=0)["steps"]
    for step in range(first, first + 8):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).sum().backward()
        optimizer.step()
        if step % 4 == 3:
            hvdp.save(folder, model, optimizer, steps=step + 1, keep=1, background=True).wait()
            if hvd.rank() == rank:
                kill_before(name)
    optimizer.finalize()
    (folder / f"{hvd.rank()}.txt").write_text(f"from {first}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *([int(sys.argv[2]), sys.argv[3]] if len(sys.argv) > 2 else []))
