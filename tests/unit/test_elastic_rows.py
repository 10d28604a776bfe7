"""Tables of which only touched rows travel in elastic averaging, on numpy: the dense exchange within rounding."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_periodic import EASGD, Communicator, Compression
from hvd_periodic.numpy import SGD, NumpyReplica, PeriodicOptimizer
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from tests import oracle
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks
from tests.unit.test_rows import BUCKET_BYTES, PERIOD, STEPS, TABLES, Model, gradients_of, started

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {},
    "buckets below a row": {},
    "overlap": {"overlap": 1},
    "overlap of a period": {"overlap": "period"},
    "fragments": {"fragments": 3},
    "audit": {"audit_every": 1},
}
RATES = [None, 0.05, 0.25, 0.45]
"""α of the default is 1/(n + 1); the last one overshoots."""


class Rule:
    """Gradient descent that the package does not know."""

    def step(self, parameters: list[Array], gradients: list[Array | None]) -> None:
        SGD(0.1).step(parameters, gradients)


def made(model: Model, communicator: Communicator, rate: float | None = 0.2, **options: Any) -> PeriodicOptimizer:
    options = {"optimizer": SGD(0.1), "algorithm": EASGD(rate), "period": PERIOD, "parameters": TABLES} | options
    return PeriodicOptimizer(model=model, process_set=communicator, **options)


def trained(model: Model, optimizer: PeriodicOptimizer, rank: int, steps: range = range(1, STEPS + 1)) -> list[Any]:
    """Return the values after each step, and those of the center at the end."""
    seen = []
    for step in steps:
        optimizer.step(gradients_of(rank, step, model))
        seen.append(copy.deepcopy(model))
    with optimizer.center():
        return [*seen, copy.deepcopy(model)]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, x in one.items():
            np.testing.assert_allclose(x, other[name], rtol=0, atol=1e-13, err_msg=name)


def both_ways(ranks: int, work: Any) -> Any:
    """Return the results of the ranks for tables of which rows travel, and for whole ones."""
    return zip(run_ranks(ranks, lambda c: work(c, TABLES)), run_ranks(ranks, lambda c: work(c, None)), strict=True)


@pytest.mark.filterwarnings("ignore:.*overshoot")
@pytest.mark.parametrize(("rate", "way", "ranks"), covering(RATES, WAYS, (2, 3), together=1))
def test_the_dense_exchange(rate: float | None, way: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters after every step, and the center, with other rows touched on every rank in every period."""
    cut = partial(NumpyReplica, bucket_bytes=BUCKET_BYTES.get(way, DEFAULT_BUCKET_BYTES))
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", cut)

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        model = started()
        optimizer = made(model, communicator, rate, parameters=parameters, **WAYS[way])
        seen = trained(model, optimizer, communicator.rank)
        optimizer.finalize()
        return [*seen, model], optimizer.synchronizer.counters.bytes_sent

    for (rows, fewer), (dense, more) in both_ways(ranks, work):
        assert_close(rows, dense)
        if way != "buckets below a row":  # Each of them has its own bits.
            assert fewer < more


@pytest.mark.parametrize(("ranks", "rate"), [(1, 0.3), (2, 0.25), (3, 0.25), (4, 0.1)])
def test_the_oracle(ranks: int, rate: float) -> None:
    """α(n + 1) is .6, .75, 1 and .5. Also the bytes: rows of 8 bytes, at least one, and 64 bits."""
    exchanges = oracle.periodic(2)
    (expected, center), travelled = oracle.easgd_of_table(ranks, exchanges, rate)

    def work(communicator: Communicator) -> Any:
        table = np.array(oracle.START)[:, None]
        optimizer = made({"t": table}, communicator, rate, period=2, parameters="rows", optimizer=SGD(oracle.RATE))
        sent = []
        for step in range(1, oracle.STEPS + 1):
            g = oracle.of_table(communicator.rank, step, table[:, 0].tolist())
            before = optimizer.synchronizer.counters.bytes_sent
            optimizer.step({"t": np.array(g)[:, None]})
            sent += [optimizer.synchronizer.counters.bytes_sent - before] if step in exchanges else []
        x = table[:, 0].tolist()
        with optimizer.center():
            return x, table[:, 0].tolist(), sent

    results = run_ranks(ranks, work)
    of_record = results[0][2][0] - 8 * max(1, len(travelled[0]))
    for (x, c, sent), row in zip(results, expected, strict=True):
        assert x == pytest.approx(row, rel=1e-12)
        assert c == pytest.approx(center, rel=1e-12)
        assert [each - of_record for each in sent] == [8 * max(1, len(rows)) for rows in travelled]
    assert len({tuple(rows) for rows in travelled}) > 2, "other rows in each period"


