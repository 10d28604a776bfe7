"""Background saves of the workers of an elastic job, while one of them is killed; see ``test_rendezvous_saves.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from hvd_periodic.checkpoints import saving
from tests.parallel.elastic_events import FOLDER, die
from tests.parallel.rendezvous_scenarios import Scenario, replace_file
from tests.parallel.rendezvous_worker import wait_for


class Saves:
    """The save of a worker, and what it hears of it.

    Attributes:
        heard: what ``wait()`` has said after the ranks have changed.
    """

    def __init__(self, scenario: Scenario, model: torch.nn.Module, optimizer: hvdp.PeriodicOptimizer) -> None:
        self._scenario, self._model, self._optimizer = scenario, model, optimizer
        self._begun: Any = None
        self.heard: str | None = None

    def begin(self, step: int) -> None:
        """Save before a step, if it is the one before which the scenario saves."""
        if not self._scenario.saves or step != self._scenario.step - 1:
            return
        rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
        is_first = not (FOLDER / "victim").exists()
        held = is_first and self._scenario.saves == ("lost" if is_last else "others")
        if held:
            _hold_up(f"writing.{rank}")
        elif is_first and self._scenario.saves == "manifest" and is_last:
            saving.Saving._write_manifests = lambda self, files: die()  # type: ignore[method-assign]
        self._begun = hvdp.save(FOLDER / "sets", self._model, self._optimizer, background=True)
        with self._optimizer.center():
            replace_file(FOLDER / f"saved.{rank}", self._model.state_dict()["x"].tolist())
        if held:
            wait_for(f"writing.{rank}")
        else:
            self._begun.join()

    def hear(self) -> None:
        """Wait for a save that the ranks before have begun, and let those write that are held up."""
        if self._begun is not None and self.heard is None:
            (FOLDER / "released").touch()
            try:
                self._begun.wait()
            except RuntimeError as error:
                self.heard = str(error)


def _hold_up(name: str) -> None:
    """Hold up the thread that writes the next file, and say so in a file with this name."""
    write = saving.write_content

    def held(path: Path, content: Any) -> Any:
        saving.write_content = write
        (FOLDER / name).touch()
        wait_for("released")
        return write(path, content)

    saving.write_content = held
