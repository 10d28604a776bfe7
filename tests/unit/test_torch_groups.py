"""A collective that does not end when its connections are closed: the process goes on, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import PATIENCE

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import numpy as np, torch, torch.distributed as dist
from hvd_periodic.comm import torch_distributed as ours

port, rank = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port)
ours.open_world(dist.PrefixStore("both", store), rank, 2, True)
communicator = ours.TorchDistributedCommunicator()
assert communicator.elastic
communicator.gather(np.array([rank]), "first")
print("ready", flush=True)
sys.stdin.readline()  # The other one never comes to the next collective: it is stopped.
communicator.allreduce(torch.ones(2**20), "sum")
ours._elastic.connections.close = lambda: None  # As if the collective did not notice.
ours._ENDING = 0.1
ours.close_world()
assert not dist.is_initialized()
ours.open_world(dist.PrefixStore("one", store), 0, 1, True)
assert ours.TorchDistributedCommunicator().allreduce(torch.ones(1), "sum")().item() == 1
ours.close_world()
print("done", flush=True)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Return the port of a store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def test_a_collective_that_does_not_end(port: int) -> None:
    """Destroying its group would wait for it, now and at the end of the process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PROGRAM, str(port)]
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        assert [process.stdout.readline() for process in ranks] == ["ready\n"] * 2
        os.kill(ranks[1].pid, signal.SIGSTOP)
        output, errors = ranks[0].communicate("go\n", timeout=60 * PATIENCE)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert (ranks[0].returncode, output) == (0, "done\n"), errors
    assert "has not ended 0.1 s after its connections were closed" in errors
