"""The cost model against what it is made of: counted traffic, simulated waiting, solvers of others, limits."""

from __future__ import annotations

import math
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Averaging, Compression
from hvd_periodic.comm.base import Communicator
from hvd_periodic.cost_model import (
    Costs,
    Job,
    Measurement,
    Method,
    Network,
    expected_largest,
    fit,
    fit_method,
    fit_network,
    seconds_per_step,
    sent_per_step,
    share_of_exchanges,
    shortest_period,
    typical,
    with_period,
)
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.wires import Half, Int8, Plain, TopK, Wire
from hvd_periodic.wires.encoded import Encoded
from tests.helpers import readable, run_ranks

JOB = Job(workers=8, nbytes=1e8, step=0.05, period=20, spread=0.004)
METHOD, NETWORK = Method(2e-3, 3e-10, bucket=math.inf), Network(5e-5, 1e-9)


def ring(workers: int, nbytes: int) -> tuple[int, int]:
    """Return the rounds of a ring all-reduce, and the bytes that each worker sends: pieces go round twice."""
    pieces = [nbytes // workers] * workers
    rounds = sent = 0
    for _hop in ("reduce", "hand on"):
        for turn in range(workers - 1):
            rounds += 1
            sent += pieces[-turn % workers]
    return rounds, sent


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_sum_travels_as_in_a_ring(workers: int) -> None:
    assert Plain().traffic(workers, 2400) == ring(workers, 2400)
    assert Half("f2").traffic(workers, 2400) == ring(workers, 1200)
    assert Half("f2").traffic(workers, 2400, lasting=True) == ring(workers, 1200)


def test_sixteen_bits_that_no_collective_sums_travel_encoded() -> None:
    """Over MPI as bfloat16 over Horovod: the type alone does not say who sums."""
    for kind, others in (("f2", frozenset({"bf2"})), ("bf2", frozenset({"f2"}))):
        for overlapped in (False, True):
            encoded = Int8().traffic(4, 1.0, overlapped)[0], Half("bf2").traffic(4, 1.0, overlapped)[1]
            assert Half(kind).traffic(4, 1.0, overlapped, others) == encoded
            assert Half(kind).decoded(4, 1.0, overlapped, others) == Int8().decoded(4, 1.0, overlapped)
        assert Half(kind).traffic(4, 2400.0, sums={kind}) == ring(4, 1200)
        assert Half(kind).decoded(4, 1.0, True, {kind}) == 0.0


@pytest.mark.parametrize("wire", [Int8(), TopK(0.01), Half("bf2"), Half("f2")], ids=readable)
def test_bytes_are_those_that_an_exchange_counts(wire: Wire) -> None:
    """Of 2 ranks; in two hops they also hand over the half that stays; the rest is what they tell each other."""
    elements = 1 << 16

    def program(communicator: Communicator) -> int:
        x = {"x": np.linspace(-1, 1, elements, dtype="f4")}
        optimizer = PeriodicOptimizer(SGD(0.1), x, Averaging(), 1, process_set=communicator, compression=wire)
        optimizer.step([np.ones(elements, "f4")])
        return optimizer.synchronizer.counters.bytes_sent

    counted = run_ranks(2, program)[0]
    _, sent = wire.traffic(2, 4 * elements, sums=()) if isinstance(wire, Half) else wire.traffic(2, 4 * elements)
    handed_over = sent if isinstance(wire, TopK) else 3 / 2 * sent
    assert counted == pytest.approx(handed_over, rel=0.05)


@pytest.mark.parametrize("wire", [TopK(0.01), Int8()], ids=readable)
@pytest.mark.parametrize("workers", [2, 3])
def test_decoded_bytes_are_those_that_grow_with_the_number_of_workers(wire: Encoded, workers: int) -> None:
    """In one hop a worker decodes what it has sent, and the messages of all, whole; in two, never more than of two."""
    elements, counted = 1 << 16, [0] * workers

    class Counting(type(wire)):  # type: ignore[misc]
        def decode(self, coding: Any, payload: Any, length: int) -> Any:
            found = super().decode(coding, payload, length)
            counted[int(threading.current_thread().name)] += found.size
            return found

    def program(communicator: Communicator) -> None:
        threading.current_thread().name = str(communicator.rank)
        x = {"x": np.linspace(-1, 1, elements, dtype="f4")}
        counting = Counting(**vars(wire))
        optimizer = PeriodicOptimizer(SGD(0.1), x, Averaging(), 1, process_set=communicator, compression=counting)
        counted[communicator.rank] = 0
        optimizer.step([np.ones(elements, "f4")])

    run_ranks(workers, program)
    fixed = elements if wire.sparse else (3 + 1 / workers) * elements
    for found in counted:
        assert 4 * (found - fixed) == pytest.approx(wire.decoded(workers, 4 * elements), abs=1e-3 * elements)
    assert Plain().decoded(workers, 1.0) == Half("f2").decoded(workers, 1.0, lasting=True) == 0.0
    assert Half("bf2").decoded(workers, 1.0, lasting=True) == workers


def test_the_slowest_of_many() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 8, 64):
        simulated = generator.standard_normal((20_000, count)).max(axis=1).mean()
        assert expected_largest(count) == pytest.approx(simulated, abs=0.03)


