"""A slow oracle of messages that are encoded, element by element; see ``oracle.py`` and ``overlap_oracle.py``."""

from __future__ import annotations

import math
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


def halving(values: list[np.float32], size: int) -> np.float32:
    """Return the sum of ``size`` numbers, whose second half is added to the first until one is left."""
    parts = values + [np.float32(0)] * (size - len(values))
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def int4_block(values: list[np.float32]) -> tuple[np.float32, list[int], list[float]]:
    """Return the scale of a block, its codes, and what they stand for."""
    scale = max(map(abs, values)) / np.float32(7)
    if scale <= SMALLEST:
        return np.float32(0), [8] * len(values), [0.0] * len(values)
    levels = [round(float(x / scale)) for x in values]
    return scale, [level + 8 for level in levels], [single(float(scale) * level) for level in levels]


def nearest(levels: list[float], x: float) -> int:
    """Return the index of the nearest level; of two, the even one."""
    return min(range(len(levels)), key=lambda k: (abs(levels[k] - x), k % 2))


def e3m0_block(values: list[np.float32]) -> tuple[np.float32, list[int], list[float]]:
    largest = max(map(abs, values))
    if largest <= SMALLEST:
        return np.float32(0), [0] * len(values), [0.0] * len(values)
    powers = [0.0, *(2.0 ** (level - 7) for level in range(1, 8))]
    near = [nearest(powers, float(abs(x) / largest)) for x in values]
    codes = [k + 8 * int(x < 0 < k) for k, x in zip(near, values, strict=True)]
    return largest, codes, [float(np.sign(x)) * float(largest) * powers[k] for k, x in zip(near, values, strict=True)]


def int2_block(values: list[np.float32]) -> tuple[np.float32, list[int], list[float]]:
    sizes = [abs(x) / np.float32(BLOCK) if abs(x) > SMALLEST else np.float32(0) for x in values]
    threshold = halving(sizes, BLOCK) / np.float32(len(values)) * np.float32(0.7)
    large = [x > threshold for x in sizes]
    count = np.float32(max(sum(large), 1))
    mean = halving([x if sent else np.float32(0) for x, sent in zip(sizes, large, strict=True)], BLOCK) / count * BLOCK
    codes = [(1 + (x < 0)) * sent for x, sent in zip(values, large, strict=True)]
    return mean, list(map(int, codes)), [float((0, mean, -mean)[code]) for code in codes]


BLOCK = 256
SMALLEST = np.float32(2.0**-118)
"""Scales up to this are 0."""

OF_BLOCK = {"int4": (int4_block, 4), "e3m0": (e3m0_block, 4), "int2": (int2_block, 2)}
"""What encodes a block, and bits of a code."""


def blocks_of(values: list[float]) -> list[list[np.float32]]:
    return [[np.float32(x) for x in values[i : i + BLOCK]] for i in range(0, len(values), BLOCK)]


def in_chunks(values: list[float], chunk: int, keep: int) -> tuple[bytes, list[float]]:
    """Return the bytes of the largest elements of every chunk, and what they stand for."""
    scales, places, signs, decoded = b"", [], [], [0.0] * len(values)
    for start in range(0, len(values), chunk):
        part = [np.float32(x) for x in values[start : start + chunk]]
        count = math.ceil(keep * len(part) / chunk)
        size = 2 ** math.ceil(math.log2(count))
        sizes = [abs(x) / np.float32(size) for x in part]
        sizes = [x if x > 2.0**-126 else np.float32(0) for x in sizes]
        chosen = sorted(sorted(range(len(part)), key=lambda i, of=sizes: -of[i])[:count])  # type: ignore[misc]
        found = [sizes[i] for i in chosen]
        mean = np.float32(0) if min(found) == 0 else halving(found, size) / np.float32(count)
        above = [x > mean for x in found]
        upper, lower = (
            halving([x if a == up else np.float32(0) for x, a in zip(found, above, strict=True)], size)
            for up in (True, False)
        )
        low = lower / np.float32(max(count - sum(above), 1))
        means = low * size, (upper / np.float32(sum(above)) if any(above) else low) * size
        scales += struct.pack("<2f", *means)
        places += chosen
        signs += [2 * int(part[i] < 0) + int(up) for i, up in zip(chosen, above, strict=True)]
        for i, up in zip(chosen, above, strict=True):
            decoded[start + i] = float(means[int(up)]) * (-1 if part[i] < 0 else 1)
    return scales + stream(places, (chunk - 1).bit_length()) + stream(signs, 2), decoded


def chunks(chunk: int, keep: int) -> Quantizer:
    return lambda values: in_chunks(values, chunk, keep)[1]


def stream(codes: list[int], bits: int) -> bytes:
    """Return numbers of a few bits, one after another; the first is in the lowest bits."""
    return sum(code << bits * i for i, code in enumerate(codes)).to_bytes(-(-len(codes) * bits // 8), "little")


def in_blocks(name: str) -> Quantizer:
    return lambda values: [x for block in blocks_of(values) for x in OF_BLOCK[name][0](block)[2]]


def row_of_bytes(name: str, values: list[float]) -> bytes:
    """Return all scales of a row, then its codes, of which the first is in the lowest bits."""
    encode, bits = OF_BLOCK[name]
    found = [encode(block) for block in blocks_of(values)]
    codes = [code for _, of_block, _ in found for code in of_block]
    return b"".join(struct.pack("<f", scale) for scale, _, _ in found) + stream(codes, bits)


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


def expected(
    name: str, n: int, quantize: Quantizer, hops: int, decay: float = 1.0
) -> tuple[list[list[list[float]]], list[float]]:
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
                messages = [
                    [m + decay * e for m, e in zip(*pair, strict=True)] for pair in zip(messages, kept, strict=True)
                ]
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
    "chunks": (chunks(2, 1), 1, 1e-6),
    **{name: (in_blocks(name), 2, 1e-6) for name in OF_BLOCK},
}
"""Quantizer, hops, and tolerance: Horovod sums float16 by itself, in an order of its own."""
