"""What each rank checks on a GPU: every path against the CPU's result, local steps without synchronization, bandwidth.

    bash run_scripts/gpu_check.sh

Without a GPU, the paths of ``--device cpu`` are compared with themselves, and the rest is left out. The exit code is 1
where a path differs or a local step waits for the GPU; the bandwidth is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from torch.profiler import ProfilerActivity, profile

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from tests.benchmarks.report import show

PERIOD, STEPS = 3, 9
SHAPES = ((700, 300), (300,), ())

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
    "overlap": {"overlap": 1},
    "overlap, int8": {"overlap": "period", "compression": hvdp.Compression.int8},
    "2 fragments": {"fragments": 2},
    "2 fragments, overlap, int8": {"fragments": 2, "overlap": 1, "compression": hvdp.Compression.int8},
    "int8": {"compression": hvdp.Compression.int8},
    "topk": {"compression": hvdp.Compression.topk(0.01)},
    "fp16": {"compression": hvdp.Compression.fp16},
    "bf16": {"compression": hvdp.Compression.bf16},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
}

EXACT, LOSSY = 1e-5, 0.05
"""Relative differences that are rounding, in float32 and where a quantum more or less may travel."""

WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits."""

BANDWIDTH_WANTED = 0.8


def made(device: torch.device, algorithm: Callable[[], hvdp.Algorithm], period: int, **options: Any) -> tuple[Any, ...]:
    """Return parameters and an optimizer."""
    generator = torch.Generator().manual_seed(hvd.rank())
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
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
    seen = [parameter.detach().flatten().cpu() for parameter in parameters]
    with optimizer.center():
        seen += [parameter.detach().flatten().cpu() for parameter in parameters]
    optimizer.synchronizer.finalize()
    return torch.cat(seen).double()


def compared(device: torch.device, names: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Yield each path, how much it differs from the CPU on any rank, and how much it may."""
    for name, algorithm in ((name, ALGORITHMS[name]) for name in names):
        for way, options in WAYS.items():
            expected, found = (trained(where, algorithm, options) for where in (torch.device("cpu"), device))
            difference = (found - expected).abs().max() / expected.abs().max()
            largest = hvd.allreduce(difference, op=hvd.Max, name="difference")
            yield ", ".join(filter(None, (name, way))), float(largest), LOSSY if "compression" in options else EXACT


def waits(device: torch.device, algorithm: Callable[[], hvdp.Algorithm]) -> list[str]:
    """Return the calls in which local steps that exchange nothing wait for the GPU."""
    parameters, optimizer = made(device, algorithm, 1_000_000)
    step(parameters, optimizer, 0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for number in range(5):
            step(parameters, optimizer, number)
    return [event.key for event in seen.key_averages() if event.key.startswith(WAITING) and "Async" not in event.key]


def bandwidths(device: torch.device, elements: int = 100_000_000) -> Iterator[tuple[str, float]]:
    """Yield what a local step of an algorithm adds to that of SGD: the part of the bandwidth of a copy it reaches."""
    parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    copy = torch.empty_like(parameter)
    copied = 2 * parameter.nbytes / milliseconds(lambda: copy.copy_(parameter.detach()))
    plain = milliseconds(torch.optim.SGD([parameter], lr=1e-3).step)
    for name, algorithm, passes in (("AGN", hvdp.AGN(), 3), ("elastic, rho > 0", hvdp.EASGD(rho=0.1), 4)):
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD([parameter], lr=1e-3), [("p", parameter)], algorithm, 10**6, process_set=LocalCommunicator()
        )
        yield name, passes * parameter.nbytes / (milliseconds(optimizer.step) - plain) / copied


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median time that the GPU takes."""
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:])


def main() -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS), help="default: all")
    arguments = parser.parse_args()
    hvd.init()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here", file=sys.stderr)
        return 2
    if arguments.device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    device = torch.device(arguments.device)
    paths = list(compared(device, arguments.algorithms))
    failures = [path for path, difference, allowed in paths if not difference <= allowed]
    rows = [(path, f"{difference:.1e}", f"{allowed:.0e}") for path, difference, allowed in paths]
    if hvd.rank() == 0:
        show(f"{hvd.size()} ranks, {device} and cpu", ("path", "difference", "allowed"), rows)
    if device.type == "cuda":
        for name in arguments.algorithms:
            if found := waits(device, ALGORITHMS[name]):
                failures.append(f"local steps of {name} wait on rank {hvd.rank()}: {', '.join(found)}")
        if hvd.size() == 1:
            for name, part in bandwidths(device):
                reached = "reached" if part >= BANDWIDTH_WANTED else "not reached"
                print(f"{name}: {part:.0%} of the bandwidth of a copy; {BANDWIDTH_WANTED:.0%} {reached}")
    elif hvd.rank() == 0:
        print("left out without a GPU: whether local steps wait, and the bandwidth")
    for failure in failures:
        print(f"failed: {failure}")
    hvd.shutdown()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
