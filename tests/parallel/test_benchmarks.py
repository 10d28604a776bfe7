"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import pytest

from tests.parallel.launch import start

pytest.importorskip("horovod.torch")


@pytest.mark.parametrize(("framework", "exchanges"), [("torch", 7), ("tensorflow", 5)])
def test_exchange(framework: str, exchanges: int) -> None:
    pytest.importorskip(f"horovod.{framework}")
    options = ["--framework", framework, "--small", "--repetitions", "2"]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.exchange", *options], 90)
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "allreduce" in line]
    assert len(rows) == exchanges
    assert all(float(row[-1]) > 0 for row in rows)


def test_local_step() -> None:
    output = start("python", 1, ["-m", "tests.benchmarks.local_step", "--small", "--repetitions", "2"], 60)
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "SGD" in line]
    assert len(rows) == 5
    assert all(float(row[-1]) > 0 for row in rows)
