"""Tables of which only touched rows travel, on numpy: the dense exchange to the bit, with fewer bytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Algorithm, Averaging, Communicator, Compression, DiLoCo, SlowMo
from hvd_periodic.comm.subset import Subset
from hvd_periodic.numpy import SGD, NumpyReplica, PeriodicOptimizer
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Layout, TensorSpec
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "average": Averaging,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
    "agn": AGN,
    "agn average": lambda: AGN(op="average"),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {},
    "buckets below a row": {},
    "overlap": {"overlap": 1},
    "fragments": {"fragments": 3},
    "audit": {"audit_every": 1},
    "outer": {"outer_optimizer": SGD(0.5, 0.5)},
}
BUCKET_BYTES = {"small buckets": 100, "buckets below a row": 16}
ROWS, WIDTH, STEPS, PERIOD = 23, 3, 13, 3
TABLES = {"table": "rows", "deep": "rows"}

Model = dict[str, Array]


class Bounded(EASGD):
    """Elastic averaging of which it is not known by how much it moves the center."""

    def contraction(self, exchange: object) -> Any:
        """Return None."""
        return None


def started(dtype: str = "f8") -> Model:
    random = np.random.default_rng(5)
    shapes = {"x": (5,), "table": (ROWS, WIDTH), "y": (2, 2), "deep": (7, 2, 2), "empty": (0, 4)}
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def gradients_of(rank: int, step: int, model: Model) -> dict[str, Array]:
    """Return gradients of this rank, which are 0 in all rows of tables but two or three of its own."""
    random = np.random.default_rng([rank, step])
    found = {}
    for name, x in model.items():
        g = (0.5 + 0.25 * rank) * (x - (1.5 - rank))
        if name in TABLES:
            untouched = np.ones(len(x), bool)
            untouched[random.integers(len(x) // 2, size=3)] = False
            g[untouched] = 0
        found[name] = g
    return found


def made(model: Model, communicator: Communicator, algorithm: str, **options: Any) -> PeriodicOptimizer:
    outer = SGD(0.1, 0.9) if algorithm.startswith("agn") else None
    options = {"parameters": TABLES, "period": PERIOD, "outer_optimizer": outer} | options
    return PeriodicOptimizer(SGD(0.1), model, ALGORITHMS[algorithm](), process_set=communicator, **options)


def trained(model: Model, optimizer: PeriodicOptimizer, rank: int, steps: range = range(1, STEPS + 1)) -> list[Any]:
    """Return the memory of the values after each step, and of those of the center at the end."""
    seen = []
    for step in steps:
        optimizer.step(gradients_of(rank, step, model))
        seen.append({name: x.tobytes() for name, x in model.items()})
    with optimizer.center():
        seen.append({name: x.tobytes() for name, x in model.items()})
    return seen


@pytest.mark.parametrize(("algorithm", "way", "ranks"), covering(ALGORITHMS, WAYS, (2, 3), together=1))
def test_the_dense_exchange_to_the_bit(algorithm: str, way: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters after every step, and the center, with other rows touched on every rank in every period."""
    cut = partial(NumpyReplica, bucket_bytes=BUCKET_BYTES.get(way, DEFAULT_BUCKET_BYTES))
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", cut)

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        model, options = started(), {"parameters": parameters} | WAYS[way]
        if not ALGORITHMS[algorithm]().takes_outer_optimizer:
            options.pop("outer_optimizer", None)
        optimizer = made(model, communicator, algorithm, **options)
        return trained(model, optimizer, communicator.rank), optimizer.synchronizer.counters.bytes_sent

    for (rows, fewer), (dense, more) in zip(
        run_ranks(ranks, lambda c: work(c, TABLES)), run_ranks(ranks, lambda c: work(c, None)), strict=True
    ):
        assert rows == dense
        if way != "buckets below a row":  # Each of them has its own bits.
            assert fewer < more


