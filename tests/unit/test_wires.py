"""Wires of few bits: bytes worked out by hand, those of a slow oracle, bounds of the error, rows of every length."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_periodic import Compression
from hvd_periodic.vectors.coding import BLOCK, Coding
from hvd_periodic.wires import ChunkedTopK, Int2, loops
from tests import compression_oracle as slow
from tests.helpers import Array

CODING: Coding[Any] = Coding()
WIRES: dict[str, Any] = {"int4": Compression.int4, "e3m0": Compression.e3m0, "int2": Compression.int2}

ROW = [1, -0.3, 0.12, 0.004, -0.75, 0]
BY_HAND = {
    "int4": ("2549123e 6f8983", [1, -2 / 7, 1 / 7, 0, -5 / 7, 0]),
    "e3m0": ("0000803f d7040e", [1, -0.25, 0.125, 0, -0.5, 0]),  # 0.75 is a tie, and goes to the even level.
    "int2": ("efee2e3f 0902", [2.05 / 3, -2.05 / 3, 0, 0, -2.05 / 3, 0]),
}


def decoded(wire: Any, rows: Array) -> Array:
    return np.asarray(wire.decode(CODING, wire.encode(CODING, rows), rows.shape[1]))


def kinds(length: int, seed: int) -> dict[str, Array]:
    """Return rows in which rounding, order and range matter."""
    random = np.random.default_rng(seed)
    spread = random.standard_normal(length) * np.exp2(random.integers(-149, 126, length))
    made = {
        "normal": random.standard_normal(length),
        "of every size": np.clip(spread, -3e38, 3e38),
        "ties": random.choice([0, 0.375, 0.5, -0.75, 1.5, -3, 6, 2.0**-7, 7, -3.5], length),
        "largest": random.choice([3e38, -3e38, 1e38, 0], length),
        "smallest": random.choice([2.0**-118, -(2.0**-119), 2.0**-126, 2.0**-149, 7 * 2.0**-118], length),
        "equal": np.full(length, 0.1),
        "zeros": np.zeros(length),
    }
    return {name: row.astype("f4") for name, row in made.items()}


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_worked_out_by_hand(wire: str) -> None:
    expected, values = BY_HAND[wire]
    payload = WIRES[wire].encode(CODING, np.array([ROW, ROW], "f4"))
    assert [row.tobytes() for row in payload] == [bytes.fromhex(expected)] * 2
    assert WIRES[wire].decode(CODING, payload, 6) == pytest.approx(np.array([values, values]), abs=1e-7)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 255, 256, 257, 700])
def test_bytes_are_those_of_a_slow_oracle(wire: str, length: int) -> None:
    rows = kinds(length, length)
    payload = WIRES[wire].encode(CODING, np.stack(list(rows.values())))
    values = WIRES[wire].decode(CODING, payload, length)
    for (name, row), found, back in zip(rows.items(), payload, values, strict=True):
        assert found.tobytes() == slow.row_of_bytes(wire, row.tolist()), name
        assert back.tolist() == slow.in_blocks(wire)(row.tolist()), name


@pytest.mark.parametrize("wire", ["e3m0", "int2"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 256, 257, 700])
def test_loops_write_the_same_bytes(wire: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as Python runs them; tests/parallel/test_trainers.py has them compiled."""
    rows = np.stack([*kinds(length, length).values(), np.full(length, np.nan, "f4"), np.full(length, np.inf, "f4")])
    with np.errstate(all="ignore"):
        expected = WIRES[wire].encode(CODING, rows)
        monkeypatch.setattr(f"hvd_periodic.wires.{wire}.compiled", lambda loop: loop)
        np.testing.assert_array_equal(WIRES[wire].encode(CODING, rows), expected)


