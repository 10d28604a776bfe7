"""A slow oracle of asynchronous averaging, DiLoCo, SlowMo and BMUF: the equations, in floats, one push at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_periodic.algorithms import BMUF, Algorithm, Averaging, DiLoCo, SlowMo

CURVATURE, MINIMUM, PERIOD = (0.5, 1.0, 0.7), (3.0, -1.0, 2.0), 3
"""Of workers with F_i = h_i (x − b_i)²/2, which start from 0."""

ALGORITHMS: dict[str, Algorithm] = {
    "averaging": Averaging(),
    "diloco": DiLoCo(0.7, 0.9),
    "heavy ball": DiLoCo(0.3, 0.6, nesterov=False),
    "slowmo": SlowMo(0.5, 0.9),
    "bmuf": BMUF(0.4, 0.9),
    "bmuf, classic": BMUF(0.4, nesterov=False),
}


def rate_of(own_turn: int, slow: bool) -> float:
    """Return the learning rate of a worker in a turn of its own; that of the slow parameters is once zero."""
    return (0.0 if own_turn == 1 else 0.05) if slow else 0.1 / (1 + own_turn)


@dataclass
class Slow:
    """The center of one parameter, and the workers around it.

    Args:
        name: the algorithm.
        size: number of workers.
        power: of the discount of stale pushes.
        slow: whether it has the rates of the slow parameters.
    """

    name: str
    size: int
    power: float = 0.0
    slow: bool = False
    c: float = 0.0
    m: float = 0.0
    d: float = 0.0
    pushes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.h, self.turns = ([0.0] * self.size for _ in range(3))
        self.missed: list[int] = []

    def turn(self, i: int) -> None:
        """Train worker i for a period, and push."""
        rate = rate_of(int(self.turns[i]), self.slow)
        for _ in range(PERIOD):
            self.x[i] -= rate * CURVATURE[i] * (self.x[i] - MINIMUM[i])
        self.turns[i] += 1
        last = len(self.pushes) - self.pushes[::-1].index(i) if i in self.pushes else 0
        self.missed.append(len(self.pushes) - last)
        excess = max(0, self.missed[-1] - (self.size - 1))
        self.pushes.append(i)
        self.push((self.h[i] - self.x[i]) * (1 + excess) ** -self.power / self.size, rate)
        self.x[i] = self.h[i] = self.handed()

    def push(self, g: float, rate: float) -> None:
        """Move the center; ``g`` is already one n-th."""
        last = len(self.pushes) % self.size == 0
        made: Any = ALGORITHMS[self.name]
        if isinstance(made, Averaging):
            self.c -= g
        elif isinstance(made, DiLoCo):
            mu, old = made.outer_momentum, self.m
            self.d += g
            self.m = mu * old + self.d if last else old
            ahead = mu * (self.m if made.nesterov else old) if last else 0.0
            self.c -= made.rate * (g + ahead)
        elif isinstance(made, SlowMo):
            alpha = made.slow_learning_rate
            if rate == 0:
                self.c -= g
            else:
                self.d += g / rate
                self.c -= alpha * (g + (rate * made.slow_momentum * self.m if last else 0.0))
                self.m = made.slow_momentum * self.m + self.d if last else self.m
        else:
            zeta, eta = made.block_learning_rate, made.block_momentum
            self.d -= zeta * g
            self.c += -zeta * g + (eta * self.m if last else 0.0)
            self.m = eta * self.m + self.d if last else self.m
        self.d = 0.0 if last else self.d

    def handed(self) -> float:
        """Return what a worker takes."""
        made = ALGORITHMS[self.name]
        return self.c + (made.block_momentum or 0.0) * self.m if isinstance(made, BMUF) and made.nesterov else self.c


def in_turn(name: str, size: int, order: Sequence[int], **options: Any) -> tuple[list[list[float]], list[float]]:
    """Return the replicas of all workers, and the center, after every turn."""
    slow = Slow(name, size, **options)
    replicas, centers = [], []
    for i in order:
        slow.turn(i)
        replicas.append(list(slow.x))
        centers.append(slow.c)
    return replicas, centers


def followed(
    order: Sequence[int],
    rank: int,
    train: Callable[[int], None],
    look: Callable[[], Any],
    barrier: Callable[[], object],
) -> list[Any]:
    """Train in an order that all workers know; return what this one sees after every turn."""
    seen, own = [], 0
    for turn in order:
        if turn == rank:
            train(own)
            own += 1
        barrier()
        seen.append(look())
        barrier()
    return seen