@pytest.mark.parametrize(
    ("algorithm", "wire", "ranks", "overlap"),
    covering(ALGORITHMS, ("fp16", "bf16"), (2, 3), (0, 1, "period"), together=1),
)
def test_16_bit_wires(
    algorithm: str, wire: str, ranks: int, overlap: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense exchange in one hop, to the bit: rows that all ranks round to 0 wait in their residuals."""
    monkeypatch.setattr("hvd_periodic.wires.encoded.Encoded.forms_sums", lambda *_: False)

    def work(communicator: Communicator, parameters: dict[str, str] | None, compression: Any) -> Any:
        model, options = started("f4"), {"overlap": overlap, "compression": compression}
        optimizer = made(model, communicator, algorithm, parameters=parameters, **options)
        seen = trained(model, optimizer, communicator.rank)
        state = optimizer.synchronizer.state_dict()["vectors"]["parameters"]
        unsent = {name: each.tobytes() for name, each in state.get("unsent", {}).items()}
        return [*seen, unsent], optimizer.synchronizer.counters.bytes_sent

    rows, dense, plain = (
        run_ranks(ranks, lambda c, of=of: work(c, *of))
        for of in (
            (TABLES, getattr(Compression, wire)),
            (None, getattr(Compression, wire)),
            (TABLES, Compression.none),
        )
    )
    for (found, bytes_sent), (expected, of_whole), (_, uncompressed) in zip(rows, dense, plain, strict=True):
        assert found == expected
        assert bytes_sent < min(of_whole, uncompressed)


def test_16_bit_wires_of_other_tensors_take_two_hops() -> None:
    """Tables stay near the dense exchange, and training resumes to the bit, also from a state of whole tables."""

    def work(communicator: Communicator, parameters: dict[str, str] | None, before: Any) -> Any:
        rank, model, options = communicator.rank, started("f4"), {"compression": Compression.bf16}
        optimizer = made(model, communicator, "diloco", parameters=before, **options)
        trained(model, optimizer, rank, range(1, 8))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
        again = made(new := started("f4"), communicator, "diloco", parameters=parameters, **options)
        for name, x in values.items():
            new[name][:] = x
        again.synchronizer.load_state_dict(state)
        seen = [trained(*of, rank, range(8, 15)) for of in ((model, optimizer), (new, again))]
        return seen, [np.frombuffer(seen[1][-1][name], "f4") for name in model]

    run = [run_ranks(2, lambda c, of=of: work(c, *of)) for of in ((TABLES, TABLES), (TABLES, None), (None, None))]
    for ((going_on, resumed), rows), (_, changed), (_, dense) in zip(*run, strict=True):
        assert going_on == resumed
        for one, two, three in zip(rows, changed, dense, strict=True):
            np.testing.assert_allclose(one, three, atol=0.02)
            np.testing.assert_allclose(two, three, atol=0.02)


def test_what_a_wire_rounds_to_zero_waits() -> None:
    """A row that changes by less than half of the least float16 does not travel until it has gathered more."""

    def work(communicator: Communicator) -> Any:
        model, sent = {"table": np.zeros((64, 64), "f4")}, []
        options: dict[str, Any] = {"parameters": "rows", "period": 1, "compression": Compression.fp16}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), process_set=communicator, **options)
        for _ in range(3):
            g = np.zeros((64, 64), "f4")
            g[:32] = -2e-8
            before = optimizer.synchronizer.counters.bytes_sent
            optimizer.step({"table": g})
            sent.append((optimizer.synchronizer.counters.bytes_sent - before, bool(model["table"].any())))
        return sent

    for sent in run_ranks(2, work):
        (first, moved), (second, then) = sent[:2]
        assert not moved
        assert then, "4e-8 becomes 6e-8"
        assert second - first == 31 * 64 * 2


@pytest.mark.parametrize("bound", [{"max_message_norm": 0.5}, {"max_message_norm": "median"}, {"max_mean_norm": 0.1}])
@pytest.mark.parametrize("algorithm", ["diloco", "agn average"])
def test_bounds_on_norms(algorithm: str, bound: dict[str, Any]) -> None:
    """As of the dense exchange within rounding: squares are added up in other buckets."""

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Model:
        model = started()
        optimizer = made(model, communicator, algorithm, parameters=parameters, **bound)
        trained(model, optimizer, communicator.rank)
        return model

    for rows, dense in zip(run_ranks(3, lambda c: work(c, TABLES)), run_ranks(3, lambda c: work(c, None)), strict=True):
        for name, x in rows.items():
            np.testing.assert_allclose(x, dense[name], rtol=1e-10)


@pytest.mark.parametrize("algorithm", ["average", "diloco", "agn"])
@pytest.mark.parametrize(("overlap", "ranks"), [(0, 2), (2, 2), (0, 3)])
def test_training_resumes_to_the_bit(algorithm: str, overlap: int, ranks: int) -> None:
    """In the middle of a period, and with an exchange in flight."""

    def work(communicator: Communicator) -> bool:
        rank, model = communicator.rank, started()
        optimizer = made(model, communicator, algorithm, overlap=overlap)
        trained(model, optimizer, rank, range(1, 8))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
        expected = trained(model, optimizer, rank, range(8, 15))
        again = made(new := started(), communicator, algorithm, overlap=overlap)
        for name, x in values.items():
            new[name][:] = x
        again.synchronizer.load_state_dict(state)
        return trained(new, again, rank, range(8, 15)) == expected

    assert run_ranks(ranks, work) == [True] * ranks


@pytest.mark.parametrize("before", ["rows", "average"])
def test_a_state_fits_whether_rows_or_whole_tables_travel(before: str) -> None:
    def work(communicator: Communicator) -> bool:
        rank, model = communicator.rank, started()
        optimizer = made(model, communicator, "diloco", parameters=dict.fromkeys(TABLES, before))
        trained(model, optimizer, rank, range(1, 6))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
        expected = trained(model, optimizer, rank, range(6, 11))
        after = {"rows": "average", "average": "rows"}[before]
        again = made(new := started(), communicator, "diloco", parameters=dict.fromkeys(TABLES, after))
        for name, x in values.items():
            new[name][:] = x
        again.synchronizer.load_state_dict(state)
        return trained(new, again, rank, range(6, 11)) == expected

    assert run_ranks(2, work) == [True] * 2


def test_optimizer_state_travels_whole() -> None:
    """Momentum moves all rows; a table is the first parameter."""

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        rank, model = communicator.rank, dict(reversed(started().items()))
        options = {"parameters": parameters, "optimizer_state": "average", "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(0.1, 0.5), model, Averaging(), PERIOD, **options)
        return trained(model, optimizer, rank)

    assert run_ranks(2, lambda c: work(c, TABLES)) == run_ranks(2, lambda c: work(c, None))


def test_groups_of_ranks() -> None:
    """Each group sends the rows that its ranks have touched, and none where they have touched none."""
    steps = {0: [0], 1: [1], 2: [], 3: [], 4: []}

    def work(communicator: Communicator) -> list[list[float]]:
        rank = communicator.rank
        group = Subset(communicator, lambda: [0, 1] if rank < 2 else [2, 3, 4])
        model = {"table": np.zeros((3, 2))}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 1, process_set=group, parameters="rows")
        for touched in (steps[rank], [2]):
            g = np.zeros((3, 2))
            g[touched] = -1.0 - rank
            optimizer.step({"table": g})
        return [row.tolist() for row in model["table"]]

    first, second = [[0.5] * 2, [1.0] * 2, [1.5] * 2], [[0.0] * 2, [0.0] * 2, [4.0] * 2]
    assert run_ranks(5, work) == [first, first, second, second, second]


def test_weights_and_a_rank_that_is_excluded() -> None:
    """A rank that is not finite is reset to the center and touches nothing; all others as in the dense exchange."""

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        rank, model = communicator.rank, started()
        options: dict[str, Any] = {"parameters": parameters, "weight": [3.0, 0.0, 2.5][rank], "nonfinite": "skip"}
        optimizer = made(model, communicator, "diloco", **options)
        seen = trained(model, optimizer, rank, range(1, 6))
        if rank == 2:
            model["table"][3] = np.nan
        return seen, trained(model, optimizer, rank, range(6, 13))

    for rows, dense in zip(run_ranks(3, lambda c: work(c, TABLES)), run_ranks(3, lambda c: work(c, None)), strict=True):
        assert rows == dense


def test_bytes() -> None:
    """A period touches 5 of 200 rows of 8 on rank 0, and 4 others on rank 1: 9 rows of 32 bytes, and 200 bits."""
    rows = [{1, 2, 3, 190, 199}, {4, 5, 6, 7}]

    def work(communicator: Communicator, policy: str, touched: set[int]) -> int:
        model, rank = {"table": np.ones((200, 8), "f4")}, communicator.rank
        optimizer = made(model, communicator, "average", parameters={"table": policy}, period=1)
        before = optimizer.synchronizer.counters.bytes_sent
        g = np.zeros((200, 8), "f4")
        g[sorted(touched & rows[rank])] = 1
        optimizer.step({"table": g})
        return optimizer.synchronizer.counters.bytes_sent - before

    everything = set(range(200))
    dense = run_ranks(2, lambda c: work(c, "average", everything))[0]
    none = run_ranks(2, lambda c: work(c, "rows", set()))[0]
    some = run_ranks(2, lambda c: work(c, "rows", everything))[0]
    assert dense - some == (200 - 9) * 32 - 32, "The bits take 25 bytes, and are padded to 32."
    assert some - none == (9 - 1) * 32, "At least one row travels."


@pytest.mark.thorough
def test_bytes_of_a_large_table() -> None:
    """12,000 of 50,257 rows of 768: 36.9 MB in place of 154.4."""
    rows, width, touched = 50257, 768, 12000

    def work(communicator: Communicator, policy: str) -> int:
        model, g = {"table": np.ones((rows, width), "f4")}, np.zeros((rows, width), "f4")
        optimizer = made(model, communicator, "average", parameters={"table": policy}, period=1)
        g[communicator.rank : 2 * touched : 4] = 1
        optimizer.step({"table": g})
        return optimizer.synchronizer.counters.bytes_sent

    dense, some = (run_ranks(2, lambda c, policy=policy: work(c, policy))[0] for policy in ("average", "rows"))
    assert round(dense / 1e6, 1) == 154.4
    assert round(some / 1e6, 1) == 36.9


def test_a_row_that_is_not_a_number_travels() -> None:
    def work(communicator: Communicator) -> list[bool]:
        model = {"table": np.zeros((3, 2))}
        optimizer = made(model, communicator, "average", parameters="rows", period=1, nonfinite="ignore")
        g = np.zeros((3, 2))
        g[1] = np.nan if communicator.rank else 0
        optimizer.step({"table": g})
        return [bool(row) for row in np.isnan(model["table"]).any(axis=1)]

    assert run_ranks(2, work) == [[False, True, False]] * 2


def test_a_warning_if_most_rows_travel(caplog: pytest.LogCaptureFixture) -> None:
    """Momentum goes on in rows without gradients. Over half, once, on one rank, counted over all buckets of a table."""

    def work(communicator: Communicator, touched: int) -> None:
        optimizer = made({"table": np.zeros((4, 2))}, communicator, "average", parameters="rows", period=1)
        for _ in range(3):
            g = np.zeros((4, 2))
            g[:touched] = 1 + communicator.rank
            optimizer.step({"table": g})

    with caplog.at_level(logging.WARNING, "hvd_periodic"):
        run_ranks(2, lambda c: work(c, 2))
        assert not caplog.records
        run_ranks(2, lambda c: work(c, 3))
    assert [r.getMessage() for r in caplog.records if "parameters='rows' saves little" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert caplog.records[0].getMessage().startswith("3 of 4 rows of 'table' have changed since the last exchange")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"parameters": {"x": "rows"}},
            "tensors of two axes and more, whose first axis counts the rows. Received: 'x'",
        ),
        ({"algorithm": Bounded(0.25)}, "'rows' for averaging, DiLoCo, SlowMo, BMUF and AGN, which make all replicas"),
        ({"center": "root"}, "can be 'rows' with center='replicated' only"),
        ({"center": "sharded"}, "can be 'rows' with center='replicated' only"),
        ({"compression": Compression.int8}, "`parameters` that are 'rows' travel with `compression` to 16 bits only"),
        ({"algorithm": AGN(), "asynchronous": True}, "`parameters` is for synchronous exchange"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    def work(communicator: Communicator) -> None:
        given = {"algorithm": Averaging(), "period": 2, "parameters": TABLES} | options
        PeriodicOptimizer(SGD(0.1), started(), process_set=communicator, **given)

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert text in message


def test_ranks_that_disagree() -> None:
    def work(communicator: Communicator) -> None:
        made(started(), communicator, "average", parameters=[TABLES, None][communicator.rank])

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "parameters of which rows travel" in message


def test_buckets_of_tables_hold_whole_rows_of_one_table() -> None:
    specs = [
        TensorSpec(name, shape, "f4", 4) for name, shape in (("a", (5,)), ("t", (7, 3)), ("u", (2, 2)), ("z", (9,)))
    ]
    for nbytes in range(4, 200, 4):
        layout = Layout(specs, nbytes)
        aligned = layout.by_rows([1, 2])
        assert [bucket.start for bucket in aligned.buckets[1:]] == [bucket.stop for bucket in aligned.buckets[:-1]]
        assert aligned.buckets[-1].stop == layout.buckets[-1].stop
        for bucket in aligned.buckets:
            tensors = {piece.tensor for piece in bucket.pieces}
            if tensors & {1, 2}:
                assert len(tensors) == 1
                assert bucket.size % specs[tensors.pop()].shape[1] == 0
