"""Exchanges as ranges of NVTX, as a tool sees them that NVTX itself loads; with builds of PyTorch for CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this build of PyTorch has no NVTX"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

TOOL = Path(__file__).parents[1] / "nvtx_tool.c"

PROGRAM = """
import sys, torch
import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator

if torch.cuda.is_available():
    torch.cuda.init()
else:
    torch.cuda.is_initialized = lambda: True  # NVTX needs no GPU.
for options in ({}, {"overlap": 1}, {"asynchronous": True}):
    print("NVTX", sys.argv[1:], file=sys.stderr, flush=True)
    x = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvdp.ElasticAverageOptimizer(
        torch.optim.SGD([x], lr=0.1), [("x", x)], 2, 0.25, process_set=LocalCommunicator(), **options
    )
    for _ in range(4):
        x.grad = torch.ones(3)
        optimizer.step()
    optimizer.finalize()
"""

MET = ["0 exchange", "1 meeting"]


@pytest.mark.timeout(120)
def test_ranges_that_a_tool_sees(tmp_path: Path) -> None:
    library = tmp_path / "tool.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, TOOL], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "NVTX_INJECTION64_PATH": str(library)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    ranges = [line[5:].replace("hvd_periodic.", "") for line in done.stderr.splitlines() if line.startswith("NVTX ")]
    synchronous, overlapped, asynchronous = _split(ranges)
    assert synchronous[:4] == MET * 2
    with_data = [name for name in overlapped if name != "0 land"]
    assert with_data[:4] == [*MET, "1 begin", "1 arrive"]
    assert overlapped[overlapped.index("1 arrive") - 1] == "0 land"
    assert asynchronous == ["0 exchange"] * 2


def _split(lines: list[str]) -> list[list[str]]:
    """Return what is between lines that are ``[]``."""
    found: list[list[str]] = []
    for line in lines:
        if line == "[]":
            found.append([])
        else:
            found[-1].append(line)
    return found
