"""Asynchronous training in turns, in which one rank's gradient is once NaN: what ranks have then, in plain floats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

MOMENTUM, MOVING_RATE, RHO, RATE = 0.5, 0.25, 0.5, 0.125
PERIOD, TURNS = 2, 9
ALGORITHMS = ("easgd", "easgd_rho", "agn")


def order_of(size: int) -> list[int]:
    """Return whose turns are: a period of local steps, and the exchange; all come, and the last twice at least."""
    chance = random.Random(5)
    return [*range(size), size - 1, *(chance.randrange(size) for _ in range(TURNS - size - 1))]


def gradient(rank: int, size: int, step: int) -> float:
    """Return the gradient of a local step: the last rank's third is NaN."""
    return math.nan if (rank, step) == (size - 1, 3) else -1.0 - rank


def taken(
    step: Callable[[float], object],
    look: Callable[[], tuple[list[float], list[float]]],
    place: tuple[int, int],
    barrier: Callable[[], object],
) -> list[Any]:
    """Take the turns of this rank; return what it sees after every turn. All ranks take their first step together.

    Args:
        step: takes a local step with a gradient.
        look: returns replica and center.
        place: rank and size.
        barrier: waits for all ranks.
    """
    (rank, size), steps, seen = place, 1, []
    step(gradient(rank, size, steps))
    barrier()
    for turn in order_of(size):
        while turn == rank:
            steps += 1
            step(gradient(rank, size, steps))
            if steps % PERIOD == 0:
                break
        barrier()
        seen.append(look())
        barrier()
    return seen


class Slow:
    """All ranks in a loop.

    A rank whose x is not finite starts from the center as it is now, with a new momentum, and pushes nothing.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.c, self.m = name, size, 0.0, 0.0
        self.x, self.v, self.a, self.read = ([0.0] * size for _ in range(4))
        self.steps, self.rounds, self.left_out = ([0] * size for _ in range(3))

    def run(self, order: Sequence[int]) -> list[tuple[list[float], float]]:
        """Return all replicas and the center after every turn."""
        seen = []
        for rank in range(self.size):
            self.step(rank)
        for rank in order:
            self.step(rank)
            if self.steps[rank] % PERIOD:
                self.step(rank)
            self.exchange(rank)
            seen.append((list(self.x), self.c))
        return seen

    def step(self, rank: int) -> None:
        """Take one local step."""
        self.steps[rank] += 1
        g = gradient(rank, self.size, self.steps[rank])
        self.a[rank] += g
        if self.name == "easgd_rho":
            g += RHO * (self.x[rank] - self.read[rank])
        self.v[rank] = MOMENTUM * self.v[rank] + g
        self.x[rank] -= RATE * self.v[rank]

    def exchange(self, rank: int) -> None:
        """Exchange, or start again."""
        if math.isnan(self.x[rank]):
            self.x[rank] = self.read[rank] = self.c
            self.v[rank] = self.a[rank] = 0.0
            self.left_out[rank] += 1
            return
        self.rounds[rank] += 1
        if self.name == "agn":
            self.m = MOMENTUM * self.m + self.a[rank] / PERIOD
            self.c -= RATE * self.m
            self.x[rank], self.a[rank] = self.c, 0.0
            return
        difference = MOVING_RATE * (self.x[rank] - self.c)
        self.read[rank] = self.c
        self.x[rank] -= difference
        self.c += difference
