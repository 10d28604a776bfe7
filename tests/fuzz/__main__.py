"""Plays generated programs again: those of one seed.

python -m tests.fuzz TorchPlayer SEED [PROGRAMS]
"""

from __future__ import annotations

import importlib
import sys

from tests.fuzz.machine import play

MODULES = {
    "TorchPlayer": "tests.fuzz.torch_player",
    "KerasPlayer": "tests.fuzz.keras_player",
    "NumpyPlayer": "tests.fuzz.numpy_player",
}

if __name__ == "__main__":
    player = getattr(importlib.import_module(MODULES[sys.argv[1]]), sys.argv[1])
    play(player, int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 200)
