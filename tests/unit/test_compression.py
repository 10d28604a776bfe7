"""Messages that are encoded, on threads: a slow oracle, numbers worked out by hand, conservation, resume, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_periodic import AGN, BMUF, EASGD, Averaging, Communicator, Compression, DiLoCo, SlowMo, sparse_loco
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.algorithms.maximum import Maximum
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires import Wire
from tests import compression_oracle as slow
from tests import oracle
from tests.covering import covering
from tests.helpers import Array, errors, readable, run_ranks
from tests.overlap_oracle import PERIOD

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(slow.RATE),
    "average": Averaging,
    "agn": AGN,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": lambda: BMUF(0.5),
}
WIRES: dict[str, tuple[Wire, slow.Quantizer, int]] = {
    "fp16": (Compression.fp16, slow.float16, 2),
    "bf16": (Compression.bf16, slow.bfloat16, 2),
    "int8": (Compression.int8, slow.int8, 2),
    "topk": (Compression.topk(0.5), slow.top((len(oracle.START) + 1) // 2), 1),
    "int4": (Compression.int4, slow.in_blocks("int4"), 2),
    "e3m0": (Compression.e3m0, slow.in_blocks("e3m0"), 2),
    "int2": (Compression.int2, slow.in_blocks("int2"), 2),
    "chunks": (Compression.topk(chunk=2, keep=1), slow.chunks(2, 1), 1),
}
LOSSY = [wire for wire, _, _ in WIRES.values()]
"""With the slow form of each, and how many hops a message takes."""


def made(communicator: Communicator, arrays: dict[str, Array], name: str, compression: Any, **options: Any) -> Any:
    inner = SGD(oracle.RATE, oracle.MOMENTUM)
    return PeriodicOptimizer(
        inner, arrays, ALGORITHMS[name](), PERIOD, process_set=communicator, compression=compression, **options
    )


def train(
    communicator: Communicator, name: str, compression: Any, overlap: int | str = 0, error_decay: float = 1.0
) -> tuple[list[list[float]], list[float]]:
    """Return x after every step, and c at the end."""
    x = np.array(oracle.START)
    optimizer, seen = made(communicator, {"x": x}, name, compression, overlap=overlap, error_decay=error_decay), []
    for _ in range(oracle.STEPS):
        optimizer.step([np.array(oracle.gradient(communicator.rank, x.tolist()))])
        seen.append(x.tolist())
    with optimizer.center():
        return seen, x.tolist()


@pytest.mark.parametrize(("name", "wire", "size"), covering(ALGORITHMS, WIRES, (2, 3, 1)))
def test_agreement_with_a_slow_oracle(name: str, wire: str, size: int) -> None:
    compression, quantize, hops = WIRES[wire]
    found = run_ranks(size, lambda communicator: train(communicator, name, compression))
    seen, center = slow.expected(name, size, quantize, hops)
    for worker, (of_worker, its_center) in enumerate(found):
        for step, x in enumerate(of_worker):
            assert x == pytest.approx(seen[step][worker], rel=1e-6, abs=1e-6), (step, worker)
        assert its_center == pytest.approx(center, rel=1e-6, abs=1e-6)
        assert its_center == found[0][1], "one center, to the bit"


@pytest.mark.parametrize(
    ("name", "wire"), covering([name for name in ALGORITHMS if name != "easgd"], WIRES, together=1), ids=readable
)
def test_agreement_with_a_slow_oracle_that_forgets(name: str, wire: str) -> None:
    """m = message + β e; e of sums does not decay."""
    compression, quantize, hops = WIRES[wire]
    found = run_ranks(3, lambda communicator: train(communicator, name, compression, error_decay=0.5))
    seen, center = slow.expected(name, 3, quantize, hops, decay=0.5)
    for worker, (of_worker, its_center) in enumerate(found):
        assert np.array(of_worker) == pytest.approx(np.array([x[worker] for x in seen]), rel=1e-6, abs=1e-6)
        assert its_center == pytest.approx(center, rel=1e-6, abs=1e-6)
        assert its_center == found[0][1], "one center, to the bit"


@pytest.mark.parametrize(
    ("wire", "overlap"), covering(WIRES, (1, 2, "period"), together=1, always=[("int8", "period")])
)
def test_elastic_averaging_with_overlap(wire: str, overlap: int | str) -> None:
    """In one hop; the replica pulls at once, by what it has sent."""
    compression, quantize, _ = WIRES[wire]
    found = run_ranks(2, lambda communicator: train(communicator, "easgd", compression, overlap))
    seen, center = slow.expected("easgd", 2, quantize, hops=1)
    for worker, (of_worker, its_center) in enumerate(found):
        assert np.array(of_worker) == pytest.approx(np.array([x[worker] for x in seen]), rel=1e-6, abs=1e-6)
        assert its_center == pytest.approx(center, rel=1e-6, abs=1e-6)


def test_numbers_worked_out_by_hand() -> None:
    """The larger of two elements; every round moves x by (1, .25) and (.5, 1)."""

    def run(communicator: Communicator) -> tuple[list[list[float]], list[float]]:
        x, seen = np.zeros(2), []
        optimizer = PeriodicOptimizer(
            SGD(1.0), {"x": x}, Averaging(), 1, process_set=communicator, compression=Compression.topk(0.5)
        )
        for _ in range(4):
            optimizer.step([-np.array([(1.0, 0.25), (0.5, 1.0)][communicator.rank])])
            seen.append(x.tolist())
        return seen, optimizer.synchronizer.state_dict()["vectors"]["parameters"]["unsent"]["x"].tolist()

    for seen, error in run_ranks(2, run):
        assert seen == [pytest.approx(c, abs=1e-6) for c in ([0.5, 0.5], [1.5, 0.5], [2, 1.5], [3, 1.5])]
        assert error == pytest.approx([0, 1], abs=1e-6)


DECAYED: dict[float, list[tuple[float, float]]] = {
    0.9: [(0.5, 0.5), (1, 1), (2.1775, 1), (2.6775, 1.95), (2.6775, 2.9618875)],
    0.5: [(0.5, 0.5), (1, 1), (1.5, 1.5), (2, 2), (2.5, 2.5)],
    1.0: [(0.5, 0.5), (1.5, 0.5), (2, 1.5), (3, 1.5), (3, 3.125)],
}


@pytest.mark.parametrize("decay", DECAYED)
@pytest.mark.parametrize("wire", [Compression.topk(0.5), Compression.topk(chunk=2, keep=1)], ids=readable)
def test_decay_worked_out_by_hand(wire: Wire, decay: float) -> None:
    """SparseLoCo's outer step, and the rounds of above."""

    def run(communicator: Communicator) -> list[list[float]]:
        x, seen = np.zeros(2), []
        options: dict[str, Any] = sparse_loco(1) | {"compression": wire, "error_decay": decay}
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, process_set=communicator, **options)
        for _ in range(5):
            optimizer.step([-np.array([(1.0, 0.25), (0.5, 1.0)][communicator.rank])])
            seen.append(x.tolist())
        return seen

    for seen in run_ranks(2, run):
        assert np.array(seen) == pytest.approx(np.array(DECAYED[decay]), abs=1e-6)


