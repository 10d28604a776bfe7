"""Wires of few bits on TensorFlow, eager and compiled, and PyTorch: bytes and elements are those of numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires import ChunkedTopK, Compression
from tests.unit.test_wires import WIRES, kinds

tf = pytest.importorskip("tensorflow")

from hvd_periodic.tensorflow.coding import GraphCoding  # noqa: E402

LOOPS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "compiled": lambda f: tf.function(f)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("length", [1, 255, 700])
def test_bytes_are_those_of_numpy(wire: str, length: int, loop: str) -> None:
    rows = np.stack(list(kinds(length, length).values()))
    expected: Any = WIRES[wire].encode(Coding(), rows)

    @LOOPS[loop]
    def both(x: Any) -> Any:
        payload = WIRES[wire].encode(GraphCoding(), x)
        return payload, WIRES[wire].decode(GraphCoding(), payload, length)

    payload, values = both(tf.constant(rows))
    assert np.array_equal(payload, expected)
    assert values.numpy().tobytes() == WIRES[wire].decode(Coding(), expected, length).tobytes()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("chunk", "keep"), [(8, 2), (100, 77), (4096, 64)])
def test_chunks_are_those_of_numpy(chunk: int, keep: int, loop: str) -> None:
    wire = ChunkedTopK(chunk, keep)
    rows = [row[None] for row in kinds(8300, chunk).values()]

    @LOOPS[loop]
    def both(x: Any) -> Any:
        payload = wire.encode(GraphCoding(), x)
        return payload, wire.decode(GraphCoding(), payload, 8300)

    for row in rows:
        payload, values = both(tf.constant(row))
        expected: Any = wire.encode(Coding(), row)
        assert np.array_equal(payload, expected)
        assert np.array_equal(values, wire.decode(Coding(), expected, 8300))


def test_the_largest_of_a_bucket() -> None:
    """As numpy encodes them, in 8 bits."""
    wire: Any = Compression.topk(0.1)
    row = np.random.default_rng(0).standard_normal((1, 5000)).astype("f4")
    expected: Any = wire.encode(Coding(), row)
    payload = wire.encode(GraphCoding(), tf.constant(row))
    assert np.array_equal(payload, expected)
    assert np.array_equal(wire.decode(GraphCoding(), payload, 5000), wire.decode(Coding(), expected, 5000))
