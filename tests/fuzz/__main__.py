"""Plays generated programs again: those of one seed.

python -m tests.fuzz SEED [PROGRAMS]
"""

from __future__ import annotations

import sys

from tests.fuzz.machine import TorchMachine, play

if __name__ == "__main__":
    play(TorchMachine, int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