def test_sparse_loco() -> None:
    """The preset trains: of 100 elements that move, the 64 first of a chunk travel."""

    def run(communicator: Communicator) -> tuple[list[float], int]:
        x = np.zeros(5000, "f4")
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, process_set=communicator, **sparse_loco(period=2))
        for _ in range(4):
            optimizer.step([np.where(np.arange(5000) % 50 == 0, -1.0, 0.0).astype("f4")])
        return x[:100].tolist(), int(optimizer.synchronizer.counters.bytes_sent)

    for x, nbytes in run_ranks(2, run):
        sent = np.flatnonzero(x)
        assert sent.tolist() == [0, 50]
        assert x[0] > 2
        assert 2 * (2 * 8 + 79 * 14 // 8) < nbytes < 5000


def stand_still(communicator: Communicator, name: str, compression: Any, moved: Array) -> tuple[Any, Array]:
    """Move this rank from 0 by one step; then exchange forty times without another."""
    x, rate = np.zeros(moved.size), 0.5
    optimizer = PeriodicOptimizer(
        SGD(rate), {"x": x}, ALGORITHMS[name](), 1, process_set=communicator, compression=compression
    )
    for gradient in (-moved / rate, *[np.zeros(moved.size)] * 40):
        optimizer.step([gradient])
    return optimizer, x


@pytest.mark.parametrize("wire", LOSSY, ids=readable)
def test_elastic_averaging_conserves_what_there_is(wire: Wire) -> None:
    """Without gradients Σ x + c + α Σ unsent stays, and everybody comes to the same."""

    def run(communicator: Communicator) -> tuple[Array, Array, Array, Array]:
        moved = np.random.default_rng(communicator.rank).standard_normal(1000)
        optimizer, x = stand_still(communicator, "easgd", wire, moved)
        saved = optimizer.synchronizer.state_dict()["vectors"]["parameters"]
        rows = [np.ravel(part) for key, of_key in saved.items() if "unsent_sums" in key for part in of_key.values()]
        return moved, x, saved["center"]["x"], np.concatenate(rows or [np.zeros(0)])

    found = run_ranks(3, run)
    moved, ends = (np.array([of_rank[i] for of_rank in found]) for i in (0, 1))
    center, unsent = found[0][2], np.concatenate([of_rank[3] for of_rank in found])[: moved.shape[1]]
    left = slow.RATE * unsent if unsent.size else 0.0
    assert ends.sum(axis=0) + center + left == pytest.approx(moved.sum(axis=0), abs=1e-4)
    apart = np.abs(ends - center)
    assert apart.mean() < 0.05 if wire is Compression.int2 else apart.max() < 0.02, "all come together"


DRIFTS = {
    "fp16": ([0.0, 4e-8], [0.0, 7e-8]),  # Below 3e-8, one step would be 0.
    "bf16": ([1.003, 0.0], [0.02, 0.0]),  # It would be 1 every time.
    "int8": ([1.0, 1e-3, 1.0, 1e-3], [0.01] * 4),  # Below half of 1/127, it would be 0.
    "topk": ([1.0, 0.3], [1.0, 1.0]),  # It would never be sent.
    "int4": ([1.0, 0.02, 1.0, 0.02], [0.1] * 4),  # Below half of 1/7, it would be 0.
    "e3m0": ([1.0, 3e-3, 0.7, 0.3], [0.5, 0.02, 0.5, 0.5]),  # Below 1/128, it would be 0.
    "chunks": ([1.0, 0.3, 0.5], [1.0, 1.0, 0.1]),  # It would never be sent.
    "int2": ([1.0, 0.1, 1.0, 0.1], [0.5] * 4),  # Below seven tenths of the mean, it would be 0.
}
"""How far the last of two ranks moves at every step, of which the mean is sent at once, and how far is tolerated."""


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_sent_is_sent_later(wire: str) -> None:
    """The center follows a drift of which, every time, the smaller part cannot be sent."""
    drift, tolerance = DRIFTS[wire]
    compression = Compression.topk(0.5) if wire == "topk" else WIRES[wire][0]

    def run(communicator: Communicator) -> Array:
        x = np.zeros(len(drift))
        optimizer = PeriodicOptimizer(
            SGD(1.0), {"x": x}, Averaging(), 1, process_set=communicator, compression=compression
        )
        for _ in range(40):
            optimizer.step([-np.array(drift) / 2 * communicator.rank])
        return x

    for x in run_ranks(2, run):
        for found, moved, left in zip(x, drift, tolerance, strict=True):
            assert found == pytest.approx(10 * moved, abs=left)
            assert found >= 0.5 * moved


@pytest.mark.parametrize(
    ("name", "wire", "overlap"), covering(ALGORITHMS, LOSSY, (0, 1, "period"), together=1, in_all=2), ids=readable
)
def test_resume_to_the_bit(name: str, wire: Wire, overlap: int | str) -> None:
    """At every step of a period: with what was not sent, and what is under way."""
    target = np.random.default_rng(5).standard_normal(37)

    def run(communicator: Communicator) -> None:
        def make() -> tuple[Any, Array]:
            x = np.zeros(37)
            algorithm = ALGORITHMS[name]()
            options: dict[str, Any] = {"process_set": communicator, "compression": wire, "overlap": overlap}
            options["error_decay"] = 1.0 if name == "easgd" or overlap == 1 else 0.5
            return PeriodicOptimizer(SGD(0.3), {"x": x}, algorithm, PERIOD, **options), x

        def step(optimizer: Any, x: Array, number: int) -> None:
            optimizer.step([x - target * (1 + communicator.rank) + 0.1 * np.sin(np.arange(37) * number)])

        (optimizer, x), saved, trajectory = make(), {}, {}
        for number in range(5 * PERIOD):
            if 2 * PERIOD <= number < 3 * PERIOD:
                saved[number] = optimizer.synchronizer.state_dict(), x.copy()
            step(optimizer, x, number)
            trajectory[number] = x.tobytes()
        for saved_at, (state, values) in saved.items():
            again, y = make()
            again.synchronizer.load_state_dict(state)
            y[...] = values
            for number in range(saved_at, 5 * PERIOD):
                step(again, y, number)
                assert y.tobytes() == trajectory[number], (saved_at, number)
            with optimizer.center(), again.center():
                assert x.tobytes() == y.tobytes(), saved_at

    run_ranks(2, run)


def test_a_state_that_was_saved_without_compression_is_loaded() -> None:
    def run(communicator: Communicator) -> list[float]:
        x, y = np.ones(5), np.ones(5)
        plain, lossy = (made(communicator, {"x": v}, "average", w) for v, w in ((x, Compression.none), (y, LOSSY[2])))
        for _ in range(PERIOD):
            plain.step([x - communicator.rank])
        lossy.synchronizer.load_state_dict(plain.synchronizer.state_dict())
        y[...] = x
        for _ in range(PERIOD):
            lossy.step([y - communicator.rank])
        return y.tolist()

    first, second = run_ranks(2, run)
    assert first == second


class Counting(ThreadCommunicator):
    """Counts the bytes that are handed to collectives, but for those of numbers."""

    handed: int

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        raise AssertionError("No numbers travel")

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        return super().allgather(self.counted(buffer), name, out)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        return super().alltoall(self.counted(buffer), name)

    def counted(self, buffer: Any) -> Any:
        assert buffer.dtype == np.uint8
        self.handed += buffer.nbytes
        return buffer


@pytest.mark.parametrize("wire", LOSSY, ids=readable)
def test_bytes_are_those_that_are_sent(wire: Wire) -> None:
    """Of 1000 elements of float64 between two ranks."""
    expected = {
        Compression.fp16: (2 + 1) * 500 * 2,
        Compression.bf16: (2 + 1) * 500 * 2,
        Compression.int8: (2 + 1) * (500 + 4),
        Compression.topk(0.5): 500 * (4 + 1) + 4,
        Compression.int4: (2 + 1) * (250 + 8),
        Compression.e3m0: (2 + 1) * (250 + 8),
        Compression.int2: (2 + 1) * (125 + 8),
        Compression.topk(chunk=2, keep=1): 500 * 8 + 63 + 125,
    }[wire]

    def run(communicator: Any, compression: Wire) -> int:
        optimizer = made(communicator, {"x": np.zeros(1000)}, "average", compression)
        if compression.lossy:
            communicator.__class__, communicator.handed = Counting, 0
        for _ in range(PERIOD):
            optimizer.step([np.ones(1000)])
        assert not compression.lossy or communicator.handed == expected
        return int(optimizer.synchronizer.counters.bytes_sent)

    plain, found = (run_ranks(2, lambda communicator, w=w: run(communicator, w)) for w in (Compression.none, wire))  # type: ignore[misc]
    for of_record, counted in zip(plain, found, strict=True):
        assert counted - expected == of_record - 8000, "and what ranks tell each other before"


def failing_ranks(compressions: list[Any], **options: Any) -> list[tuple[type[BaseException], str]]:
    """Return how construction ends, on as many ranks."""

    def run(communicator: Communicator) -> None:
        made(communicator, {"x": np.ones(3)}, "average", compressions[communicator.rank], **options)

    return errors(len(compressions), run)


def test_large_numbers_are_cut_and_sent_bit_by_bit() -> None:
    """Neither a message nor a sum overflows, nor spoils its neighbours; also where Horovod sums float16."""

    class Summing(ThreadCommunicator):
        sums = frozenset({"f2"})

    for size, wire in [(n, Compression.fp16) for n in (2, 3, 5, 12)] + [(2, w) for w in LOSSY[1:]]:

        def run(communicator: Any, wire: Wire = wire, size: int = size) -> Array:
            if wire is Compression.fp16:
                communicator.__class__ = Summing
            x = np.zeros(2)
            optimizer = PeriodicOptimizer(
                SGD(1.0), {"x": x}, Averaging(), 1, process_set=communicator, compression=wire
            )
            optimizer.step([np.array([-3e4 if wire is Compression.fp16 else -1e300, -1.0])])
            for _ in range(3 * size):
                optimizer.step([np.zeros(2)])
            return x

        x, *_ = run_ranks(size, run)
        assert np.isfinite(x).all(), (size, wire)
        if wire is Compression.fp16:
            assert x == pytest.approx([3e4, 1.0], rel=1e-3), size
        else:
            assert x[0] > 1e38


def test_a_reduction_that_is_no_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="`compression` is for sums over ranks, and Maximum takes another reduction"):
        PeriodicOptimizer(SGD(0.1), {"x": np.ones(3)}, Maximum(), 2, compression=Compression.int8)


