"""Checks PyTorch's paths on an NVIDIA GPU, on one rank and on two, and stores all findings in one file.

    bash run_scripts/gpu_check.sh

Needs a Python with torch (built with CUDA) and numpy; no set-up, no compiler, no network. Two ranks share the GPU if
there is only one. Ranks communicate over torch.distributed (NCCL; Gloo if they share a GPU, which NCCL refuses); two
ranks also over Horovod and MPI where these are installed, or one over a Horovod with NCCL if there is one GPU. Three
workers of an elastic job lose one, and get another. A job that fails or hangs does not end the others. The whole check
ends within eight minutes. The exit code is 1 if a result differs, a local step waits for the GPU, or a job does not
end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.parallel import gpu_findings

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.parallel.gpu_program"
SECONDS = 470.0
"""Within which all jobs end."""

_MPIRUN = ["bash", str(ROOT / "run_scripts" / "local_mpirun.sh")]
LAUNCHERS = {
    "torch": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "horovod": _MPIRUN,
    "mpi": _MPIRUN,
}
"""Commands that the number of ranks and the program follow."""

ELASTIC = "elastic"
"""The job that starts its workers itself, and whose number of ranks changes."""


def backends() -> list[str]:
    """Return the backends that are installed."""
    found = ["torch"]
    if find_spec("horovod") and _imports("horovod.torch"):
        found.append("horovod")
    if shutil.which("mpirun") and find_spec("mpi4py") and _imports("mpi4py.MPI"):
        found.append("mpi")
    return found


def _imports(module: str) -> bool:
    return _succeeds(f"import {module}")


def _succeeds(program: str) -> bool:
    return not subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode


def jobs_of(tried: Sequence[str], numbers: Sequence[int], gpus: int | None) -> list[tuple[str, int]]:
    """Return the jobs, by backend and number of ranks.

    One rank is tried over the first backend, and over others that cannot have more: where Horovod's operations on GPUs
    are those of NCCL, which refuses ranks that share a GPU.

    Args:
        tried: the backends.
        numbers: numbers of ranks.
        gpus: number of GPUs; None if the check runs on the CPU.
    """
    most = max(numbers)
    if gpus is not None and "horovod" in tried and _succeeds("import horovod.torch as h; assert h.nccl_built()"):
        most = gpus
    limits = {backend: most if backend == "horovod" else max(numbers) for backend in tried}
    return [
        (backend, ranks)
        for backend in tried
        for ranks in numbers
        if ranks <= limits[backend] and (ranks > 1 or backend == tried[0] or limits[backend] == 1)
    ]


def run(backend: str, ranks: int, arguments: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run the program on some ranks; return what is known of the job, its findings included.

    Args:
        backend: key of :data:`LAUNCHERS`, or :data:`ELASTIC`.
        ranks: number of processes.
        arguments: of the program.
        folder: for the log of the job, and the findings.
        seconds: after which the job is killed.
    """
    name = f"{backend}-{ranks}"
    found, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    found.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if backend == ELASTIC:
        command = [sys.executable, "-m", "tests.parallel.gpu_elastic", *arguments[:2]]
    else:
        environment["HVD_PERIODIC_COMM"] = backend
        program = ["-m", PROGRAM] if backend == "torch" else [str(ROOT / "tests/parallel/gpu_program.py")]
        command = [*LAUNCHERS[backend], str(ranks), *program, *arguments]
    command += ["--findings", str(found)]
    started = time.monotonic()
    with log.open("wb") as output:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = job.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"killed after {seconds:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    findings = gpu_findings.read(found)
    print(f"\n{gpu_findings.table(f'{backend}, {ranks} rank' + 's' * (ranks > 1), findings)}")
    if code != 0:
        print(f"  exit: {code}; the log is {log}")
    return {
        "backend": backend,
        "ranks": ranks,
        "exit": code,
        "seconds": time.monotonic() - started,
        "findings": [asdict(finding) for finding in findings],
    }


def machine() -> dict[str, Any]:
    """Return what the findings depend on."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processors": os.cpu_count(),
    }


def main() -> int:
    """Run all jobs; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comm", choices=[*LAUNCHERS, ELASTIC], help="default: each that is installed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the check itself")
    parser.add_argument("--algorithms", nargs="+", help="default: all")
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    found = machine()
    if arguments.device == "cuda" and not found["gpus"]:
        print("error: torch sees no GPU here", file=sys.stderr)
        return 2
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    passed = ["--device", arguments.device]
    passed += ["--algorithms", *arguments.algorithms] if arguments.algorithms else []
    tried = [arguments.comm] if arguments.comm else [*backends(), ELASTIC]
    gpus = len(found["gpus"]) if arguments.device == "cuda" else None
    left = jobs_of([backend for backend in tried if backend != ELASTIC], arguments.ranks, gpus)
    left += [(ELASTIC, 3)] if ELASTIC in tried else []
    jobs, end = [], time.monotonic() + SECONDS
    while left:
        share = (end - time.monotonic()) / len(left)
        backend, ranks = left.pop(0)
        jobs.append(run(backend, ranks, passed, folder, share * (1.5 if left else 1.0)))
    results = folder / "gpu_check.json"
    results.write_text(json.dumps({"machine": found, "jobs": jobs}, indent=1))
    failed = [f"{job['backend']}, ranks: {job['ranks']}, exit: {job['exit']}" for job in jobs if job["exit"] != 0]
    print(f"\nall findings: {results}")
    for job in failed:
        print(f"failed: {job}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
