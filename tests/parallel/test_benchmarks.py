"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import pytest

from tests.parallel.launch import start

pytest.importorskip("horovod.torch")


def test_exchange() -> None:
    output = start("mpirun", 2, ["-m", "tests.benchmarks.exchange", "--small", "--repetitions", "2"], 60)
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "allreduce" in line]
    assert len(rows) == 5
    assert all(float(row[-1]) > 0 for row in rows)


def test_local_step() -> None:
    output = start("python", 1, ["-m", "tests.benchmarks.local_step", "--small", "--repetitions", "2"], 60)
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "SGD" in line]
    assert len(rows) == 5
    assert all(float(row[-1]) > 0 for row in rows)
