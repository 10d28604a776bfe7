"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import pytest

from tests.parallel.launch import start

pytest.importorskip("horovod.torch")


@pytest.mark.parametrize(("framework", "exchanges"), [("torch", 7), ("tensorflow", 5)])
def test_exchange(framework: str, exchanges: int) -> None:
    pytest.importorskip(f"horovod.{framework}")
    options = ["--framework", framework, "--small", "--repetitions", "2"]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.exchange", *options], 90, framework)
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "allreduce" in line]
    assert len(rows) == exchanges
    assert all(float(row[-1]) > 0 for row in rows)


def test_local_step() -> None:
    output = start("python", 1, ["-m", "tests.benchmarks.local_step", "--small", "--repetitions", "2"], 60, "torch")
    rows = [line.split() for line in output.splitlines() if "Optimizer" in line or "SGD" in line]
    assert len(rows) == 5
    assert all(float(row[-1]) > 0 for row in rows)


def test_placement() -> None:
    output = start("mpirun", 2, ["-m", "tests.benchmarks.placement", "--small", "--repetitions", "1"], 90, "torch")
    rows = [line.rsplit(maxsplit=6) for line in output.splitlines() if "elastic" in line or "a" in line[:1].lower()]
    held = {row[0]: row[1] for row in rows if len(row) == 7}
    for kind in ("elastic", "average", "AGN, Adam"):
        assert held[f"{kind}, replicated"] == "0.02/0.02"
        assert held[f"{kind}, root"] == "0.00/0.02"
        assert held[f"{kind}, sharded"] == "0.01/0.01"


@pytest.mark.parametrize("transport", ["window", "service", "none"])
def test_slow_worker(transport: str) -> None:
    options = ["--transport", transport, "--seconds", "0.1", "--turns", "1", "--width", "16"]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.slow_worker", *options], 90, "torch")
    ratio = next(line for line in output.splitlines() if line.startswith("ratio"))
    assert float(ratio.split()[-1]) > 0
