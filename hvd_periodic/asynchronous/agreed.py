"""The state that all workers of rounds in shared memory share, and its place in memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hvd_periodic.asynchronous.meeting import TEXT
from hvd_periodic.asynchronous.slots import aligned


@dataclass
class Agreed:
    """The state that all workers share, apart from the center.

    Attributes:
        rounds: who has come, and when, as :meth:`.Rounds.save` returns it; None: nothing has happened yet.
        seen: by worker that waits, after which round it has read the center; -1: any.
        closings: number of rounds that have closed, also those that moved nothing.
        number: number of the last round that moved the center.
        members: those with whom the next round closes, which is decided; None: it is open.
        given_up: the workers that were given up when that was decided.
        results: by worker whose round has closed, and which has not taken the result yet, the slot where that lies.
    """

    rounds: dict[str, Any] | None = None
    seen: dict[int, int] = field(default_factory=dict)
    closings: int = 0
    number: int = 0
    members: list[int] | None = None
    given_up: list[int] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Return the bytes that this takes at most."""
        return aligned(2048 + 6 * TEXT + 256 * workers)

    @classmethod
    def read(cls, memory: np.ndarray) -> Agreed:
        """Return what some memory holds."""
        length = int(memory[:8].view(np.int64)[0])
        if not length:
            return cls()
        read = cls(**json.loads(memory[8 : 8 + length].tobytes()))
        read.seen, read.results = ({int(key): each for key, each in of.items()} for of in (read.seen, read.results))
        return read

    def write(self, memory: np.ndarray) -> None:
        """Copy this to some memory."""
        data = json.dumps(asdict(self), ensure_ascii=False).encode()
        memory[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        memory[:8].view(np.int64)[0] = len(data)
