"""The silence of a worker to which something has happened, in jobs at a rendezvous: it counts at once as long enough.

So no job waits until the seconds have passed after which a worker is lost, and these can be many: no other worker is
lost, however long it gets no time.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvd_periodic.comm.rendezvous_state import RendezvousState
from tests.parallel.elastic_events import FOLDER
from tests.parallel.rendezvous_scenarios import read_file, replace_file

_FILE = FOLDER / "silent"


def falls_silent(state: Any, process: int | None = None) -> None:
    """Say that a process, this one by default, gives no more sign of life for its worker as soon as it has stopped."""
    replace_file(_FILE, [state.job._state.view.own, process or os.getpid()])


def is_silent(process: int) -> bool:
    """Return whether a process has ended, or is stopped."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "TXZ"


def count_silence(until: str) -> None:
    """From now on, let this process see the silence of that worker as longer than it is, until there is a file."""
    first_seen = RendezvousState._here

    def here(state: RendezvousState, key: str, value: Any) -> datetime:
        seen = first_seen(state, key, value)
        if not _FILE.exists() or (FOLDER / until).exists():
            return seen
        worker, process = read_file(_FILE)
        return min(seen, datetime.now(UTC) - 2 * state._lost) if key == worker and is_silent(process) else seen

    RendezvousState._here = here  # type: ignore[method-assign]