def test_waiting_is_that_of_simulated_workers() -> None:
    """Workers whose steps vary, who wait for each other at every exchange."""
    generator = np.random.default_rng(1)
    periods, steps = 4000, JOB.period
    times = generator.normal(JOB.step, JOB.spread, (periods, JOB.workers, steps)).sum(axis=2).max(axis=1)
    exchange = METHOD.begin + METHOD.work * JOB.nbytes + NETWORK.seconds(JOB.workers, JOB.nbytes)
    simulated = (times + exchange).mean() / steps
    assert seconds_per_step(JOB, METHOD, NETWORK) == pytest.approx(simulated, rel=2e-3)


@pytest.mark.parametrize(("own", "wire"), [(0.06, 0.02), (0.02, 0.06), (0.05, 0.05)])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_buckets_are_a_pipeline(count: int, own: float, wire: float) -> None:
    """A bucket is formed while the one before it travels; the network takes one at a time."""
    nbytes, formed, arrived = count * 1e6, 0.0, 0.0
    for _ in range(count):
        formed += own / count
        arrived = max(arrived, formed) + wire / count
    found = Method(1e-3, own / nbytes, bucket=1e6).seconds(nbytes, wire)
    assert found == pytest.approx(1e-3 + arrived)


def test_limits() -> None:
    """One worker sends nothing; long periods and full overlap leave local steps, and what workers do themselves."""
    alone = replace(JOB, workers=1)
    own = METHOD.begin + METHOD.work * JOB.nbytes
    assert seconds_per_step(alone, METHOD, NETWORK) == pytest.approx(JOB.step + own / JOB.period)
    assert seconds_per_step(replace(JOB, period=10**9), METHOD, NETWORK) == pytest.approx(JOB.step, rel=1e-4)
    hidden = seconds_per_step(replace(JOB, overlap=19), METHOD, NETWORK)
    assert hidden == pytest.approx(JOB.step + own / JOB.period)
    exposed = seconds_per_step(JOB, METHOD, NETWORK)
    assert exposed > hidden
    compressed = replace(JOB, wire=Compression.int8)
    assert hidden < seconds_per_step(compressed, METHOD, NETWORK) < exposed
    in_parts = replace(JOB, fragments=4, spread=0.0)
    more = 3 * METHOD.begin / JOB.period + 3 * 14 * NETWORK.message / JOB.period
    whole = seconds_per_step(replace(JOB, spread=0.0), METHOD, NETWORK)
    assert seconds_per_step(in_parts, METHOD, NETWORK) == pytest.approx(whole + more)


