"""What happens to the processes of an elastic job in the tests; see ``elastic_scenarios.py``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NoReturn

from tests.parallel.elastic_scenarios import Event

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


def die() -> NoReturn:
    """End this process as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("It lives on")


def once(name: str) -> bool:
    """Return whether this is the first call by any process."""
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def at_collective(communicator: Any, number: int, moment: str) -> None:
    """Die before, in or after a collective of a class of communicators, counted from now on."""
    begin: dict[str, Callable[..., Any]] = {
        name: getattr(communicator, name) for name in ("gather_integers", "allreduce", "reducescatter", "scatter")
    }
    count = 0

    def counted(which: str, self: Any, /, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count < number:
            return begin[which](self, *arguments, **options)
        if moment == "before":
            die()
        result = begin[which](self, *arguments, **options)
        if moment == "after" and callable(result):
            result()
        die()

    for name in begin:
        setattr(communicator, name, partialmethod(partial(counted, name)))


def begin(rank: int, size: int, step: int, **more: Any) -> None:
    """Tell that this process begins a stretch of training."""
    with (FOLDER / "begun").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "rank": rank, "size": size, "step": step} | more) + "\n")


def end(rank: int | str, **found: Any) -> None:
    """Tell what this process has in the end."""
    (FOLDER / f"end.{rank}.json").write_text(json.dumps({"pid": os.getpid(), "rank": rank, **found}))


def happen(events: Sequence[Event], step: int, rank: int, size: int, state: Any, communicator: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    for event in events:
        if event.step != step or event.size != size or (event.rank is not None and event.rank != rank):
            continue
        if event.what in ("wait", "dismiss"):  # Others join at the next exchange, or leave.
            (FOLDER / event.name).touch()
            while state._host_messages.empty():
                time.sleep(0.05)
        elif event.what == "forget" and once(f"{event.name}.{rank}"):
            del state.commits.held[max(state.commits.held)]
        elif event.what == "hang" and once(event.name):
            while True:
                signal.pause()
        elif event.what == "kill" and once(event.name):
            die()
        elif event.what in ("before", "in", "after") and once(event.name):
            at_collective(communicator, event.number, event.what)
