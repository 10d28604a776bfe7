"""Rounds in which one rank is killed, or stopped for good; see ``test_quorum_dying.py``.

mpirun --enable-recovery -np 3 python -m tests.parallel.quorum_dying_program FOLDER WHERE ROUNDS
mpirun --enable-recovery -np 10 python -m tests.parallel.quorum_dying_program FOLDER ten ROUNDS

Of ten, one is ten times slower, one is stopped until the root has closed three more rounds, and one is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvd_periodic.algorithms import DiLoCo
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.parallel.program import attempt, stop_until

SIZE, VICTIM, LAST = 300_000, 2, 3
"""Elements, the rank that is killed, and its last round."""

SLOW, STOPPED, QUORUM_OF_TEN = 3, 4, 7
"""Of ten ranks."""


def die(number: int, folder: Path) -> None:
    """Be killed, or stop until the others have ended."""
    if number == signal.SIGSTOP and os.fork() == 0:
        others = [folder / f"{rank}.json" for rank in range(3) if rank != VICTIM]
        for _ in range(6000):
            if all(file.exists() for file in others):
                break
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), number)


def main(folder: Path, where: str, rounds: int) -> None:
    """Train for some rounds, in which one rank is killed between two, in the middle of a push, or while it waits.

    Or after the last, before the others adopt.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    communicator, x = MPICommunicator(), np.zeros(SIZE)
    ten = where == "ten"
    options: dict[str, Any] = {"timeout_seconds": 15.0} if where == "stopped" else {}
    options |= {"quorum": QUORUM_OF_TEN if ten else 2, "grace_seconds": 0.01, "process_set": communicator}
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, DiLoCo(), 1, **options)
    optimizer.synchronizer.begin()
    rank = communicator.rank
    if where == "stopped":  # Who misses a round before has one more to go, alone, when the other is at its end.
        optimizer.synchronizer.exchanger.replay([range(3)] * LAST)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
    for number in range(rounds):
        time.sleep(0.0 if not ten else 0.2 if rank == SLOW else 0.02)
        if ten and rank == STOPPED and number == LAST:
            stop_until(folder / "awake", folder / "ahead")
        if ten and rank == 0 and number == LAST + 3:
            (folder / "ahead").touch()
        if rank == VICTIM and number == LAST:
            transport: Any = optimizer.synchronizer.exchanger.worker.transport  # type: ignore[union-attr]
            if where in ("between", "stopped", "ten"):
                die(signal.SIGSTOP if where == "stopped" else signal.SIGKILL, folder)
            send, sent = transport._requests.send, []

            def killed(*arguments: Any, send: Any = send, sent: list[Any] = sent) -> Any:
                sent.append(send(*arguments))
                if len(sent) == (2 if where == "pushing" else 3):
                    time.sleep(0.2)
                    die(signal.SIGKILL, folder)
                return sent[-1]

            transport._requests.send = killed
        optimizer.step([np.full(SIZE, -1.0 - rank - 0.1 * number)])
    optimizer.finalize()
    if where == "adopting":
        if rank == VICTIM:
            die(signal.SIGKILL, folder)
        (folder / f"{rank}.error").write_text(attempt(lambda: optimizer.adopt({"x": x})))
    own = [float(x.min()), float(x.max())]
    with optimizer.center():
        found = [float(x.min()), float(x.max())]
    counters = optimizer.synchronizer.counters
    (folder / f"{rank}.json").write_text(json.dumps([own, found, counters.rounds]))
    print(f"Rank {rank} is at its end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
