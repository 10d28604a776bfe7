"""A slow oracle of messages that are encoded, element by element; see ``oracle.py`` and ``overlap_oracle.py``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import oracle
from tests.overlap_oracle import PERIOD, move

RATE = 0.25
"""α of elastic averaging."""

Quantizer = Callable[[list[float]], list[float]]


def single(x: float) -> float:
    """Return ``x`` in float32."""
    return float(np.float32(x))


def float16(values: list[float]) -> list[float]:
    return [struct.unpack("e", struct.pack("e", x))[0] for x in values]


def bfloat16(values: list[float]) -> list[float]:
    """Round to nearest: of the neighbours with 16 bits the nearer one, or the even one."""
    found = []
    for x in values:
        (bits,) = struct.unpack(">I", struct.pack(">f", x))
        low = bits & 0xFFFF0000
        neighbours = [struct.unpack(">f", struct.pack(">I", low + step))[0] for step in (0, 0x10000)]
        distances = [abs(x - neighbour) for neighbour in neighbours]
        even = (low >> 16) % 2
        found.append(neighbours[0 if distances[0] < distances[1] else 1 if distances[1] < distances[0] else even])
    return found


def int8(values: list[float]) -> list[float]:
    scale = np.float32(max(map(abs, values), default=0.0)) / np.float32(127)
    if scale == 0:
        return [0.0] * len(values)
    return [single(float(scale) * round(float(np.float32(x) / scale))) for x in values]


def top(count: int) -> Quantizer:
    def largest(values: list[float]) -> list[float]:
        chosen = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:count]
        kept = dict(zip(sorted(chosen), int8([values[i] for i in sorted(chosen)]), strict=True))
        return [kept.get(i, 0.0) for i in range(len(values))]

    return largest


class SlowWire:
    """What n workers decode of each other's messages, in one hop or two."""

    def __init__(self, quantize: Quantizer, n: int, size: int, hops: int) -> None:
        self.quantize, self.n, self.hops = quantize, n, hops
        self.length = -(-size // n) if hops == 2 else size
        self.unsent = [0.0] * size

    def rows(self, values: list[float]) -> list[list[float]]:
        return [values[i : i + self.length] for i in range(0, len(values), self.length)]

    def send(self, messages: list[list[float]]) -> tuple[list[list[float]], list[float]]:
        """Return what is decoded of every message, and of their sum."""
        decoded = [
            [x for row in self.rows([single(m) for m in message]) for x in self.quantize(row)] for message in messages
        ]
        total = [0.0] * len(messages[0])
        for message in decoded:
            total = [single(t + x) for t, x in zip(total, message, strict=True)]
        if self.hops == 1:
            return decoded, total
        wanted = [single(t + single(u)) for t, u in zip(total, self.unsent, strict=True)]
        received = [x for row in self.rows(wanted) for x in self.quantize(row)]
        self.unsent = [w - r for w, r in zip(wanted, received, strict=True)]
        return decoded, received


def expected(name: str, n: int, quantize: Quantizer, hops: int) -> tuple[list[list[list[float]]], list[float]]:
    """Return x of every worker after every step, and the center at the end; without overlap."""
    size = len(oracle.START)
    workers, wire = oracle.Workers(n, oracle.MOMENTUM), SlowWire(quantize, n, size, hops)
    center, handed_out = list(oracle.START), list(oracle.START)
    sums, kept = ([[0.0] * size for _ in range(n)] for _ in range(2))
    states: list[dict[str, Any]] = [{} for _ in range(size)]
    seen: list[list[list[float]]] = []
    for step in range(1, oracle.STEPS + 1):
        for worker in range(n):
            gradient = oracle.gradient(worker, workers.x[worker])
            sums[worker] = [a + g for a, g in zip(sums[worker], gradient, strict=True)]
            workers.descend(worker, gradient)
        if step % PERIOD == 0:
            if name == "agn":
                messages = [[a / PERIOD for a in of_worker] for of_worker in sums]
            else:
                messages = [[x - h for x, h in zip(of_worker, handed_out, strict=True)] for of_worker in workers.x]
            if name != "easgd":
                messages = [[m + e for m, e in zip(*pair, strict=True)] for pair in zip(messages, kept, strict=True)]
            decoded, total = wire.send(messages)
            if name == "easgd":
                for worker, sent in enumerate(decoded):
                    workers.x[worker] = [x - RATE * s for x, s in zip(workers.x[worker], sent, strict=True)]
                center = handed_out = [c + RATE * t for c, t in zip(center, total, strict=True)]
            else:
                kept = [[m - s for m, s in zip(*pair, strict=True)] for pair in zip(messages, decoded, strict=True)]
                moved = [move(name, states[k], center[k], total[k], n) for k in range(size)]
                center, handed_out = [c for c, _ in moved], [h for _, h in moved]
                workers.x = [list(handed_out) for _ in range(n)]
            sums = [[0.0] * size for _ in range(n)]
        seen.append([list(x) for x in workers.x])
    return seen, center


IN_JOBS: dict[str, tuple[Quantizer, int, float]] = {
    "fp16": (float16, 1, 2e-3),
    "bf16": (bfloat16, 2, 1e-6),
    "int8": (int8, 2, 1e-6),
    "topk": (top(2), 1, 1e-6),
}
"""Quantizer, hops, and tolerance: Horovod sums float16 by itself, in an order of its own."""