def test_weights_of_the_root_replace_what_is_not_finite() -> None:
    """Before the first step, all take over the root's: that others hold NaN does not matter."""

    def run(communicator: Communicator) -> list[float]:
        x = np.zeros(3)
        optimizer = made(communicator, {"x": x}, "average", Compression.int8)
        x[...] = 2.0 if communicator.rank == 0 else np.nan
        for _ in range(PERIOD):
            optimizer.step([np.zeros(3)])
        return x.tolist()

    assert run_ranks(2, run) == [[pytest.approx(2.0)] * 3] * 2


def test_what_cannot_be() -> None:
    for unknown in ("int8", 8, None, Compression.topk, Compression):
        for kind, message in failing_ranks([unknown]):
            assert kind is TypeError
            assert message.startswith("`compression` must be one of hvdp.Compression.none, ")
    for fraction in (0, -0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"`Compression.topk\(fraction\)` must be"):
            Compression.topk(fraction)
    with pytest.raises(TypeError, match="must be a number"):
        Compression.topk("all")  # type: ignore[arg-type]
    for keywords in ({}, {"chunk": 4096}, {"keep": 64}, {"fraction": 0.1, "chunk": 4096, "keep": 64}):
        with pytest.raises(TypeError, match=r"`Compression\.topk` takes a fraction, as in topk"):
            Compression.topk(**keywords)  # type: ignore[arg-type]
    for chunk, keep, name in ((1, 1, "chunk"), (65537, 1, "chunk"), (8, 0, "keep"), (8, 9, "keep")):
        with pytest.raises(ValueError, match=rf"`Compression.topk\({name}=...\)` must be"):
            Compression.topk(chunk=chunk, keep=keep)
    with pytest.raises(TypeError, match="must be an int >= 1"):
        Compression.topk(chunk=8, keep=0.5)  # type: ignore[arg-type]
    for wire in LOSSY:
        for place in ("root", "sharded"):
            for kind, message in failing_ranks([wire] * 2, center=place):
                assert kind is ValueError
                assert "needs center='replicated'" in message
                assert f"center={place!r}" in message


