"""A slow oracle of asynchronous exchange with a bound on messages: whole vectors, in floats, one push at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hvd_periodic.algorithms import AGN, EASGD, Algorithm
from tests import delayed_oracle

RATE, PERIOD, RHO = 0.125, 2, 0.5
START = [1.0, -2.0, 0.5, 3.0, -1.0, 2.0, 0.25, -0.5, 1.5]
"""Of two parameters, of five elements and four."""

OF_FIRST = 5

ALGORITHMS: dict[str, Algorithm] = {
    "easgd": EASGD(0.25),
    "easgd_rho": EASGD(0.25, rho=RHO),
    "agn": AGN(),
    "agn, average": AGN("average"),
    **{name: delayed_oracle.ALGORITHMS[name] for name in ("averaging", "diloco", "slowmo", "bmuf")},
}

Vector = list[float]


def bound_of(name: str) -> float:
    """Return R_w: on gradients, or on displacements, which are shorter."""
    return 1.0 if name.startswith("agn") else 0.25


def gradient(rank: int, x: Sequence[float]) -> Vector:
    """Gradient of a worker's own quadratic, which is steep on the last one, so that its messages are long."""
    return [(0.05 + 0.4 * rank) * (value - (1.5 - rank + 0.1 * k)) for k, value in enumerate(x)]


class Slow:
    """All workers in a loop.

    Attributes:
        x: the replicas.
        c: the center.
        norms: of every push, that of its message before it is cut.
    """

    def __init__(self, name: str, size: int, bound: float | None) -> None:
        self.name, self.size, self.bound, self.c = name, size, bound, list(START)
        self.x, self.taken = ([list(START) for _ in range(size)] for _ in range(2))
        self.a = [[0.0] * len(START) for _ in range(size)]
        self.norms: list[float] = []
        self.elements = [delayed_oracle.Slow(name, size, c=c) for c in START]

    def run(self, order: Sequence[int]) -> Iterator[tuple[list[Vector], Vector]]:
        """Yield all replicas and the center after every turn: a period of one worker, and its push."""
        for i in order:
            for _ in range(PERIOD):
                g = gradient(i, self.x[i])
                self.a[i] = [a + g_k for a, g_k in zip(self.a[i], g, strict=True)]
                if self.name == "easgd_rho":
                    g = [g_k + RHO * (x - lc) for g_k, x, lc in zip(g, self.x[i], self.taken[i], strict=True)]
                self.x[i] = [x - RATE * g_k for x, g_k in zip(self.x[i], g, strict=True)]
            self.push(i)
            yield [list(x) for x in self.x], list(self.c)

    def push(self, i: int) -> None:
        if self.name.startswith("agn"):
            message = [a / PERIOD for a in self.a[i]]
        else:
            since = self.c if self.name.startswith("easgd") else self.taken[i]
            message = [x - h for x, h in zip(self.x[i], since, strict=True)]
        self.norms.append(math.sqrt(sum(value * value for value in message)))
        if self.bound is not None:
            message = [value * min(1.0, self.bound / self.norms[-1]) for value in message]
        if self.name.startswith("easgd"):
            self.taken[i] = list(self.c)  # What ρ pulls to.
            self.x[i] = [x - 0.25 * d for x, d in zip(self.x[i], message, strict=True)]
            self.c = [c + 0.25 * d for c, d in zip(self.c, message, strict=True)]
            return
        if self.name.startswith("agn"):
            share = self.size if self.name == "agn, average" else 1
            self.c = [c - RATE * a / share for c, a in zip(self.c, message, strict=True)]
            self.x[i], self.a[i] = list(self.c), [0.0] * len(START)
            return
        for element, moved in zip(self.elements, message, strict=True):
            element.pushes.append(i)
            element.push(-moved / self.size, RATE)
        self.c = [element.c for element in self.elements]
        self.x[i] = [element.handed() for element in self.elements]
        self.taken[i] = list(self.x[i])


def check(name: str, order: Sequence[int], seen: Sequence[Sequence[Sequence[Vector]]], norms: Sequence[Vector]) -> None:
    """Check what ranks have seen after every turn, (x, c), and the norms that they have logged; some have been cut.

    The first rank's gradients are too small for that, so that one worker alone is never cut.
    """
    slow, unbounded = Slow(name, len(seen), bound_of(name)), Slow(name, len(seen), None)
    for turn, (x, c) in enumerate(slow.run(order)):
        for rank, of_rank in enumerate(seen):
            for found, expected in zip(of_rank[turn], (x[rank], c), strict=True):
                difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
                assert difference < 1e-12, (name, turn, rank, found, expected)
    for rank, of_rank in enumerate(norms):
        expected = [norm for norm, turn in zip(slow.norms, order, strict=True) if turn == rank]
        assert len(of_rank) == len(expected)
        assert all(math.isclose(*pair, rel_tol=1e-9) for pair in zip(of_rank, expected, strict=True)), (name, rank)
    if len(seen) == 1:
        return
    *_, (_, free) = unbounded.run(order)
    assert max(abs(one - other) for one, other in zip(free, slow.c, strict=True)) > 1e-3, "the bound makes a difference"
    assert min(slow.norms) < bound_of(name) < max(slow.norms), "some are cut, others are not"
