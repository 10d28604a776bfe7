"""Rounds in which one rank is killed, or stopped for good; see ``test_quorum_dying.py``.

mpirun --enable-recovery -np 3 python -m tests.parallel.quorum_dying_program FOLDER WHERE ROUNDS VICTIM
mpirun --enable-recovery -np 10 python -m tests.parallel.quorum_dying_program FOLDER ten ROUNDS VICTIM

Of ten, one is ten times slower, one is stopped until another one has closed three more rounds, and one is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hvd_periodic.algorithms import DiLoCo
from hvd_periodic.asynchronous.rounds_in_memory import RoundsInMemory
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.parallel.program import attempt, in_the_middle_of_a_push, stop_until

SIZE, LAST = 300_000, 3
"""Elements, and the last round of the rank that is killed."""

SLOW, QUORUM_OF_TEN = 3, 7
"""Of ten ranks."""


def die(number: int, folder: Path) -> None:
    """Be killed, or stop until the two others have ended."""
    if number == signal.SIGSTOP and os.fork() == 0:
        for _ in range(6000):
            if len(list(folder.glob("*.json"))) == 2:
                break
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), number)


def dying_in_a_round(transport: Any, where: str, folder: Path) -> AbstractContextManager[object]:
    """Be killed inside in the middle of the next push, or as this rank waits, or as it closes the round."""
    in_memory = isinstance(transport, RoundsInMemory)

    def killed(*_: Any) -> None:
        if not in_memory:
            time.sleep(0.2)
        die(signal.SIGKILL, folder)

    def close_in_vain(*arguments: Any, close: Any = transport._closing.close if in_memory else None) -> None:
        close(*arguments)
        (folder / "inside").touch()
        killed()

    if where == "closing":
        return patch.object(transport._closing, "close", close_in_vain)
    if where == "waiting" and in_memory:
        return patch.object(transport, "_close_what_is_due", killed)
    return in_the_middle_of_a_push(transport, killed, 2 if where == "pushing" else 3)


def let_another_close(transport: Any, folder: Path) -> None:
    """Do not close the next round before the victim is doing so."""
    move = transport._move_and_tell

    def wait_and_move(agreed: Any) -> None:
        while not (folder / "inside").exists():
            time.sleep(0.01)
        move(agreed)

    transport._move_and_tell = wait_and_move


def main(folder: Path, where: str, rounds: int, victim: int) -> None:
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
    rank, slept = communicator.rank, 0 if victim else 4
    vars(optimizer.synchronizer.replica)["digests"] = lambda: {"frozen": bytes([rank])}
    if where == "stopped":  # Who misses a round before has one more to go, alone, when the other is at its end.
        optimizer.synchronizer.exchanger.replay([range(3)] * LAST)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
    for number in range(rounds):
        time.sleep(0.0 if not ten else 0.2 if rank == SLOW else 0.02)
        if ten and rank == slept and number == LAST:
            stop_until(folder / "awake", folder / "ahead")
        if ten and rank == 1 and number == LAST + 3:
            (folder / "ahead").touch()
        around: AbstractContextManager[object] = nullcontext()
        if number == LAST:
            transport: Any = optimizer.synchronizer.exchanger.worker.transport  # type: ignore[union-attr]
            if rank == victim and where in ("between", "stopped", "ten"):
                die(signal.SIGSTOP if where == "stopped" else signal.SIGKILL, folder)
            elif rank == victim and where != "adopting":
                around = dying_in_a_round(transport, where, folder)
            elif where == "closing":
                let_another_close(transport, folder)
        with around:
            optimizer.step([np.full(SIZE, -1.0 - rank - 0.1 * number)])
    optimizer.finalize()
    if where == "adopting":
        if rank == victim:
            die(signal.SIGKILL, folder)
        (folder / f"{rank}.error").write_text(attempt(lambda: optimizer.adopt({"x": x})))
    own = [float(x.min()), float(x.max())]
    with optimizer.center():
        found = [float(x.min()), float(x.max())]
    counters = optimizer.synchronizer.counters
    (folder / f"{rank}.json").write_text(json.dumps([own, found, counters.rounds]))
    print(f"Rank {rank} is at its end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
