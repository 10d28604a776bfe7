"""The numpy core on real ranks of mpi4py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.tiers import thorough

pytest.importorskip("mpi4py")

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_agreement_with_the_oracle(n: int, tmp_path: Path) -> None:
    ranks = run_scenarios("mpirun", n, "mpi_program", tmp_path, timeout_seconds=60)
    momentum = oracle.MOMENTUM
    for name, (replicas, center) in {
        "easgd": oracle.easgd(n, oracle.periodic(2), lambda _: 0.25, momentum),
        "average": oracle.averaging(n, oracle.periodic(2), momentum),
        "agn": oracle.agn(n, oracle.periodic(4), "sum", momentum),
    }.items():
        for rank, report in enumerate(ranks):
            x, c = report[name]
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12)
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12)
            assert c == ranks[0][name][1], "to the bit"


@pytest.mark.parametrize("transport", ["service", thorough("window")])
def test_asynchronous_exchange_beside_horovod(transport: str, tmp_path: Path) -> None:
    """No process is inside of MPI when the first to leave Horovod ends it: the job's exit code tells.

    Exchanges conserve the sum of the replicas and the center, which gradients move by 8 steps of 1 and 8 of 3.
    """
    pytest.importorskip("horovod.torch")
    ranks = run_scenarios("mpirun", 2, "mpi_program", tmp_path, 60, transport, framework="torch")
    (one, center), (other, same) = ranks
    assert center == same
    assert [sum(found) for found in zip(one, other, center, strict=True)] == pytest.approx([32.0] * 3)
