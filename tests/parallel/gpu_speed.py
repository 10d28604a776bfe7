"""How fast the GPU check's exchanges, updates, wires and steps are on this GPU; part of ``gpu_program``.

Times on the GPU are medians of ten repetitions after two, by the GPU's own events.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from hvd_periodic.torch.coding import TensorCoding
from hvd_periodic.wires.encoded import Encoded
from tests.parallel.gpu_findings import Finding
from tests.parallel.torch_job import hvd

Measure = Callable[[torch.device], Iterator[Finding]]

ELEMENTS, OF_WIRES = 100_000_000, 25_600_000
SHARED = 10_000_000
"""Elements of an exchange between ranks that share a GPU, whose messages pass through host memory."""

EXCHANGES = {"average": hvdp.Averaging, "elastic": hvdp.EASGD, "AGN": hvdp.AGN, "DiLoCo": hvdp.DiLoCo}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "int8": {"compression": hvdp.Compression.int8},
    "center in host memory": {"center_device": "cpu"},
}
WIRES = {
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "int4": hvdp.Compression.int4,
    "e3m0": hvdp.Compression.e3m0,
    "int2": hvdp.Compression.int2,
    "topk, 64 of 4096": hvdp.Compression.topk(chunk=4096, keep=64),
    "topk, 1 %": hvdp.Compression.topk(0.01),
}
NEVER = 10**6
"""Steps until the first exchange."""


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


def large(device: torch.device, elements: int) -> tuple[nn.Parameter, float]:
    """Return a parameter with a gradient, and the milliseconds of a copy of it."""
    parameter = nn.Parameter(torch.randn(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    copy = torch.empty_like(parameter)
    return parameter, milliseconds(lambda: copy.copy_(parameter.detach()))


def wrapped(parameter: nn.Parameter, algorithm: hvdp.Algorithm, **options: Any) -> Any:
    """Return an optimizer that exchanges only when asked to."""
    local = torch.optim.SGD([parameter], lr=1e-3)
    return hvdp.PeriodicOptimizer(local, [("p", parameter)], algorithm, NEVER, **options)


def updates(device: torch.device) -> Iterator[Finding]:
    """Yield the bandwidth that an algorithm's part of a local step reaches, relative to that of a copy."""
    section = f"local updates of {ELEMENTS:,} parameters: bandwidth relative to a copy's"
    parameter, copied = large(device, ELEMENTS)
    plain = milliseconds(torch.optim.SGD([parameter], lr=1e-3).step)
    for name, algorithm, passes in (("AGN", hvdp.AGN(), 3), ("elastic, rho > 0", hvdp.EASGD(rho=0.1), 4)):
        optimizer = wrapped(parameter, algorithm, process_set=LocalCommunicator())
        more = milliseconds(optimizer.step) - plain
        yield Finding(section, name, passes / 2 * copied / more, note=f"SGD {plain:.2f} ms, {more:.2f} ms more")
        optimizer.finalize()


def exchanges(device: torch.device) -> Iterator[Finding]:
    """Yield the time of exchanges, also relative to a flat allreduce, and the memory that they hold on the GPU."""
    elements = ELEMENTS if hvd.size() == 1 else SHARED
    section = f"exchanges of {elements:,} parameters"
    parameter, copied = large(device, elements)
    yield Finding(section, "a copy", copied, "ms")
    allreduce = dist.all_reduce if dist.is_initialized() else hvd.allreduce_
    allreduced = milliseconds(partial(allreduce, torch.randn(elements, device=device)))
    yield Finding(section, "a flat allreduce", allreduced, "ms")
    for name, algorithm in EXCHANGES.items():
        for way, options in OPTIONS.items():
            gc.collect()
            before = torch.cuda.memory_allocated()
            optimizer = wrapped(parameter, algorithm(), **options)
            optimizer.step()
            optimizer.synchronizer.sync()
            held = (torch.cuda.memory_allocated() - before) / (4 * elements)
            taken = milliseconds(optimizer.synchronizer.sync)
            times = f"{taken / allreduced:.1f} allreduces, {taken / copied:.0f} copies"
            note = f"{times}; holds {held:.1f} times the parameters"
            yield Finding(section, ", ".join(filter(None, (name, way))), taken, "ms", note=note)
            optimizer.finalize()
            del optimizer


