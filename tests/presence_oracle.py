"""A slow oracle for parameters to which only workers with gradients of them contribute; plain floats, one element.

It uses nothing of the library. Workers descend on quadratic losses of their own by heavy-ball momentum, and leave the
element alone at steps at which they have no gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

RATE, MOMENTUM = 0.1, 0.5


def slope(worker: int, x: float) -> float:
    """Gradient of ½ h (x − b)², with curvature and minimum of the worker's own."""
    return (0.5 + 0.25 * worker) * (x - (1.5 - worker))


def uses(worker: int, step: int, which: int) -> bool:
    """Return whether a worker has a gradient of a parameter at a step: in some rounds none has, or one, or all."""
    return (worker + 2 * step + which) % 5 < 2 and not 5 <= step <= 8


@dataclass
class Element:
    """One element of a parameter on all workers, and its center.

    Args:
        start: its value at the start.
        workers: number of workers n.
        algorithm: name of the algorithm, as in the table of the tests.
        weights: w_i.
        takes_part: all workers count, as for any other parameter.
    """

    start: float
    workers: int
    algorithm: str
    weights: Sequence[float] = ()
    takes_part: bool = False
    center: float = field(init=False)
    x: list[float] = field(init=False)

    def __post_init__(self) -> None:
        n = self.workers
        self.center = self.out = self.start
        self.x, self.read = [self.start] * n, [self.start] * n
        self.v, self.a = [0.0] * n, [0.0] * n
        self.seen, self.momentum = [False] * n, 0.0

    def step(self, worker: int, has_gradient: bool) -> None:
        """Take one local step."""
        if not has_gradient:
            return
        g = slope(worker, self.x[worker])
        self.seen[worker] = True
        self.a[worker] += g
        if self.algorithm == "easgd":
            g += 0.5 * (self.x[worker] - self.read[worker])
        self.v[worker] = MOMENTUM * self.v[worker] + g
        self.x[worker] -= RATE * self.v[worker]

    def exchange(self, gradients: Sequence[int]) -> list[float]:
        """Move the center; return what to add to each replica, once the result is there.

        Args:
            gradients: τ_i, how many of a worker's updates had any gradient.
        """
        present = [1.0 if here or self.takes_part else 0.0 for here in self.seen]
        weights = [w * p for w, p in zip(self.weights or [1.0] * self.workers, present, strict=True)]
        before, self.seen = list(self.x), [False] * self.workers
        if self.algorithm == "easgd":
            moves = [-0.25 * (x - self.center) for x in before]
            self.read = [self.center] * self.workers
            self.center -= sum(p * move for p, move in zip(present, moves, strict=True))
            return moves
        if self.algorithm.startswith("agn"):
            total = sum(w * a / tau for w, a, tau in zip(weights, self.a, gradients, strict=True))
            self.a = [0.0] * self.workers
            if not any(present):
                return [0.0] * self.workers
            total /= sum(weights) if self.algorithm == "agn average" else 1.0
            self.momentum = 0.9 * self.momentum + total
            self.center -= 0.1 * self.momentum
            return [self.center - x for x in before]
        if not any(weights):
            return [0.0] * self.workers
        g = sum(w * (self.out - x) for w, x in zip(weights, before, strict=True)) / sum(weights)
        self._move(g)
        return [self.out - x for x in before]

    def _move(self, g: float) -> None:
        if self.algorithm == "average":
            self.center -= g
        elif self.algorithm == "diloco":
            self.momentum = 0.9 * self.momentum + g
            self.center -= 0.7 * (g + 0.9 * self.momentum)
        elif self.algorithm == "slowmo":
            self.momentum = 0.5 * self.momentum + g / RATE
            self.center -= RATE * self.momentum
        elif self.algorithm == "bmuf":
            self.momentum = (1 - 1 / self.workers) * self.momentum - g
            self.center += self.momentum
        self.out = self.center + ((1 - 1 / self.workers) * self.momentum if self.algorithm == "bmuf" else 0.0)


def trajectory(
    element: Element,
    steps: int,
    exchanges: Collection[int],
    has_gradient: Callable[[int, int], bool],
    delay: int = 0,
) -> list[list[float]]:
    """Return the replicas of all workers after each step.

    Args:
        element: the element; it is changed.
        steps: number of local steps.
        exchanges: the steps after which an exchange begins.
        has_gradient: whether a worker has a gradient at a step.
        delay: steps after which the result of an exchange is added, at most until the next begins.
    """
    found, since, landing, moves = [], 0, 0, list[float]()

    def land() -> None:
        element.x = [x + move for x, move in zip(element.x, moves, strict=True)]
        moves.clear()

    for step in range(1, steps + 1):
        since += 1
        for worker in range(element.workers):
            element.step(worker, has_gradient(worker, step))
        if moves and (step == landing or step in exchanges):
            land()
        if step in exchanges:
            moves += element.exchange([since] * element.workers)
            since, landing = 0, step + delay
            if delay == 0 or element.algorithm == "easgd":
                land()
        found.append(list(element.x))
    return found