def test_loops_are_compiled_where_no_folder_takes_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for numba, which raises what numba raises."""

    class Numba(ModuleType):
        config = SimpleNamespace(DISABLE_JIT=False)

        def njit(self, signature: str, nogil: bool, cache: bool = False) -> Any:
            if cache:
                raise RuntimeError("cannot cache function 'ternary': no locator available for file 'loops.py'")
            return lambda loop: (loop, signature)

    monkeypatch.setitem(sys.modules, "numba", Numba("numba"))
    with pytest.warns(UserWarning, match=r"compiles ternary again.*set NUMBA_CACHE_DIR to one \(cannot cache"):
        found, signature = loops.compiled.__wrapped__(loops.ternary)  # type: ignore[misc]
    assert found is loops.ternary
    assert signature.startswith("void(")
    Numba.config.DISABLE_JIT = True
    assert loops.compiled.__wrapped__(loops.ternary) is None
    monkeypatch.setitem(sys.modules, "numba", None)
    assert loops.compiled.__wrapped__(loops.ternary) is None


def test_subclasses_encode_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops know the base class only."""

    class Wider(Int2):
        block: ClassVar[int] = 512

    rows = np.random.default_rng(0).standard_normal((1, 700)).astype("f4")
    expected = Wider().encode(CODING, rows)
    monkeypatch.setattr("hvd_periodic.wires.int2.compiled", lambda loop: loop)
    np.testing.assert_array_equal(Wider().encode(CODING, rows), expected)


def test_chunks_worked_out_by_hand() -> None:
    """Of eight elements two, and of the two at the end one, which has no other magnitude above it."""
    row = np.array([[0.1, -2, 0.3, 1.5, 0, 0.2, -0.1, 0.05, 3, -0.5]], "f4")
    wire = Compression.topk(chunk=8, keep=2)
    assert isinstance(wire, ChunkedTopK)
    payload = wire.encode(CODING, row)
    assert payload.tobytes() == bytes.fromhex("0000c03f 00000040 00004040 00004040 1900 03")
    assert wire.decode(CODING, payload, 10).tolist() == [[0, -2, 0, 1.5, 0, 0, 0, 0, 3, 0]]


CHUNKS = [(2, 1), (8, 2), (8, 8), (5, 3), (64, 7), (256, 200), (4096, 64), (65536, 3)]


@pytest.mark.parametrize(("chunk", "keep"), CHUNKS)
@pytest.mark.parametrize("length", [1, 9, 700])
def test_chunks_are_those_of_a_slow_oracle(chunk: int, keep: int, length: int) -> None:
    wire = ChunkedTopK(chunk, keep)
    for name, row in kinds(length, chunk).items():
        payload = wire.encode(CODING, row[None])
        expected, values = slow.in_chunks(row.tolist(), chunk, keep)
        assert payload.tobytes() == expected, name
        assert wire.decode(CODING, payload, length).tolist() == [values], name


def test_chunks_computed_in_parts() -> None:
    row = np.random.default_rng(0).standard_normal((1, BLOCK + 5000)).astype("f4")
    row[:, 4096:20000] = 0
    wire = ChunkedTopK(4096, 64)
    expected, values = slow.in_chunks(row[0].tolist(), 4096, 64)
    payload = wire.encode(CODING, row)
    assert payload.tobytes() == expected
    assert wire.decode(CODING, payload, row.size).tolist() == [values]
    assert payload.nbytes == row.size // 4096 * 120 + 8 + -(-14 * 15 // 8), "and the rest of 904 elements"