def test_a_fit_finds_what_measurements_were_made_of() -> None:
    methods = {
        "averaging": Method(1e-3, 2e-10),
        "elastic": Method(2e-3, 5e-9),
        "flat": Method(1e-4, 0.0),
        "waits for all": Method(1e-3, 2e-9, bucket=math.inf, tensor=3e-5),
        "largest": Method(2e-3, 4e-9, decode=3e-10),
    }
    wires = {"elastic": Int8(), "largest": TopK(0.01)}
    costs = Costs(Network(2e-5, 1e-9), methods)
    made = [
        Measurement(
            *(name, workers, nbytes, 1.0, wires.get(name, Plain()), workers / 2, methods[name].bucket, tensors, 1e-4)
        )
        for name in methods
        for workers in (2, 4)
        for nbytes, tensors in ((4e4, 20), (4e6, 20), (4e8, 161))
    ]
    made = [replace(each, seconds=costs.predicted(each)) for each in made]
    found = fit(made)
    assert found.network.message == pytest.approx(costs.network.message)
    assert found.network.byte == pytest.approx(costs.network.byte)
    for name, method in methods.items():
        assert found.methods[name].begin == pytest.approx(method.begin)
        assert found.methods[name].work == pytest.approx(method.work, abs=1e-16)
        assert found.methods[name].tensor == pytest.approx(method.tensor, abs=1e-12)
        assert found.methods[name].decode == pytest.approx(method.decode, abs=1e-16)


def test_a_fit_finds_what_no_longer_fits_into_a_cache() -> None:
    """Of a method that is slower beyond some size; of the other, which is not, it says nothing."""
    methods = {"averaging": Method(1e-3, 2e-10), "largest": Method(2e-3, 2e-9, uncached=3e-9, cache=8e6)}
    costs = Costs(Network(2e-5, 1e-9), methods)
    made = [
        Measurement(name, workers, nbytes, 1.0, bucket=methods[name].bucket)
        for name in methods
        for workers in (2, 4)
        for nbytes in (4e4, 4e6, 8e6, 2e7, 1e8)
    ]
    found = fit([replace(each, seconds=costs.predicted(each)) for each in made]).methods
    assert found["averaging"].cache == math.inf
    assert found["averaging"].uncached == 0
    assert found["largest"].cache == 8e6
    assert found["largest"].work == pytest.approx(2e-9, rel=1e-3)
    assert found["largest"].uncached == pytest.approx(3e-9, rel=1e-3)


def test_a_fit_takes_exchanges_of_nothing() -> None:
    made = [Measurement("averaging", 2, nbytes, 1e-3 + 1e-8 * nbytes) for nbytes in (0.0, 1e6, 4e6)]
    costs = fit(made)
    assert [costs.predicted(each) for each in made] == pytest.approx([each.seconds for each in made])


@pytest.mark.parametrize("fragments", range(1, 30))
def test_what_just_fits_into_the_cache_does_in_any_number_of_fragments(fragments: int) -> None:
    method = Method(0.0, 1e-9, bucket=math.inf, uncached=2e-9, cache=4e6)
    job = Job(workers=1, nbytes=4e6, step=0.0, period=30, fragments=fragments)
    assert seconds_per_step(job, method, NETWORK) == pytest.approx(4e-3 / 30)


def test_a_fragment_is_found_in_the_cache_where_all_of_them_are() -> None:
    method = Method(0.0, 1e-9, bucket=math.inf, uncached=2e-9, cache=1e6)
    job = Job(workers=1, nbytes=2e6, step=0.0, period=10, fragments=4)
    assert seconds_per_step(job, method, NETWORK) == pytest.approx(3e-9 * 2e6 / 10)
    assert seconds_per_step(replace(job, overlap=1), method, NETWORK) == pytest.approx(3e-9 * 2e6 / 10)
    assert seconds_per_step(replace(job, nbytes=1e6), method, NETWORK) == pytest.approx(1e-9 * 1e6 / 10)