def test_the_oracle_is_that_of_whole_tables() -> None:
    for n, rate in ((1, 0.3), (2, 0.25), (3, 0.25)):
        (x, c), _ = oracle.easgd_of_table(n, oracle.periodic(2), rate)
        steps = iter(range(n * oracle.STEPS))  # Workers descend one after another.

        def gradient(worker: int, of: Any, n: int = n, steps: Any = steps) -> list[float]:
            return oracle.of_table(worker, next(steps) // n + 1, of)

        dense, center = oracle.easgd(n, oracle.periodic(2), lambda _, rate=rate: rate, gradient=gradient)
        assert np.array([*x, c]) == pytest.approx(np.array([*dense, center]), rel=1e-12)


@pytest.mark.parametrize("rate", [None, 0.2])
@pytest.mark.parametrize(("options", "ranks"), [({}, 2), ({"overlap": 2}, 2), ({"fragments": 2}, 2), ({}, 3)], ids=str)
def test_training_resumes_to_the_bit(rate: float | None, options: dict[str, Any], ranks: int) -> None:
    """In the middle of a period, and with an exchange in flight."""

    def work(communicator: Communicator) -> Any:
        rank, model = communicator.rank, started()
        optimizer = made(model, communicator, rate, **options)
        trained(model, optimizer, rank, range(1, 8))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
        sums = [key for key in state["vectors"]["parameters"] if key.startswith("untouched_sums")]
        assert sums == ([] if rate is None else [f"untouched_sums.{rank}.{ranks}"]), "at α(n + 1) = 1, no table is kept"
        expected = trained(model, optimizer, rank, range(8, 15))
        again = made(new := started(), communicator, rate, **options)
        for name, x in values.items():
            new[name][:] = x
        again.synchronizer.load_state_dict(state)
        found = trained(new, again, rank, range(8, 15))
        return [[x.tobytes() for x in each.values()] for of in (found, expected) for each in of]

    for seen in run_ranks(ranks, work):
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def changed(how: str, communicator: Communicator, parameters: dict[str, str] | None) -> list[Any]:
    """Return the values after a state was loaded, or another set adopted, in mid-training."""
    rank, model = communicator.rank, started()
    before = {"table": "average", "deep": "rows"} if parameters and how == "of other tables" else parameters
    optimizer = made(model, communicator, parameters=before)
    trained(model, optimizer, rank, range(1, 8))
    if how == "another set":
        del model["x"]
        optimizer.adopt(model)
        return trained(model, optimizer, rank, range(8, 15))
    state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
    again = made(new := started(), communicator, parameters=parameters)
    if how == "of the root on all":
        state, values = communicator.broadcast_object((state, values), "state", 0)
    if how != "on the root alone" or rank == 0:
        for name, x in values.items():
            new[name][:] = x
        again.synchronizer.load_state_dict(state)
    return trained(new, again, rank, range(8, 15))


@pytest.mark.parametrize("how", ["of other tables", "of the root on all", "on the root alone", "another set"])
def test_states_of_other_ranks_and_tables(how: str) -> None:
    """Where this rank does not know the sums, all rows travel once."""
    for rows, dense in both_ways(3, partial(changed, how)):
        assert_close(rows, dense)


def test_a_state_of_more_ranks() -> None:
    """Each rank loads its own, of three there were: their sums are not those of two."""

    def states(communicator: Communicator, parameters: Any) -> Any:
        model = started()
        optimizer = made(model, communicator, parameters=parameters)
        trained(model, optimizer, communicator.rank, range(1, 8))
        return optimizer.synchronizer.state_dict(), model

    def go_on(communicator: Communicator, parameters: Any, saved: Any) -> list[Any]:
        state, values = saved[communicator.rank]
        optimizer = made(model := copy.deepcopy(values), communicator, parameters=parameters)
        for name, x in values.items():
            model[name][:] = x
        optimizer.synchronizer.load_state_dict(state)
        return trained(model, optimizer, communicator.rank, range(8, 15))

    saved = {bool(p): run_ranks(3, lambda c, p=p: states(c, p)) for p in (TABLES, None)}
    for rows, dense in both_ways(2, lambda c, p: go_on(c, p, saved[bool(p)])):
        assert_close(rows, dense)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"overlap": 1}], ids=str)
