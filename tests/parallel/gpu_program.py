"""What each rank checks on a GPU: every path against the CPU's result, local steps without synchronization, speed.

    bash run_scripts/gpu_check.sh

With ``--device cpu``, paths are compared with themselves, and the rest is left out. The exit code is 1 where a path
differs, a local step waits for the GPU, or a measurement fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from tests.parallel import gpu_speed
from tests.parallel.gpu_differences import EXACT, LOSSY, mostly, relative
from tests.parallel.gpu_findings import Finding, Findings
from tests.parallel.gpu_habits import COARSE, CPU, HABITS, PERIOD, STEPS, Habit, Rows
from tests.parallel.torch_job import hvd

SHAPES = ((700, 300), (300,), ())
LARGE = ((2300, 2000), (300,))
"""More than one bucket holds."""

ALGORITHMS: dict[str, Callable[[], hvdp.Algorithm]] = {
    "elastic": lambda: hvdp.EASGD(rho=0.2),
    "average": hvdp.Averaging,
    "AGN": hvdp.AGN,
    "DiLoCo": hvdp.DiLoCo,
    "SlowMo": hvdp.SlowMo,
    "BMUF": lambda: hvdp.BMUF(0.5),
}
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "2 buckets": {"shapes": LARGE},
    "overlap": {"overlap": 1},
    "overlap, int8": {"overlap": "period", "compression": hvdp.Compression.int8},
    "2 fragments": {"fragments": 2},
    "2 fragments, overlap, int8": {"fragments": 2, "overlap": 1, "compression": hvdp.Compression.int8},
    "int8": {"compression": hvdp.Compression.int8},
    "topk": {"compression": hvdp.Compression.topk(0.01)},
    "int4": {"compression": hvdp.Compression.int4},
    "e3m0": {"compression": hvdp.Compression.e3m0},
    "int2": {"compression": hvdp.Compression.int2},
    "topk in chunks": {"compression": hvdp.Compression.topk(chunk=4096, keep=64)},
    "2 fragments, overlap, topk in chunks": {
        "fragments": 2,
        "overlap": 1,
        "compression": hvdp.Compression.topk(chunk=4096, keep=64),
    },
    "fp16": {"compression": hvdp.Compression.fp16},
    "bf16": {"compression": hvdp.Compression.bf16},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "center in host memory": {"center_device": "cpu"},
    "center in host memory, overlap": {"center_device": "cpu", "overlap": 1},
}

ALONE = {"process_set": LocalCommunicator()}

WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits."""


def made(
    device: torch.device,
    algorithm: Callable[[], hvdp.Algorithm],
    period: int,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **options: Any,
) -> tuple[Any, ...]:
    """Return parameters and an optimizer."""
    generator = torch.Generator().manual_seed(hvd.rank())
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [torch.nn.Parameter(start.to(device)) for start in starts]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    local = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    return parameters, hvdp.PeriodicOptimizer(local, named, algorithm(), period, **options)


def step(parameters: list[torch.nn.Parameter], optimizer: Any, number: int) -> None:
    """Step towards what differs by rank and step."""
    for i, parameter in enumerate(parameters):
        parameter.grad = parameter.detach() - (hvd.rank() + 0.1 * number + i)
    optimizer.step()


def trained(device: torch.device, algorithm: Callable[[], hvdp.Algorithm], options: dict[str, Any]) -> torch.Tensor:
    """Return replica and center after some exchanges, on the host."""
    parameters, optimizer = made(device, algorithm, PERIOD, **options)
    for number in range(STEPS):
        step(parameters, optimizer, number)
    seen = torch.cat([parameter.detach().flatten() for parameter in parameters])
    with optimizer.center():
        seen = torch.cat([seen, *(parameter.detach().flatten() for parameter in parameters)])
    optimizer.synchronizer.finalize()
    return seen.cpu().double()


def path(algorithm: Callable[[], hvdp.Algorithm], options: dict[str, Any], device: torch.device) -> Rows:
    """Yield how much the result differs from the CPU's."""
    found, expected = (trained(where, algorithm, options) for where in (device, CPU))
    if options.get("compression") in COARSE:
        yield "", mostly(found, expected), EXACT
    else:
        yield "", relative(found, expected), LOSSY if "compression" in options else EXACT


def checks(names: Iterable[str]) -> dict[str, Habit]:
    """Return all that is compared: the paths of some algorithms, and habits."""
    paths: dict[str, Habit] = {
        ", ".join(filter(None, (name, way))): partial(path, ALGORITHMS[name], options)
        for name in names
        for way, options in WAYS.items()
    }
    for way, options in WAYS.items():
        paths[", ".join(filter(None, ("a process alone", way)))] = partial(path, hvdp.EASGD, options | ALONE)
    return paths | HABITS


def compared(device: torch.device, names: Iterable[str]) -> Iterator[Finding]:
    """Yield all comparisons; an error on a rank is a difference without bound, and the next comparison follows."""
    section = f"results on {device} and on the CPU"
    for name, check in checks(names).items():
        try:
            rows = list(check(device))
        except Exception:
            traceback.print_exc()
            rows = [("", math.inf, 0.0)]
        for of_ranks in zip(*hvd.allgather_object(rows, name="rows"), strict=False):
            what, difference, allowed = max(of_ranks, key=lambda row: row[1])
            yield Finding(section, ", ".join(filter(None, (name, what))), difference, "", allowed)


def waiting(device: torch.device, names: Iterable[str]) -> Iterator[Finding]:
    """Yield how often local steps wait for the GPU."""
    for name in names:
        of_ranks = hvd.allgather_object(waits(device, ALGORITHMS[name]), name="waits")
        most = max(of_ranks, key=Counter.total)
        yield Finding("local steps that wait for the GPU", name, most.total(), "calls", 0, ", ".join(most))


def measured(measure: gpu_speed.Measure, device: torch.device) -> Iterator[Finding]:
    """Yield the findings of a measurement; an error is one of them."""
    try:
        yield from measure(device)
    except Exception as error:
        traceback.print_exc()
        yield Finding("measurements that failed", measure.__name__, None, allowed=0, note=repr(error))


def waits(device: torch.device, algorithm: Callable[[], hvdp.Algorithm]) -> Counter[str]:
    """Return the calls in which local steps that exchange nothing wait for the GPU, and those of SGD do not."""
    parameters, optimizer = made(device, algorithm, 1_000_000)
    found = []
    for each in (optimizer, torch.optim.SGD(parameters, lr=0.1)):  # The profiler itself waits once.
        step(parameters, each, 0)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for number in range(5):
                step(parameters, each, number)
        calls = {event.key: event.count for event in seen.key_averages()}
        found.append(Counter({key: calls[key] for key in calls if key.startswith(WAITING) and "Async" not in key}))
    ours, of_sgd = found
    return ours - of_sgd


def main() -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--findings", type=Path, help="append findings to this file")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS), help="default: all")
    arguments = parser.parse_args()
    hvd.init()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here", file=sys.stderr)
        return 2
    if arguments.device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    device = torch.device(arguments.device)
    findings = Findings(arguments.findings, shown=hvd.rank() == 0)
    for finding in compared(device, arguments.algorithms):
        findings.add(finding)
    if device.type == "cuda":
        for finding in waiting(device, arguments.algorithms):
            findings.add(finding)
        for measure in gpu_speed.ALONE if hvd.size() == 1 else gpu_speed.TOGETHER:
            for finding in measured(measure, device):
                findings.add(finding)
    for failure in findings.failures:
        print(f"failed: {failure}")
    hvd.shutdown()
    return int(bool(findings.failures))


if __name__ == "__main__":
    sys.exit(main())