@settings(deadline=None)
@given(length=st.integers(1, 300), chunk=st.integers(2, 100), exponent=st.integers(-100, 120), seed=st.integers(0, 99))
def test_the_largest_of_a_chunk_travel(length: int, chunk: int, exponent: int, seed: int) -> None:
    """What is left out is not larger than the least that is sent, and less is lost than there is."""
    random = np.random.default_rng(seed)
    keep = int(random.integers(1, chunk + 1))
    row = (random.standard_normal((1, length)) * 2.0**exponent).astype("f4")
    found = decoded(ChunkedTopK(chunk, keep), row).astype("f8")
    for start in range(0, length, chunk):
        x, sent = (array[0, start : start + chunk].astype("f8") for array in (row, found))
        assert np.count_nonzero(sent) == -(-keep * x.size // chunk)
        assert np.abs(x[sent == 0]).max(initial=0) <= np.abs(x[sent != 0]).min()
        assert np.square(sent - x).sum() <= np.square(x).sum() * (1 - 1e-6)


@pytest.mark.parametrize("wire", WIRES)
def test_rows_computed_in_parts(wire: str) -> None:
    """Rows that are longer than what is computed at once have the bytes of their blocks."""
    row = np.random.default_rng(0).standard_normal((2, BLOCK + 300)).astype("f4")
    payload = WIRES[wire].encode(CODING, row)
    per_block = 256 * WIRES[wire].bits // 8
    scales = 4 * -(-row.shape[1] // 256)
    for start in range(0, row.shape[1], 256 * 100):
        part = WIRES[wire].encode(CODING, row[:, start : start + 256])
        block = start // 256
        assert np.array_equal(part[:, :4], payload[:, 4 * block : 4 * block + 4])
        codes = payload[:, scales + block * per_block : scales + (block + 1) * per_block]
        assert np.array_equal(part[:, 4:], codes)
    whole = WIRES[wire].decode(CODING, payload, row.shape[1])
    assert np.array_equal(whole[:, :256], decoded(WIRES[wire], row[:, :256]))
    assert whole.shape == row.shape


@settings(deadline=None)
@given(length=st.integers(1, 600), exponent=st.integers(-100, 120), seed=st.integers(0, 99))
def test_errors_are_bounded(length: int, exponent: int, seed: int) -> None:
    """And less is lost than there is: of each block, the norm of the error is smaller than that of the block."""
    row = (np.random.default_rng(seed).standard_normal((1, length)) * 2.0**exponent).astype("f4")
    found = {name: decoded(wire, row).astype("f8") for name, wire in WIRES.items()}
    for start in range(0, length, 256):
        x = row[0, start : start + 256].astype("f8")
        error = {name: np.abs(values[0, start : start + 256] - x) for name, values in found.items()}
        sizes, largest, slack = np.abs(x), np.abs(x).max(), 1 + 1e-6
        assert (error["int4"] <= slack * largest / 14).all()
        small = sizes < largest / 64
        assert (error["e3m0"] <= slack * np.where(small, largest / 128, sizes / 3)).all()
        threshold, sent = 0.7 * sizes.mean(), found["int2"][0, start : start + 256]
        a = np.abs(sent).max()
        assert (error["int2"][sent == 0] <= slack * threshold).all()
        assert (error["int2"][sent != 0] <= slack * max(a - threshold, largest - a) + 1e-6 * largest).all()
        for name, of_block in error.items():
            assert np.square(of_block).sum() < np.square(x).sum(), name


def test_shares_lost_of_normal_numbers() -> None:
    """Of ‖x‖²."""
    row = np.random.default_rng(0).standard_normal((1, 1 << 18)).astype("f4")
    for name, share in {"int4": 0.0161, "e3m0": 0.038, "int2": 0.19}.items():
        lost = np.square(decoded(WIRES[name], row) - row).sum() / np.square(row).sum()
        assert lost == pytest.approx(share, rel=0.05), name


def test_bytes_of_a_million_elements() -> None:
    """Of a rank of four, as ``hvdp plan`` and the documents tell: in two hops, and in one."""
    for name, sent in {"int4": 811_008, "e3m0": 811_008, "int2": 417_792, "int8": 1_579_008}.items():
        wire = getattr(Compression, name)
        assert wire.traffic(4, 4 * 2**20) == (6, sent), name
        assert wire.traffic(4, 4 * 2**20, lasting=True) == (3, 2 * sent), name
    wire = Compression.topk(chunk=4096, keep=64)
    assert wire.traffic(4, 4 * 2**20) == (3, 92_160)


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("`none`", Compression.none),
        ("`fp16`, `bf16`", Compression.fp16),
        ("`int8`", Compression.int8),
        ("`int4`, `e3m0`", Compression.e3m0),
        ("`int2`", Compression.int2),
        ("`topk(0.01)`", Compression.topk(0.01)),
        ("`topk(chunk=4096, keep=64)`", Compression.topk(chunk=4096, keep=64)),
    ],
)
def test_bytes_are_those_of_the_documents(name: str, wire: Any) -> None:
    """Of a rank of two, four and sixteen; of top-k, ``traffic`` knows the bytes of a sample."""
    page = (Path(__file__).parents[2] / "docs/guides/overlap.md").read_text()
    table = page.partition("| `compression=` | n = 2 | n = 4 | n = 16 |")[2]
    row = next(line for line in table.splitlines() if line.startswith(f"| {name} | "))
    stated = [int(cell.replace(",", "")) for cell in row.split("|")[2:5]]
    assert [wire.traffic(n, 4 * 2**20)[1] for n in (2, 4, 16)] == pytest.approx(
        stated, rel=2e-3 if "0.01" in name else 1e-9
    )