def test_workers_that_share_a_core_sleep_at_the_same_time() -> None:
    """What they do takes twice as long where two share one; Horovod's cycle does not."""
    costs = Costs(Network(0.0, 0.0), {"flat": Method(3e-3, 0.0)})
    measured = Measurement("flat", 4, 4.0, 1.0, sharing=2, asleep=1e-3)
    assert costs.predicted(measured) == pytest.approx(1e-3 + 2 * 2e-3)
    assert costs.predicted(replace(measured, asleep=4e-3)) == pytest.approx(4e-3)


@pytest.mark.parametrize("overlap", [0, 19])
def test_messages_that_all_decode_whole_limit_the_number_of_workers(overlap: int) -> None:
    """On a network that costs nothing: each worker more is a message more to decode, which no overlap hides."""
    method = replace(METHOD, decode=2e-10, tensor=1e-5)
    job = replace(JOB, overlap=overlap, wire=TopK(0.01), spread=0.0, tensors=100)
    own = method.begin + 100 * method.tensor + method.work * job.nbytes
    for workers in (2, 64, 1024):
        seconds = seconds_per_step(replace(job, workers=workers), method, Network(0.0, 0.0))
        assert seconds == pytest.approx(job.step + (own + workers * method.decode * job.nbytes) / job.period)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0}, "`period` must be an int >= 1. Received: 0"),
        ({"workers": 2.5}, "`workers` must be an int >= 1. Received: 2.5"),
        ({"overlap": 21}, "fragments=1, overlap=21, period=20"),
        ({"fragments": 21}, "fragments=21, overlap=0, period=20"),
        ({"step": float("nan")}, "`step` must be zero or positive and finite. Received: nan"),
    ],
    ids=readable,
)
def test_numbers_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        replace(JOB, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.0}, "`seconds` must be positive and finite. Received: 0.0"),
        ({"seconds": float("nan")}, "`seconds` must be positive and finite. Received: nan"),
        ({"tensors": 0}, "`tensors` must be an int >= 1. Received: 0"),
        ({"asleep": -1.0}, "`asleep` must be zero or positive and finite. Received: -1.0"),
        ({"workers": 0}, "`workers` must be an int >= 1. Received: 0"),
        ({"nbytes": -1.0}, "`nbytes` must be zero or positive and finite. Received: -1.0"),
        ({"sharing": 0.5}, "`sharing` must be at least 1. Received: 0.5"),
        ({"bucket": 0.0}, "`bucket` must be positive. Received: 0.0"),
    ],
    ids=readable,
)
def test_measurements_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        replace(Measurement("flat", 2, 1.0, 1.0), **change)


@pytest.mark.parametrize("change", [{"cache": 0.0}, {"uncached": -1e-9}], ids=readable)
def test_costs_that_cannot_be(change: dict[str, Any]) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must be ") + ".*positive.* Received: " + str(value)):
        replace(METHOD, **change)


def test_a_network_is_found_from_one_number_of_workers() -> None:
    """The solver of others agrees, also where noise makes one of the costs zero."""
    nnls = pytest.importorskip("scipy.optimize").nnls
    generator = np.random.default_rng(0)
    zeros = 0
    for _ in range(50):
        made = Network(10 ** generator.uniform(-7, -3), 10 ** generator.uniform(-11, -7))
        sizes = [4e3, 4e5, 4e6]
        noise = np.exp(0.5 * generator.standard_normal(3))
        measured = [(size, made.seconds(3, size) * factor) for size, factor in zip(sizes, noise, strict=True)]
        found = fit_network(3, measured)
        rows = np.array([[x / seconds for x in Plain().traffic(3, size)] for size, seconds in measured])
        scale = np.linalg.norm(rows, axis=0)
        expected = nnls(rows / scale, np.ones(3))[0] / scale
        np.testing.assert_allclose([found.message, found.byte], expected, rtol=1e-6, atol=1e-18)
        zeros += 0.0 in (found.message, found.byte)
    assert 0 < zeros < 50


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("wire", [Plain(), Int8()], ids=readable)
def test_the_shortest_period_is_the_shortest(overlap: int, wire: Wire) -> None:
    job = replace(JOB, overlap=overlap, wire=wire)
    for share in (0.5, 0.1, 0.01):
        period = shortest_period(job, METHOD, NETWORK, share)
        assert period is not None
        assert share_of_exchanges(with_period(job, period), METHOD, NETWORK) <= share
        if period > 1 + overlap:
            assert share_of_exchanges(with_period(job, period - 1), METHOD, NETWORK) > share
    assert shortest_period(job, METHOD, NETWORK, 0.01, longest=3) is None