def test_error_decay_that_cannot_be() -> None:
    def refused(
        name: str, error: type[Exception], match: str, compression: Any = Compression.int8, **more: Any
    ) -> None:
        with pytest.raises(error, match=match):
            PeriodicOptimizer(SGD(0.1), {"x": np.ones(3)}, ALGORITHMS[name](), 2, compression=compression, **more)

    for decay in (-0.1, 1.5, float("nan")):
        refused("average", ValueError, "`error_decay` must be", error_decay=decay)
    refused("average", TypeError, "`error_decay` must be a number", error_decay="half")
    refused("easgd", ValueError, "`error_decay` is for algorithms with error feedback. In EASGD", error_decay=0.9)
    refused("average", ValueError, "lossy `compression`", Compression.none, error_decay=0.9)
    refused(
        "average",
        ValueError,
        "`error_decay` is for synchronous exchange",
        Compression.none,
        error_decay=0.9,
        asynchronous=True,
    )
    for kind, message in failing_ranks([Compression.int8] * 2, error_decay=2):
        assert kind is ValueError
        assert message.startswith("`error_decay` must be in [0, 1]")


def test_ranks_have_to_compress_alike() -> None:
    for kind, message in failing_ranks([Compression.int8, Compression.topk(0.1)]):
        assert kind is ValueError
        assert "differ in compression: Int8() on rank 0" in message


