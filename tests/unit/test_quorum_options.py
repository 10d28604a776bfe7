"""Rounds with a quorum and other options of synchronous exchange: skipped ranks, bounds on norms, compression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, Compression
from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging, DiLoCo
from hvd_periodic.journal.files import read_run_log
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.wires.base import Link, Sent, Wire
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.unit.test_quorum import CURVATURE, EVERY, LONG, MINIMUM, PERIOD, RATE, Trainer, arrays, made, step

BROKEN: dict[int, Sequence[int]] = {1: [1], 2: [0, 2], 3: [0, 1, 2], 5: [2]}
"""Ranks that are not finite at an exchange, by its number."""


@pytest.mark.parametrize("name", EVERY)
def test_in_rounds_of_all_who_is_not_finite_is_left_out_as_synchronously(name: str) -> None:
    """To the bit; also the root, and all of them: under BMUF, these take what the center hands out, and not W."""
    broken = {key: ranks for key, ranks in BROKEN.items() if name != "bmuf" or len(ranks) < 3}

    def work(communicator: Communicator, **options: Any) -> list[Any]:
        xs, seen, rank = arrays(), [], communicator.rank
        optimizer = made(communicator, name, xs, nonfinite="skip", **options)
        if options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 6)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(6):
            for _ in range(PERIOD - 1):
                step(optimizer, xs, rank)
            if rank in broken.get(number, ()):
                xs["w"][1, 2] = np.nan
            step(optimizer, xs, rank)
            seen += [x.copy() for x in xs.values()]
            seen += [np.array(v) for v in optimizer.inner.velocities or []]  # type: ignore[attr-defined]
            with optimizer.center():
                seen += [x.copy() for x in xs.values()]
        optimizer.finalize()
        counters = optimizer.synchronizer.counters
        return [*seen, *xs.values(), np.array([counters.left_out, counters.rounds])]

    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.isfinite(one).all()


BOUNDS: dict[str, dict[str, Any]] = {
    "message": {"max_message_norm": 0.3},
    "median": {"max_message_norm": "median"},
    "mean": {"max_mean_norm": 0.2},
    "both, skip": {"max_message_norm": "median", "max_mean_norm": 0.2, "nonfinite": "skip"},
}


@pytest.mark.parametrize(("name", "bounds"), covering(EVERY, BOUNDS, together=1))
def test_in_rounds_of_all_norms_are_bounded_as_synchronously(name: str, bounds: str, tmp_path: Path) -> None:
    """To the bit, also the norms that the run log has."""
    given = {key: value for key, value in BOUNDS[bounds].items() if name != "easgd" or key != "max_mean_norm"}

    def work(communicator: Communicator, log: str, **options: Any) -> list[Any]:
        xs, seen, rank = arrays(), [], communicator.rank
        optimizer = made(communicator, name, xs, run_log=tmp_path / log, **given, **options)
        if options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 6)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(5 * PERIOD + 1):
            if number == 2 * PERIOD - 1 and rank == 1 and "nonfinite" in given:
                xs["w"][0, 0] = np.nan
            step(optimizer, xs, rank)
            seen += [x.copy() for x in xs.values()]
            if number % PERIOD == 1:
                with optimizer.center():
                    seen += [x.copy() for x in xs.values()]
        optimizer.finalize()
        return [*seen, *xs.values()]

    rounds, synchronous = run_ranks(3, lambda c: work(c, "q", quorum=2)), run_ranks(3, lambda c: work(c, "s"))
    for here, there in zip(rounds, synchronous, strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)
    norms = [
        [
            (line.get("message_norm"), line.get("mean_norm"), line.get("left_out"))
            for line in lines
            if line["event"] == "exchanged"
        ]
        for log in "qs"
        for lines in read_run_log(tmp_path / log).values()
    ]
    assert norms[:3] == norms[3:]
    for message, mean, left_out in (line for lines in norms[:3] for line in lines):
        assert (message is not None) == ("max_message_norm" in given and not left_out)
        assert (mean is not None) == ("max_mean_norm" in given)
    assert any(left_out for *_, left_out in norms[1]) == ("nonfinite" in given)


@pytest.mark.parametrize("bound", [0.2, "median"])
@pytest.mark.parametrize("kind", ["averaging", "easgd"])
def test_in_rounds_of_some_messages_are_bounded_among_them(kind: str, bound: float | str) -> None:
    algorithm = Averaging() if kind == "averaging" else EASGD(0.25)
    mean = 0.1 if kind == "averaging" else None

    def work(communicator: Communicator) -> tuple[list[float], float]:
        trainer = Trainer(communicator, algorithm, quorum=2, max_message_norm=bound, max_mean_norm=mean)
        return trainer.centers_after(LONG), float(trainer.x[0])

    x, h, c, pending, expected = [0.0] * 3, [0.0] * 3, 0.0, [True] * 3, []
    for members in LONG:
        for i in range(3):
            for _ in range(PERIOD if pending[i] else 0):
                x[i] -= RATE * CURVATURE[i] * (x[i] - MINIMUM[i])
            pending[i] = i in members
        d = {i: x[i] - (h[i] if kind == "averaging" else c) for i in sorted(members)}
        limit = float(np.median([abs(each) for each in d.values()])) if bound == "median" else float(bound)
        d = {i: each * min(1.0, limit / abs(each)) for i, each in d.items()}
        if mean is None:
            c += 0.25 * sum(d.values())
            for i in members:
                x[i] -= 0.25 * d[i]
        else:
            g = sum(d.values()) / len(members)
            c += g * min(1.0, mean / max(abs(g), 1e-300))
            for i in members:
                x[i] = h[i] = c
        expected.append(c)
    for rank, (centers, last) in enumerate(run_ranks(3, work)):
        assert centers == pytest.approx(expected, rel=1e-12)
        if rank in LONG[-1]:
            assert last == pytest.approx(x[rank], rel=1e-12)


OUT: Sequence[Sequence[int]] = [[], [2], [0, 2], [], [0], [2], []]
"""Those who are not finite in each round of ``LONG``."""


def oracle(kind: str, power: float) -> list[float]:
    """Return c after every round of ``LONG``, from the equations: without those who are not finite, who take it."""
    x, h, a, since, pending = [0.0] * 3, [0.0] * 3, [0.0] * 3, [0] * 3, [True] * 3
    c, centers, number = 0.0, [], 0
    for members, out in zip(LONG, OUT, strict=True):
        for i in range(3):
            for _ in range(PERIOD if pending[i] else 0):
                gradient = CURVATURE[i] * (x[i] - MINIMUM[i])
                x[i] -= RATE * gradient
                a[i] += gradient
            pending[i] = i in members
        counted = [i for i in sorted(members) if i not in out]
        before = c
        if kind == "averaging" and counted:
            w = {i: (1 + number - since[i]) ** -power for i in counted}
            c -= sum(w[i] * (h[i] - x[i]) for i in counted) / sum(w.values())
        elif kind == "easgd":
            d = {i: x[i] - c for i in counted}
            c += 0.25 * sum(d.values())
            for i in counted:
                x[i] -= 0.25 * d[i]
        elif kind == "agn":
            c -= 0.1 * sum(a[i] / PERIOD for i in counted)
        number += bool(counted)
        for i in members:
            if kind != "easgd":
                x[i] = h[i] = c
            elif i in out:
                x[i] = before
            a[i], since[i] = 0.0, number
        centers.append(c)
    return centers


@pytest.mark.parametrize(
    ("kind", "algorithm", "options"),
    [
        ("averaging", Averaging(), {"staleness_power": 0.5}),
        ("easgd", EASGD(0.25), {}),
        ("agn", AGN(), {"outer_optimizer": SGD(0.1)}),
    ],
)
def test_in_rounds_of_some_the_others_move_the_center(kind: str, algorithm: Algorithm, options: dict[str, Any]) -> None:
    """One round has nobody else: its members take the center, which stays."""

    def work(communicator: Communicator) -> tuple[list[float], int]:
        trainer = Trainer(communicator, algorithm, quorum=2, nonfinite="skip", **options)
        trainer.replay([sorted(members) for members in LONG])
        rank, centers = communicator.rank, []
        for members, out in zip(LONG, OUT, strict=True):
            for left in reversed(range(PERIOD if rank in members else 0)):
                gradient = np.nan if left == 0 and rank in out else CURVATURE[rank] * (trainer.x - MINIMUM[rank])
                trainer.optimizer.step([np.array(gradient).reshape(1)])
            communicator.allgather_object(None, "closed")
            centers.append(trainer.center())
            communicator.allgather_object(None, "seen")
        return centers, trainer.optimizer.synchronizer.counters.left_out

    expected = oracle(kind, options.get("staleness_power", 0.0))
    results = run_ranks(3, work)
    for centers, _ in results:
        assert centers == pytest.approx(expected, rel=1e-12)
    assert [count for _, count in results] == [2, 0, 3]


def unsent(optimizer: PeriodicOptimizer) -> Any:
    """Return a copy of the error memory of a rank."""
    return optimizer.synchronizer.state_dict()["vectors"]["parameters"]["unsent"]["w"].copy()


@pytest.mark.parametrize(
    ("name", "bounded"), covering([name for name in EVERY if name != "easgd"], (False, True), together=1)
)
def test_in_rounds_of_all_sparse_messages_are_as_synchronously(name: str, bounded: bool, tmp_path: Path) -> None:
    """To the bit, where ranks sum in float32; also their error memory, and the norms of the run log."""

    bounds: dict[str, Any] = {"max_message_norm": 0.3, "max_mean_norm": 0.2} if bounded else {}

    def work(communicator: Communicator, **options: Any) -> list[Any]:
        xs = {"w": np.linspace(-1, 1, 20, dtype=np.float32)}
        log = tmp_path / ("rounds" if options else "synchronous")
        optimizer = made(communicator, name, xs, compression=Compression.topk(0.3), run_log=log, **bounds, **options)
        if options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 6)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        seen = []
        for _ in range(5 * PERIOD + 1):
            step(optimizer, xs, communicator.rank)
            seen += [xs["w"].copy(), unsent(optimizer)]
        optimizer.finalize()
        return [*seen, xs["w"], unsent(optimizer)]

    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)
        assert any(error.any() for error in here[1::2])
    rounds, synchronous = (
        [
            [(line.get("message_norm"), line.get("mean_norm")) for line in lines if line["event"] == "exchanged"]
            for lines in read_run_log(tmp_path / log).values()
        ]
        for log in ("rounds", "synchronous")
    )
    for here, there in zip(rounds, synchronous, strict=True):
        for one, other in zip(here, there, strict=True):
            assert one == (pytest.approx(other, rel=1e-5) if bounds else (None, None))


def test_weights_that_stay_the_same_count_for_error_memory_as_synchronously() -> None:
    """To the bit where the shares w_i n/Σ w are powers of two: messages have it before the wire, and here after it."""
    shares = (2.0, 0.5, 0.5)

    def work(communicator: Communicator, **options: Any) -> list[Any]:
        rank, xs, seen = communicator.rank, {"w": np.linspace(-1, 1, 20, dtype=np.float32)}, []
        options |= {"weight": 4 * shares[rank], "compression": Compression.topk(0.3)}
        optimizer = made(communicator, "diloco", xs, **options)
        if "quorum" in options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 6)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for _ in range(5 * PERIOD):
            step(optimizer, xs, rank)
            seen += [xs["w"].copy(), unsent(optimizer) * (shares[rank] if "quorum" in options else 1)]
        return seen

    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)
        assert here[-1].any()


@pytest.mark.parametrize(("wire", "bound"), covering(("fp16", "bf16", "int8", "int2", "topk"), (None, 2.0), together=1))
def test_what_is_not_sent_is_kept_whoever_takes_part(wire: str, bound: float | None) -> None:
    """The center has moved by all that ranks had to say, but for their error memories; who is late keeps its own.

    If messages are bounded, they are before the error memory is added.
    """
    compression = Compression.topk(0.25) if wire == "topk" else getattr(Compression, wire)

    def work(communicator: Communicator) -> Any:
        x, rank, told, cut = np.zeros(24), communicator.rank, np.zeros(24), list[bool]()
        options: dict[str, Any] = {"process_set": communicator, "quorum": 2, "compression": compression}
        options |= {"outer_optimizer": SGD(1.0), "max_message_norm": bound}
        optimizer = PeriodicOptimizer(SGD(0.1), {"w": x}, AGN(), PERIOD, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay([sorted(members) for members in LONG])  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        random = np.random.default_rng(rank)
        for members in LONG:
            before, message = unsent(optimizer), np.zeros(24)
            for _ in range(PERIOD if rank in members else 0):
                gradient = random.normal(size=24)
                message += gradient / PERIOD
                optimizer.step([gradient])
            norm = float(np.linalg.norm(message))
            told += message * (1 if bound is None or norm <= bound else bound / norm)
            cut.append(bound is not None and norm > bound)
            communicator.allgather_object(None, "closed")
            assert (unsent(optimizer) == before).all() != (rank in members)
        assert any(cut) == (bound is not None)
        return told, unsent(optimizer), optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["w"]

    results = run_ranks(3, work)
    total = sum(told - error for told, error, _ in results)
    for _, _, center in results:
        np.testing.assert_allclose(-center, total, rtol=0, atol=1e-12)


def test_error_memory_stays_where_a_round_moves_nothing() -> None:
    """All weights are 0 in the second round, and one rank is left out of the third."""

    def work(communicator: Communicator) -> list[Any]:
        xs, rank, number = {"w": np.zeros(12)}, communicator.rank, 0
        options: dict[str, Any] = {"process_set": communicator, "quorum": 2, "compression": Compression.topk(0.2)}
        options |= {"weight": lambda: 0.0 if number == 1 else 1.0, "nonfinite": "skip"}
        optimizer = PeriodicOptimizer(SGD(0.1), xs, DiLoCo(), 1, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay([range(3)] * 3)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        seen = []
        for number in range(3):
            gradient = np.sin(np.arange(12.0) + rank + number)
            optimizer.step([np.full(12, np.nan) if (number, rank) == (2, 1) else gradient])
            seen.append(unsent(optimizer))
        return seen

    for rank, (first, second, third) in enumerate(run_ranks(3, work)):
        assert first.any()
        np.testing.assert_array_equal(second, first)
        assert (third == second).all() == (rank == 1)


def test_error_memory_decays_in_rounds_as_synchronously() -> None:
    """Rounds of all, with equal weights, are synchronous exchanges to the bit; settings that differ are refused."""

    def work(communicator: Communicator, decay: float = 0.5, **more: Any) -> Any:
        xs = {"w": np.zeros(12)}
        options: dict[str, Any] = {"process_set": communicator, "compression": Compression.topk(0.2), **more}
        optimizer = PeriodicOptimizer(SGD(0.1), xs, DiLoCo(), 1, error_decay=decay, **options)
        optimizer.synchronizer.begin()
        if more:
            optimizer.synchronizer.exchanger.replay([range(3)] * 4)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(4):
            optimizer.step([np.sin(np.arange(12.0) + communicator.rank + number)])
        return xs["w"].copy(), unsent(optimizer)

    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)
    for kind, found in errors(3, lambda c: work(c, 0.5 + c.rank / 10, quorum=2)):
        assert kind is ValueError
        assert "They differ in error_decay" in found


def test_a_rank_without_weight_keeps_its_error_memory() -> None:
    """What it has not sent yet arrives later; the message without weight is dropped."""
    moves, weights = ((0.0, 0.0), (3.0, 2.0)), ((1.0, 1.0), (1.0, 0.0), (1.0, 1.0))

    def work(communicator: Communicator) -> Any:
        number, x = 0, np.zeros(2)
        options: dict[str, Any] = {"process_set": communicator, "quorum": 2, "compression": Compression.topk(0.5)}
        options |= {"weight": lambda: [*weights[number], 1.0][communicator.rank]}
        optimizer = PeriodicOptimizer(SGD(1.0), {"w": x}, DiLoCo(1.0, 0.0), 1, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay([range(3)] * 3)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        seen = []
        for number in range(3):
            move = (*moves, (0.0, 0.0))[communicator.rank] if number == 0 else (0.0, 0.0)
            optimizer.step([-np.array(move)])
            seen.append(3 * x)
        return seen

    for seen in run_ranks(3, work):
        np.testing.assert_allclose(seen, [[3.0, 0.0], [3.0, 0.0], [3.0, 2.0]])


class Halved(Wire):
    """A wire whose messages are no bytes."""

    def start(self, link: Link[Any], message: Any) -> Sent[Any]:
        return Sent(link.reduce(message / 2, link.name), message / 2, link.nbytes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": Halved()}, "`compression` with `quorum` is for wires of bytes. Received: compression=<"),
        (
            {"max_message_norm": "median"},
            "`compression` and max_message_norm='median' can be combined with `quorum` in",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_does_not_go_with_compression_in_rounds(options: dict[str, Any], text: str) -> None:
    def work(communicator: Communicator) -> None:
        more = {"process_set": communicator, "quorum": 2, "compression": Compression.int8, **options}
        PeriodicOptimizer(SGD(0.1), {"w": np.zeros(3)}, DiLoCo(), PERIOD, **more)

    for kind, found in errors(3, work):
        assert kind is ValueError
        assert text in found
