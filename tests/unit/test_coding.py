"""What wires are written in: rows that are computed in parts, and whether numbers are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_periodic.comm import LocalCommunicator
from hvd_periodic.vectors.coding import BLOCK, Coding
from hvd_periodic.wires import ChunkedTopK, Compression, Int8, as_wire
from hvd_periodic.wires.encoded import Encoded
from tests.helpers import Array
from tests.unit.test_compression import LOSSY
from tests.unit.test_wires import WIRES, kinds


def codings() -> list[Any]:
    found: list[Any] = [pytest.param(Coding(), np.asarray, id="numpy")]
    try:
        import torch

        from hvd_periodic.torch.coding import TensorCoding
    except ImportError:
        return found
    return [*found, pytest.param(TensorCoding(), torch.from_numpy, id="torch")]


def quantized(rows: Array) -> tuple[Array, Array]:
    """Return scales and levels as their equation says, of one block of 1024 after another."""
    scales = np.zeros((len(rows), -(-rows.shape[1] // 1024)), "f4")
    levels = np.zeros(rows.shape, "i1")
    for r, row in enumerate(rows):
        for number, start in enumerate(range(0, row.size, 1024)):
            block = row[start : start + 1024]
            scales[r, number] = scale = np.abs(block).max() / np.float32(127)
            if scale:
                levels[r, start : start + 1024] = np.rint(block / scale)
    return scales, levels


@pytest.mark.parametrize(("coding", "made"), codings())
@pytest.mark.parametrize("shape", [(1, 3), (2, 1025), (1, 4 * BLOCK + 1), (3, 2 * BLOCK + 700)])
def test_int8_in_parts(shape: tuple[int, int], coding: Any, made: Any) -> None:
    """Rows that are longer than what is computed at once: the bytes, and the elements, are those of the equation."""
    rows = (np.random.default_rng(0).standard_normal(shape) * [[10.0**i] for i in range(shape[0])]).astype("f4")
    rows[:, : min(1500, shape[1] - 1)] = 0
    scales, levels = quantized(rows)
    payload = Int8().encode(coding, made(rows))
    assert np.asarray(payload).tobytes() == np.concatenate([scales.view("u1"), levels.view("u1")], axis=1).tobytes()
    expected = np.repeat(scales, 1024, axis=1)[:, : shape[1]] * levels
    assert np.array_equal(np.asarray(Int8().decode(coding, payload, shape[1])), expected)


@pytest.mark.parametrize(("coding", "made"), codings())
def test_a_quotient_is_zero_where_the_divisor_is(coding: Any, made: Any) -> None:
    x, y = np.array([[5.0, -3.0], [5.0, -3.0], [0.0, 0.0]], "f4"), np.array([[0.0], [2.0], [0.0]], "f4")
    found = np.asarray(coding.quotient(made(x), made(y)))
    assert found.dtype == np.float32
    assert found.tolist() == [[0.0, 0.0], [2.0, -2.0], [0.0, 0.0]]


@pytest.mark.parametrize(("coding", "made"), codings())
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_one_element_that_is_not_finite_is_seen(dtype: str, coding: Any, made: Any) -> None:
    for size in (1, 7, 8, 33, 1000):
        for place in {0, size // 2, size - 1}:
            for value in (np.nan, np.inf, -np.inf):
                values = np.linspace(-6e4, 6e4, size).astype(dtype)
                good = made(values.copy())
                values[place] = value
                assert coding.are_finite([good, made(np.zeros(0, dtype))])
                assert not coding.are_finite([good, made(values)]), (size, place, value)
    assert coding.are_finite([])


def largest_in_order(row: Array, count: int, floor: float) -> list[int]:
    """Return the places of the largest magnitudes, by a stable sort."""
    sizes = [abs(x) if abs(x) > floor else 0.0 for x in row.tolist()]
    return sorted(sorted(range(len(sizes)), key=lambda i: -sizes[i])[:count])


@pytest.mark.parametrize(("coding", "made"), codings())
@pytest.mark.parametrize(("length", "count"), [(1, 1), (5, 5), (64, 15), (96, 12), (700, 10), (4096, 64), (5001, 50)])
@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_the_largest_are_those_of_a_stable_sort(length: int, count: int, floor: float, coding: Any, made: Any) -> None:
    """Whether groups are compared first or not; with many equal elements, and with all of the largest in one group."""
    random = np.random.default_rng(length)
    few = np.zeros(length)
    few[random.integers(0, length, count)] = -1
    near = np.linspace(0, 1, length)
    near[:: max(length // count, 1)] += 2
    rows = np.stack(
        [
            random.standard_normal(length),
            random.choice([0.25, -0.5, 0.75, 1], length),
            few,
            near,
            -near[::-1],
            np.sort(random.standard_normal(length)),
            np.where(np.arange(length) < count + 1, -3.0, 0.125),
            np.full(length, 0.25),
            np.full(length, -0.75),
            np.where(random.random(length) < 0.01, random.standard_normal(length), 0.75),
            np.zeros(length),
        ]
    ).astype("f4")
    found = np.asarray(coding.largest(made(rows), count, floor))
    assert found.dtype == np.int32
    assert found.tolist() == [largest_in_order(row, count, floor) for row in rows]


@pytest.mark.parametrize(("coding", "made"), codings())
def test_the_largest_of_more_rows_than_are_compared_at_once(coding: Any, made: Any) -> None:
    rows = np.random.default_rng(0).integers(-40, 40, (BLOCK // 50 + 3, 100)).astype("f4")
    found = np.asarray(coding.largest(made(rows), 7))
    sizes = -np.abs(rows)
    assert np.array_equal(found, np.sort(np.argsort(sizes, axis=1, kind="stable")[:, :7], axis=1))


@pytest.mark.parametrize(("coding", "made"), codings())
def test_numbers_are_packed_and_unpacked(coding: Any, made: Any) -> None:
    for bits in (1, 2, 4, 8):
        numbers = np.random.default_rng(bits).integers(0, 2**bits, (3, 48)).astype("u1")
        packed = np.asarray(coding.packed(made(numbers), bits))
        expected = [sum(int(x) << bits * i for i, x in enumerate(row)) for row in numbers]
        assert [int.from_bytes(row.tobytes(), "little") for row in packed] == expected
        back = np.asarray(coding.bits(made(packed), 8)).reshape(3, -1, bits)
        assert np.array_equal((back << np.arange(bits)).sum(-1), numbers)


@pytest.mark.parametrize(("coding", "made"), codings())
def test_ties_are_rounded_to_even(coding: Any, made: Any) -> None:
    values = np.array([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 127.0, -126.50001]], "f4")
    for offset in (0, 8):
        found = np.asarray(coding.rounded(made(values.copy()), offset))
        assert found.tolist() == ((np.rint(values).astype(int) + offset) % 256).tolist()


@pytest.mark.parametrize(("coding", "made"), codings())
def test_parts_are_put_behind_each_other(coding: Any, made: Any) -> None:
    columns = np.arange(24, dtype="u1").reshape(2, 12)
    parts = [
        (columns[:, 0:2], columns[:, 8:9]),
        (columns[:, 2:5], columns[:, 9:10]),
        (columns[:, 5:8], columns[:, 10:12]),
    ]
    for cut in (parts, [(columns[:, :8], columns[:, 8:])]):
        found = coding.in_turn(([made(x.copy()) for x in part] for part in cut), (8, 4))
        assert np.array_equal(np.asarray(found), columns)


@pytest.mark.parametrize("length", [1, 255, 9000])
def test_few_bits_of_pytorch_are_those_of_numpy(length: int) -> None:
    torch = pytest.importorskip("torch")
    from hvd_periodic.torch.coding import TensorCoding

    for name, row in kinds(length, length).items():
        wires: list[Any] = [*WIRES.values(), ChunkedTopK(8, 3), ChunkedTopK(100, 77), ChunkedTopK(4096, 64)]
        for wire in wires:
            here: Any = wire.encode(Coding(), row[None])
            there = wire.encode(TensorCoding(), torch.from_numpy(row[None]))
            assert here.tobytes() == there.numpy().tobytes(), (name, wire)
            back = wire.decode(TensorCoding(), there, length).numpy()
            assert np.array_equal(back, wire.decode(Coding(), here, length)), (name, wire)


@pytest.mark.parametrize("name", WIRES)
def test_few_bits_of_pytorch_in_parts_are_those_of_numpy(name: str) -> None:
    """PyTorch computes larger parts of a row than numpy."""
    torch = pytest.importorskip("torch")
    from hvd_periodic.torch.coding import TensorCoding

    row = np.random.default_rng(0).standard_normal((1, 4 * BLOCK + 300)).astype("f4")
    here = WIRES[name].encode(Coding(), row)
    there = WIRES[name].encode(TensorCoding(), torch.from_numpy(row))
    assert np.array_equal(here, there.numpy())
    back = WIRES[name].decode(TensorCoding(), there, row.size).numpy()
    assert np.array_equal(back, WIRES[name].decode(Coding(), here, row.size))


@pytest.mark.parametrize("length", [1, 7, 1023, 1024, 1025, 3000])
def test_payloads_of_pytorch_are_those_of_numpy(length: int) -> None:
    torch = pytest.importorskip("torch")
    from hvd_periodic.torch.coding import TensorCoding

    rows = np.random.default_rng(length).standard_normal((2, length)).astype("f4")
    rows[0, :: 7 if length > 7 else 2] = 0
    for wire in LOSSY:
        assert isinstance(wire, Encoded)
        for array in (rows[:1], rows) if wire.forms_sums(LocalCommunicator(), lasting=False) else (rows[1:],):
            here, there = (
                np.asarray(wire.encode(coding, values))
                for coding, values in ((Coding(), array), (TensorCoding(), torch.from_numpy(array)))
            )
            assert here.tobytes() == there.tobytes(), wire
            back = wire.decode(TensorCoding(), torch.from_numpy(there), length)
            assert np.asarray(back).tobytes() == np.asarray(wire.decode(Coding(), here, length)).tobytes(), wire


def test_compression_of_horovod_is_taken() -> None:
    hvd = pytest.importorskip("horovod.torch")
    assert as_wire(hvd.Compression.fp16) is Compression.fp16
    assert as_wire(hvd.Compression.none) is Compression.none


@pytest.mark.parametrize(("coding", "made"), codings())
def test_rows_are_found_taken_and_replaced(coding: Any, made: Any) -> None:
    """NaN is not 0, and -0 is."""
    x = made(np.array([[0, 0], [0, np.nan], [-0.0, 0], [0, 1e-45], [0, -np.inf]], "f4"))
    found = coding.nonzero_rows(x)
    assert found.tolist() == [False, True, False, True, True]
    places = np.flatnonzero(found)[1:]
    taken = coding.take_rows(x, places)
    assert np.asarray(taken).tolist() == np.array([[0, 1e-45], [0, -np.inf]], "f4").tolist()
    assert np.asarray(coding.put_rows(x, places, 0 * made(np.ones((2, 2), "f4"))))[3:].tolist() == [[0, 0], [0, 0]]