def test_asynchronous_exchange_is_refused() -> None:
    inner, x = SGD(0.1), np.ones(3)
    with pytest.raises(ValueError, match="`compression` is for synchronous exchange"):
        PeriodicOptimizer(inner, {"x": x}, EASGD(0.1), 2, asynchronous=True, compression=Compression.int8)


@pytest.mark.parametrize("wire", LOSSY, ids=readable)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_travel(wire: Wire, bad: float) -> None:
    """An error on all ranks that names the tensor and the rank; the center stays clean."""

    def run(communicator: Communicator) -> None:
        arrays = {"x": np.zeros(3), "y": np.zeros(3)}
        optimizer = made(communicator, arrays, "average", wire)
        try:
            for _ in range(PERIOD):
                optimizer.step({"x": np.ones(3), "y": np.full(3, bad if communicator.rank == 1 else 1.0)})
        finally:
            with optimizer.center():
                assert all(np.isfinite(array).all() for array in arrays.values())

    for kind, message in errors(3, run):
        assert kind is RuntimeError
        assert "Rank 1 failed" in message or "parameter 'y' is not finite at step 3" in message, message


def test_an_accumulated_gradient_that_is_not_finite() -> None:
    class Still:
        def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
            """Do nothing."""

    def run(communicator: Communicator) -> None:
        optimizer = PeriodicOptimizer(
            Still(), {"x": np.zeros(3)}, AGN(), PERIOD, process_set=communicator, compression=Compression.int8
        )
        for step in range(PERIOD):
            optimizer.step([np.array([0.0, np.nan if step == 1 else 0.0, 0.0])])

    for _, message in errors(2, run):
        assert "gradient 'x' is not finite at step 3" in message