def test_a_rank_that_is_excluded(options: dict[str, Any]) -> None:
    """It is reset to the center in all rows, so that all of them travel once."""

    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        rank, model = communicator.rank, started()
        optimizer = made(model, communicator, parameters=parameters, nonfinite="skip", **options)
        seen = trained(model, optimizer, rank, range(1, 6))
        if rank == 2:
            model["table"][3] = np.nan
        return [*seen, *trained(model, optimizer, rank, range(6, 14))[1:]]

    for rows, dense in both_ways(3, work):
        assert_close(rows, dense)


def test_present_parameters_besides() -> None:
    def work(communicator: Communicator, parameters: dict[str, str] | None) -> Any:
        model = started()
        optimizer = made(model, communicator, parameters={"x": "present", **(parameters or {})})
        return trained(model, optimizer, communicator.rank)

    for rows, dense in both_ways(2, work):
        assert_close(rows, dense)


def test_complex_and_16_bit_tables() -> None:
    """The center of 16-bit tables has 32 bits, so that untouched rows are rounded on their own."""
    for dtype, tolerance in (("c16", 1e-13), ("f2", 4e-3)):

        def work(communicator: Communicator, parameters: Any, dtype: str = dtype) -> Array:
            table = np.ones((7, 2), dtype)
            optimizer = made({"table": table}, communicator, parameters=parameters)
            for step in range(STEPS):
                g = np.zeros_like(table)
                g[(communicator.rank + step) % 5] = 1 + (communicator.rank + (1j if dtype == "c16" else 0))
                optimizer.step({"table": g})
            return table

        for rows, dense in zip(
            run_ranks(2, lambda c: work(c, "rows")), run_ranks(2, lambda c: work(c, None)), strict=True
        ):
            np.testing.assert_allclose(rows, dense, rtol=0, atol=tolerance)


def test_a_row_whose_gradient_is_not_a_number_travels() -> None:
    def work(communicator: Communicator) -> list[bool]:
        model = {"table": np.zeros((3, 2))}
        optimizer = made(model, communicator, parameters="rows", period=1, nonfinite="ignore")
        g = np.zeros((3, 2))
        g[1] = np.nan if communicator.rank else 0
        optimizer.step({"table": g})
        with optimizer.center():
            return [bool(row) for row in np.isnan(model["table"]).any(axis=1)]

    assert run_ranks(2, work) == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": SGD(0.1, 0.9)}, "leaves rows without gradients alone, .* Received: SGD with momentum=0.9"),
        ({"optimizer": Rule()}, "Received: Rule, which is not known to leave them alone"),
        ({"algorithm": EASGD(0.2, rho=0.1)}, "in elastic averaging with rho=0 only"),
        ({"max_message_norm": 1.0}, "in elastic averaging `parameters` that are 'rows' send some rows only"),
        ({"compression": Compression.fp16}, "In elastic averaging, `parameters` that are 'rows' travel without"),
        ({"center": "root"}, "can be 'rows' with center='replicated' only"),
        ({"asynchronous": True}, "`parameters` is for synchronous exchange"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    def work(communicator: Communicator) -> None:
        """One rank alone may have a reason to refuse; all are told."""
        made(started(), communicator, **({} if communicator.rank and "optimizer" in options else options))

    (kind, message), other = errors(2, work)
    assert kind is ValueError
    assert all(re.search(text, each) for each in (message, other[1]))


def test_momentum_that_is_switched_on_in_mid_training() -> None:
    def work(communicator: Communicator) -> None:
        model, rank = started(), communicator.rank
        optimizer = made(model, communicator)
        trained(model, optimizer, rank, range(1, 5))
        optimizer.inner.momentum = 0.5 * rank
        trained(model, optimizer, rank, range(5, 8))

    for kind, message in errors(2, work):
        assert kind is RuntimeError
        assert "Received: SGD with momentum=0.5" in message


def test_gradients_have_to_be_shown() -> None:
    def work(communicator: Communicator) -> None:
        optimizer = made(started(), communicator)
        optimizer.synchronizer.step()

    for kind, message in errors(1, work):
        assert kind is RuntimeError
        assert "A parameter of which 'rows' travel in elastic averaging needs every local gradient" in message


def test_a_rate_that_changes_between_exchanges() -> None:
    """No table is kept at α(n + 1) = 1; once it is not, all rows travel at the next exchange."""

    class Falling(EASGD):
        def rate(self, exchange: Any) -> float:
            return 1 / (exchange.size + 1) if exchange.period == 1 else 0.2

    def work(communicator: Communicator, parameters: Any) -> Any:
        model = started()
        optimizer = made(model, communicator, algorithm=Falling(), parameters=parameters)
        return trained(model, optimizer, communicator.rank)

    for rows, dense in both_ways(2, work):
        assert_close(rows, dense)
