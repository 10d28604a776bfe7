"""Runs a script as it is, but for a worker that the system kills when it is about to commit.

python -m tests.parallel.elastic_loss FOLDER COMMITS SCRIPT [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from horovod.common.elastic import State


def main(folder: Path, commits: int, script: str) -> None:
    """Run the script; its rank 1 dies, once, at this commit."""
    commit, made = State.commit, 0

    def counted(state: Any) -> None:
        nonlocal made
        made += 1
        if made == commits and state._rank() == 1 and not (folder / "lost").exists():
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        commit(state)

    State.commit = counted
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    own, folder, commits, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    main(Path(folder), int(commits), script)