@settings(deadline=None, max_examples=60)
@given(
    length=st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 2500])),
    count=st.integers(1, 3),
    exponent=st.integers(-45, 38),
    seed=st.integers(0, 9),
)
def test_rounding_is_bounded(length: int, count: int, exponent: int, seed: int) -> None:
    """int8: half a scale, of every block of 1024; 16 bits: a part of each element."""
    rows = (np.random.default_rng(seed).uniform(-1, 1, (count, length)) * 2.0**exponent).astype("f4")
    coding: Coding[Any] = Coding()

    def decoded(wire: Any) -> Array:
        return np.asarray(wire.decode(coding, wire.encode(coding, rows), length))

    found, tiny = decoded(Compression.int8), 2.0**-140
    for start in range(0, length, 1024):
        block = slice(start, start + 1024)
        scale = np.abs(rows[:, block]).max(axis=1, keepdims=True) / 127
        assert (np.abs(found[:, block] - rows[:, block]) <= 0.5001 * scale + tiny).all()
    assert (np.abs(decoded(Compression.bf16) - rows) <= np.abs(rows) / 256 + tiny).all()
    clipped = np.clip(rows, -65504, 65504)
    assert (np.abs(decoded(Compression.fp16) - clipped) <= np.abs(clipped) / 2048 + 2.0**-25).all()