def wires(device: torch.device) -> Iterator[Finding]:
    """Yield the time to encode and to decode a message."""
    section = f"wires, {OF_WIRES:,} float32"
    coding, rows = TensorCoding(), torch.randn(1, OF_WIRES, device=device)
    copy = torch.empty_like(rows)
    yield Finding(section, "a copy", milliseconds(lambda: copy.copy_(rows)), "ms")
    for name, wire in WIRES.items():
        assert isinstance(wire, Encoded)
        payload = wire.encode(coding, rows)
        note = f"{payload.numel() / OF_WIRES:.3f} bytes an element"
        encoded = milliseconds(lambda wire=wire: wire.encode(coding, rows))  # type: ignore[misc]
        yield Finding(section, f"{name}, encode", encoded, "ms", note=note)
        decoded = milliseconds(lambda wire=wire, payload=payload: wire.decode(coding, payload, OF_WIRES))  # type: ignore[misc]
        yield Finding(section, f"{name}, decode", decoded, "ms")


class Training:
    """Training of a network of dense layers, of whose period the seconds are measured.

    Args:
        device: its device.
        width: of each layer.
        batch: examples in a step.
    """

    LAYERS, PERIOD = 8, 10

    def __init__(self, device: torch.device, width: int, batch: int) -> None:
        torch.manual_seed(hvd.rank())
        layers = [layer for _ in range(self.LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.inputs = torch.randn(batch, width, device=device)

    def optimizer(self, period: int, **options: Any) -> Any:
        """Return a new optimizer of the network."""
        local = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        return hvdp.PeriodicOptimizer(local, self.model, hvdp.Averaging(), period, **options)

    def step(self, optimizer: Any) -> None:
        """Take a step."""
        optimizer.zero_grad()
        mse_loss(self.model(self.inputs), self.inputs).backward()
        optimizer.step()

    def seconds(self, step: Callable[[Any], None], optimizer: Any, steps: int = PERIOD) -> float:
        """Return the seconds of some steps."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step(optimizer)
        torch.cuda.synchronize()
        return time.perf_counter() - started


def overlap(device: torch.device) -> Iterator[Finding]:
    """Yield the speed of training with exchanges relative to training without, in interleaved repetitions."""
    training = Training(device, 4096 if hvd.size() == 1 else 1024, 2048)
    elements = sum(parameter.numel() for parameter in training.model.parameters())
    section = f"training with an exchange every {Training.PERIOD} steps, {elements:,} parameters: speed without is 1"
    ways: dict[str, dict[str, Any]] = {
        "no exchange": {"period": NEVER},
        "blocking": {"period": Training.PERIOD},
        "overlap": {"period": Training.PERIOD, "overlap": "period"},
        "2 fragments, overlap": {"period": Training.PERIOD, "overlap": "period", "fragments": 2},
        "int8, overlap": {"period": Training.PERIOD, "overlap": "period", "compression": hvdp.Compression.int8},
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way, options in ways.items():  # One optimizer at a time: each of them registers hooks.
        optimizer = training.optimizer(**options)
        training.seconds(training.step, optimizer, 2 * Training.PERIOD)
        seconds[way] = [training.seconds(training.step, optimizer) for _ in range(7)]
        optimizer.finalize()
    plain = median(seconds["no exchange"])
    for way, values in seconds.items():
        yield Finding(
            section, way, plain / median(values), note=f"{1e3 * median(values) / Training.PERIOD:.2f} ms a step"
        )


def compiled_step(device: torch.device) -> Iterator[Finding]:
    """Yield the time of a whole step, eager and compiled, with SGD and with ours around it."""
    section = "a step of 8 dense layers of width 1024, period 10"
    training = Training(device, 1024, 256)
    compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    for name in ("SGD", "averaging"):
        local = torch.optim.SGD(training.model.parameters(), lr=1e-4, momentum=0.9)
        optimizer = local if name == "SGD" else training.optimizer(Training.PERIOD)
        ways = {"eager": training.step, "compiled": torch.compile(training.step)}
        for way, step in ways.items():
            if way == "compiled" and not compiler:
                yield Finding(section, f"{name}, compiled", None, note="no compiler")
                continue
            training.seconds(step, optimizer, 3 * Training.PERIOD)
            values = [training.seconds(step, optimizer) / Training.PERIOD for _ in range(5)]
            yield Finding(section, f"{name}, {way}", 1e3 * median(values), "ms")
        if name != "SGD":
            optimizer.finalize()


ALONE: tuple[Measure, ...] = (updates, exchanges, wires, overlap, compiled_step)
TOGETHER: tuple[Measure, ...] = (exchanges, overlap)
"""What is measured on one rank, and on ranks that may share a GPU."""
