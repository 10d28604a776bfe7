"""Rounds with a quorum and other options of synchronous exchange: ranks that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging
from hvd_periodic.numpy import SGD
from tests.helpers import run_ranks
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
