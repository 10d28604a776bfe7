"""The digits example in PyTorch, which after epoch 3 waits to be told to stop."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = 3

if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    import checkpoints

    class Waiting(checkpoints.Checkpoints):
        """Checkpoints of a job that cannot end before the signal comes."""

        def save(self, epoch: int, state: dict[str, Any]) -> None:
            """Save, and wait."""
            super().save(epoch, state)
            while epoch == EPOCH and not self._stopped:
                time.sleep(0.01)

    checkpoints.Checkpoints = Waiting  # type: ignore[misc]
    runpy.run_path(str(EXAMPLES / "torch_digits.py"), run_name="__main__")
