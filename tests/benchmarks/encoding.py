"""What wires take to encode and to decode, on one core, beside a copy of the same memory in the same run.

    python -m tests.benchmarks.encoding

Every bucket of the parameters is a message, as in an exchange. Times are processor time of one thread, user and
system, which other programs disturb less than they disturb time that passes: for each bucket the least of the
repetitions, summed over the buckets. On a quiet machine both times are equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd_periodic import Compression
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.encoded import Encoded
from tests.benchmarks import report
from tests.helpers import Array

BUCKET = 4 * 2**20
"""Elements: 16 MiB."""

WIRES: dict[str, Any] = {
    "fp16": Compression.fp16,
    "int8": Compression.int8,
    "int4": Compression.int4,
    "e3m0": Compression.e3m0,
    "int2": Compression.int2,
    "topk(0.01)": Compression.topk(0.01),
    "topk(chunk=4096, keep=64)": Compression.topk(chunk=4096, keep=64),
}


@dataclass(frozen=True)
class Result:
    """A wire that was measured.

    Attributes:
        wire: its name.
        library: whose arrays it encodes.
        encode: milliseconds.
        decode: milliseconds.
        copy: milliseconds to copy the same elements.
    """

    wire: str
    library: str
    encode: float
    decode: float
    copy: float


def least(work: Callable[[int], Any], count: int, repetitions: int) -> tuple[float, list[Any]]:
    """Return the sum over ``count`` buckets of the least milliseconds that work on each takes, and what it returns."""
    seconds, found = [float("inf")] * count, [None] * count
    for _ in range(repetitions):
        for i in range(count):
            started = time.process_time()
            found[i] = work(i)
            seconds[i] = min(seconds[i], time.process_time() - started)
    return 1e3 * sum(seconds), found


def codings() -> dict[str, tuple[Coding[Any], Callable[[Array], Any]]]:
    """Return what encodes, and what makes its arrays of numpy's, by the name of the library."""
    import torch

    from hvd_periodic.torch.coding import TensorCoding

    torch.set_num_threads(1)
    return {"PyTorch": (TensorCoding(), torch.from_numpy), "numpy": (Coding(), np.asarray)}


def measured(library: str, name: str, wire: Encoded, buckets: Sequence[Array], repetitions: int) -> Result:
    """Return the result of a wire."""
    coding, made = codings()[library]
    rows = [made(bucket.reshape(1, -1)) for bucket in buckets]
    targets = [np.zeros_like(bucket) for bucket in buckets]
    count = len(buckets)
    encode, payloads = least(lambda i: wire.encode(coding, rows[i]), count, repetitions)
    decode, _ = least(lambda i: wire.decode(coding, payloads[i], buckets[i].size) is None, count, repetitions)
    copy, _ = least(lambda i: np.copyto(targets[i], buckets[i]), count, repetitions)
    return Result(name, library, encode, decode, copy)


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--elements", type=int, default=25_600_000, help="default: 25,600,000")
    parser.add_argument("--repetitions", type=int, default=9, help="default: 9")
    arguments = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(arguments.elements, dtype=np.float32)
    buckets = [values[i : i + BUCKET] for i in range(0, values.size, BUCKET)]
    results = [
        measured(library, name, wire, buckets, arguments.repetitions)
        for library in codings()
        for name, wire in WIRES.items()
    ]
    report.write(arguments.json, [asdict(result) for result in results])
    rows = []
    for r in results:
        both = r.encode + r.decode
        cells = [f"{ms:.1f}" for ms in (r.encode, r.decode, both, r.copy, both / r.copy)]
        rows.append([f"{r.wire}, {r.library}", *cells])
    title = f"{arguments.elements} float32 in buckets of {BUCKET}, processor ms"
    report.show(title, ["wire", "encode", "decode", "both", "a copy", "copies"], rows)


if __name__ == "__main__":
    main()
