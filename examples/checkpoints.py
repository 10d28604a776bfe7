"""Checkpoints of a PyTorch job that may be stopped and started again: a file per rank and epoch."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import torch
import workers

EXIT_CODE = 75
"""Of a job that was stopped and wants to be started again: EX_TEMPFAIL of sysexits.h."""


class Checkpoints:
    """Saves and loads this rank's state, and notices SIGUSR1 and SIGTERM, by which batch systems say that time is up.

    Args:
        folder: of the files, shared by all hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stopped = folder, False
        folder.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._stop)

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Save what this rank needs to go on after an epoch; an interrupted write leaves the older files."""
        path = self._path(epoch)
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        for old in self._epochs()[:-2]:
            self._path(old).unlink()

    def load(self) -> tuple[int, dict[str, Any] | None]:
        """Return the newest epoch of which all ranks have a file, and this rank's state; -1 and None without any."""
        epoch = max(set.intersection(*workers.gather(set(self._epochs()))), default=-1)
        return epoch, torch.load(self._path(epoch), weights_only=True) if epoch >= 0 else None

    def stopping(self) -> bool:
        """Return whether any rank has been told to stop; all ranks ask together."""
        return any(workers.gather(self._stopped))

    def _stop(self, *_: Any) -> None:
        self._stopped = True

    def _path(self, epoch: int) -> Path:
        return self._folder / f"rank{workers.rank()}of{workers.size()}-{epoch:06}.pt"

    def _epochs(self) -> list[int]:
        pattern = re.compile(rf"rank{workers.rank()}of{workers.size()}-(\d+)\.pt")
        found = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
