"""The jobs of the golden check."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden.files import Reports
from tests.parallel.launch import start

FRONT_ENDS = ("numpy", "torch", "keras", "contrib")
SIZES = (1, 2, 3)
FRAMEWORKS = {"torch": "torch", "keras": "tensorflow", "contrib": "tensorflow"}
TIMEOUT_SECONDS = 120.0


def run(front_end: str, size: int, folder: Path, *options: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Reports:
    """Run all cases of a front end on some ranks; return what they report."""
    command = ["-m", f"tests.golden.{front_end}_program", str(folder)]
    if front_end == "numpy":
        start("python", 1, [*command, str(size), *options], timeout_seconds)
    else:
        start("mpirun", size, [*command, *options], timeout_seconds, FRAMEWORKS[front_end])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
