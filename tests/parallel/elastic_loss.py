"""Runs a script of PyTorch as it is, but for a worker that the system kills after some steps.

python -m tests.parallel.elastic_loss FOLDER STEPS SCRIPT [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
from torch.optim.optimizer import register_optimizer_step_post_hook


def main(folder: Path, steps: int, script: str) -> None:
    """Run the script; its rank 1 dies, once."""
    taken = 0

    def step(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == steps and hvd.size() > 1 and hvd.rank() == 1 and not (folder / "lost").exists():
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(step)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    own, folder, steps, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    main(Path(folder), int(steps), script)
