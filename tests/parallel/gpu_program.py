"""What each rank checks on a GPU: every path against the CPU's result, local steps without synchronization, speed.

    bash run_scripts/gpu_check.sh

Without a GPU, the paths of ``--device cpu`` are compared with themselves, and the rest is left out. The exit code is 1
where a path differs or a local step waits for the GPU; bandwidths and memory are printed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from tests.parallel.gpu_habits import CPU, EXACT, HABITS, LOSSY, PERIOD, STEPS, Habit, Rows, relative
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

BANDWIDTH_WANTED, ELEMENTS = 0.8, 100_000_000


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


def compared(device: torch.device, names: Iterable[str]) -> Rows:
    """Yield what was compared, how much it differs on any rank, and how much it may; all of it, where it fails."""
    for name, check in checks(names).items():
        try:
            rows = list(check(device))
        except Exception:
            traceback.print_exc()
            rows = [("", math.inf, 0.0)]
        for of_ranks in zip(*hvd.allgather_object(rows, name="rows"), strict=False):
            what, difference, allowed = max(of_ranks, key=lambda row: row[1])
            yield ", ".join(filter(None, (name, what))), difference, allowed


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


def bandwidths(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield what a local step of an algorithm adds to that of SGD: the part of the bandwidth of a copy it reaches."""
    parameter, copied = large(device)
    plain = milliseconds(torch.optim.SGD([parameter], lr=1e-3).step)
    for name, algorithm, passes in (("AGN", hvdp.AGN(), 3), ("elastic, rho > 0", hvdp.EASGD(rho=0.1), 4)):
        optimizer = wrapped(parameter, algorithm, **ALONE)
        yield name, passes / 2 * copied / (milliseconds(optimizer.step) - plain)
        optimizer.finalize()


def exchanges(device: torch.device) -> Iterator[tuple[str, float, int]]:
    """Yield how long an exchange of the only rank takes, as a multiple of a copy; and its bytes on the GPU."""
    parameter, copied = large(device)
    ways: dict[str, dict[str, Any]] = {"": {}, "int8": WAYS["int8"], "center in host memory": {"center_device": "cpu"}}
    for name in ("average", "elastic", "AGN", "DiLoCo"):
        for way, options in ways.items():
            gc.collect()
            before = torch.cuda.memory_allocated()
            optimizer = wrapped(parameter, ALGORITHMS[name](), **options)
            optimizer.step()
            optimizer.synchronizer.sync()
            held = torch.cuda.memory_allocated() - before
            yield ", ".join(filter(None, (name, way))), milliseconds(optimizer.synchronizer.sync) / copied, held
            optimizer.finalize()
            del optimizer


def large(device: torch.device) -> tuple[torch.nn.Parameter, float]:
    """Return a parameter with a gradient, and how long the GPU takes to copy it."""
    parameter = torch.nn.Parameter(torch.randn(ELEMENTS, device=device))
    parameter.grad = torch.ones_like(parameter)
    copy = torch.empty_like(parameter)
    return parameter, milliseconds(lambda: copy.copy_(parameter.detach()))


def wrapped(parameter: torch.nn.Parameter, algorithm: hvdp.Algorithm, **options: Any) -> Any:
    """Return an optimizer that exchanges if asked only."""
    local = torch.optim.SGD([parameter], lr=1e-3)
    return hvdp.PeriodicOptimizer(local, [("p", parameter)], algorithm, 10**6, **options)


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


def tell_speed(device: torch.device) -> None:
    """Print what local steps and exchanges reach on this GPU."""
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {ELEMENTS:,} parameters")
    for name, part in bandwidths(device):
        reached = "reached" if part >= BANDWIDTH_WANTED else "not reached"
        print(f"local step, {name}: {part:.0%} of the bandwidth of a copy; {BANDWIDTH_WANTED:.0%} {reached}")
    for name, copies, nbytes in exchanges(device):
        print(f"exchange, {name}: the time of {copies:.1f} copies; {nbytes / (4 * ELEMENTS):.1f} times their size held")


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
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    device = torch.device(arguments.device)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {device} and cpu: the largest difference, as a part of the largest value")
    failures = []
    for name, difference, allowed in compared(device, arguments.algorithms):
        if hvd.rank() == 0:
            print(f"{name}: {difference:.1e}, allowed {allowed:.0e}", flush=True)
        if not difference <= allowed:
            failures.append(name)
    if device.type == "cuda":
        for name in arguments.algorithms:
            if found := waits(device, ALGORITHMS[name]):
                failures.append(f"local steps of {name} wait on rank {hvd.rank()}: {', '.join(found)}")
        if hvd.size() == 1:
            tell_speed(device)
    elif hvd.rank() == 0:
        print("left out without a GPU: whether local steps wait, bandwidths and memory")
    for failure in failures:
        print(f"failed: {failure}")
    hvd.shutdown()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
