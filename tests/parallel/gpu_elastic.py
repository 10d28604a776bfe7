"""An elastic job over torch.distributed whose replicas are on the GPU: one worker is killed, another joins.

    python -m tests.parallel.gpu_elastic [--device cpu] --findings FILE

Part of ``gpu_check``. Each job runs twice, on the GPU and on the CPU, and has to end with the same replica and center:
three workers take three exchanges, the last one is killed, two go on, and a third one joins them at an exchange.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from tests.parallel.gpu_differences import CLOSE, LOSSY, relative
from tests.parallel.gpu_findings import Finding, Findings

PERIOD, KILLED_AT, WAIT_AT, STEPS = 3, 9, 14, 24
WORKERS = 3
LIMIT = 150.0
"""Seconds within which all jobs end."""

WAYS: dict[str, dict[str, Any]] = {
    "DiLoCo, overlap": {"algorithm": hvdp.DiLoCo(), "overlap": 1},
    "elastic, int8": {"algorithm": hvdp.EASGD(), "compression": hvdp.Compression.int8},
    "averaging, sharded": {"algorithm": hvdp.Averaging(), "center": "sharded"},
}


def work(device: torch.device, way: str, folder: Path, number: int) -> None:
    """Be a worker."""
    generator = torch.Generator().manual_seed(1)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((300, 200), (200,))
    ]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    local = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    options = dict(WAYS[way])
    optimizer = hvdp.PeriodicOptimizer(local, named, options.pop("algorithm"), PERIOD, **options)
    state = hvdp.elastic.State(optimizer=optimizer, commit="exchange", step=0)

    @hvdp.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if state.step == KILLED_AT and number == WORKERS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while state.step == WAIT_AT and dist.get_world_size() < WORKERS and not state.job._state.view.waiting:
                time.sleep(0.02)
            for i, parameter in enumerate(parameters):
                parameter.grad = parameter.detach() - (number % WORKERS + 0.1 * state.step + i)
            state.step += 1
            optimizer.step()
        optimizer.finalize()

    train(state)
    replica = [parameter.detach().clone() for parameter in parameters]
    with optimizer.center():
        seen = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in (*replica, *parameters)])
    torch.save({"size": dist.get_world_size(), "seen": seen}, folder / f"end.{number}")


def started(device: str, way: str, rendezvous: str, folder: Path, number: int) -> subprocess.Popen[bytes]:
    """Start a worker."""
    settings = {
        "HVD_PERIODIC_RENDEZVOUS": rendezvous,
        "HVD_PERIODIC_JOB": f"{device} {way}",
        "HVD_PERIODIC_RANKS": f"{WORKERS - 1}:{WORKERS}",
        "HVD_PERIODIC_LOST_SECONDS": "5",
    }
    command = [sys.executable, "-m", __spec__.name, "--worker", str(number), "--way", way, "--folder", str(folder)]
    with (folder / f"output.{number}").open("wb") as output:
        return subprocess.Popen([*command, "--device", device], env=os.environ | settings, stdout=output, stderr=output)


def results(jobs: dict[tuple[str, str], Path], rendezvous: str) -> dict[tuple[str, str], dict[int, Any]]:
    """Run the jobs, all at a time; return how each of their workers ended, by number."""
    workers = [{n: started(*job, rendezvous, folder, n) for n in range(WORKERS)} for job, folder in jobs.items()]
    end = time.monotonic() + LIMIT
    try:
        for (job, folder), processes in zip(jobs.items(), workers, strict=True):
            processes[WORKERS - 1].wait(end - time.monotonic())
            processes[WORKERS] = started(*job, rendezvous, folder, WORKERS)
        for processes in workers:
            for process in processes.values():
                process.wait(end - time.monotonic())
    except subprocess.TimeoutExpired:
        pass
    finally:
        for processes in workers:
            for process in processes.values():
                process.kill()
                process.wait()
    return {
        job: {n: torch.load(file) for n in range(WORKERS + 1) if (file := folder / f"end.{n}").exists()}
        for job, folder in jobs.items()
    }


def main() -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--findings", type=Path, help="append findings to this file")
    for name, kind in (("worker", int), ("way", str), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(torch.device(arguments.device), arguments.way, arguments.folder, arguments.worker)
        return 0
    devices = dict.fromkeys((arguments.device, "cpu"))
    command = [sys.executable, "-m", "hvd_periodic", "rendezvous", "--port", "0"]
    findings = Findings(arguments.findings, shown=True)
    with tempfile.TemporaryDirectory() as made:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            rendezvous = f"127.0.0.1:{server.stdout.readline().strip().rpartition(':')[2]}"
            jobs = {(device, way): Path(made, f"{device} {way}") for device in devices for way in WAYS}
            for folder in jobs.values():
                folder.mkdir()
            ended = results(jobs, rendezvous)
        finally:
            server.kill()
            server.wait()
        for (device, way), found in ended.items():
            complete = sorted(found) == [0, 1, WORKERS] and {end["size"] for end in found.values()} == {WORKERS}
            difference = float("inf")
            if complete and sorted(ended["cpu", way]) == sorted(found):
                pairs = [(found[n]["seen"], ended["cpu", way][n]["seen"]) for n in found]
                difference = max(relative(*pair) for pair in pairs)
            else:
                for output in sorted(jobs[device, way].glob("output.*")):
                    print(f"{output.name}:\n{output.read_text()}")
            allowed = LOSSY if "compression" in WAYS[way] else CLOSE
            findings.add(Finding(f"elastic jobs on {device}, and on the CPU", way, difference, "", allowed))
    return int(bool(findings.failures))


if __name__ == "__main__":
    sys.exit(main())