def test_shares_and_traffic() -> None:
    """A share is what is left of the time without local steps; traffic is that of an exchange, over its period."""
    seconds = seconds_per_step(JOB, METHOD, NETWORK)
    assert share_of_exchanges(JOB, METHOD, NETWORK) == pytest.approx((seconds - JOB.step) / seconds)
    assert share_of_exchanges(replace(JOB, step=0.0, spread=0.0), METHOD, NETWORK) == 1.0
    assert sent_per_step(JOB) == pytest.approx(2 * 7 / 8 * 1e8 / 20)
    assert sent_per_step(replace(JOB, fragments=4)) == pytest.approx(sent_per_step(JOB))


def test_typical_costs_are_those_of_the_documents() -> None:
    """An exchange of 102 MB takes 1.8 to 2.1 allreduces of 43 to 48 ms, and one of 25 MB 20 ms more than the wire."""
    assert 0.9 * 1.84 < typical().seconds(102.2e6, 0.045) / 0.045 < 1.25 * 2.11
    assert 0.2 < typical().seconds(25e6, 0.2) < 0.23


ENCODED: dict[str, Any] = {
    "int8": Compression.int8,
    "int4": Compression.int4,
    "e3m0": Compression.e3m0,
    "int2": Compression.int2,
    "topk(0.01)": Compression.topk(0.01),
    "topk(chunk=4096, keep=64)": Compression.topk(chunk=4096, keep=64),
}


@pytest.mark.parametrize("name", ENCODED)
def test_costs_of_encoding_are_those_of_the_documents(name: str) -> None:
    """Milliseconds for 25.6 million float32 with PyTorch, in the hops of an exchange of two ranks."""
    page = (Path(__file__).parents[2] / "docs/performance/index.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    encode, decode = (float(cell) / 1e3 / (4 * 25.6e6) for cell in line.split("|")[2:4])
    expected = encode + decode if ENCODED[name].sparse else 1.5 * encode + 3.5 * decode
    assert ENCODED[name].coding_seconds == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("wire", [Plain(), Int8(), TopK(0.01)], ids=readable)
def test_a_method_is_found_on_a_network(wire: Wire) -> None:
    method = Method(2e-3, 5e-9)
    sizes = (4e4, 4e6, 1.6e7)
    made = [(size, method.seconds(size, NETWORK.seconds(3, size, wire))) for size in sizes]
    assert fit_method(NETWORK, 3, made, wire) == method
    faster = [(size, NETWORK.seconds(3, size, wire) / 2) for size in sizes]
    assert fit_method(NETWORK, 3, faster, wire) == Method(0.0, 0.0)
    with pytest.raises(ValueError, match="`exchanges` must have at most 16777216 bytes"):
        fit_method(NETWORK, 3, [(1.0, 1.0), (1e9, 1.0)])


def test_a_network_cannot_be_found_from_nothing() -> None:
    with pytest.raises(
        ValueError, match=re.escape("`allreduces` must have at least two sizes. Received: [(4.0, 1.0)]")
    ):
        fit_network(2, [(4.0, 1.0)])
    with pytest.raises(ValueError, match=r"`workers` must be an int >= 2\. Received: 1"):
        fit_network(1, [(4.0, 1.0), (8.0, 1.0)])
    with pytest.raises(ValueError, match="`seconds` must be positive"):
        fit_network(2, [(4.0, 1.0), (8.0, 0.0)])


def test_a_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'hvd_periodic[costs]'")):
        fit([])


def test_nothing_is_fitted_to_nothing() -> None:
    with pytest.raises(ValueError, match="`measurements` must not be empty"):
        fit([])
