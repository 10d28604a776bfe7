"""A slow oracle written from the papers in plain Python floats, workers in a loop; it uses nothing of the library.

Every worker descends on a quadratic loss of its own, so that gradients differ between workers and depend on where the
exchanges have put x. Of the policies for parameters, "average" is what all functions compute that do not name another:
:func:`local`, :func:`broadcast`, :func:`easgd_of_table` for "rows", of which other algorithms compute what whole tables
do, and :func:`present`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

STEPS = 13
RATE, MOMENTUM = 0.15, 0.6
START = [0.5, -1.5, 2.0]

Vector = list[float]
Result = tuple[list[Vector], Vector]
"""All replicas, and the center."""


def gradient(worker: int, x: Sequence[float]) -> Vector:
    """Gradient of Σ_k ½ h_k (x_k − m_k)², with curvatures and minima of the worker's own."""
    return [
        (0.4 + 0.2 * worker + 0.1 * k) * (x_k - (1.5 * math.sin(1 + 2 * worker + k) + worker))
        for k, x_k in enumerate(x)
    ]


def periodic(period: int) -> set[int]:
    """Steps of the exchanges for a constant period."""
    return {step for step in range(1, STEPS + 1) if step % period == 0}


class Workers:
    """Local SGD with heavy-ball momentum on n workers."""

    def __init__(self, n: int, momentum: float) -> None:
        self.n, self.momentum = n, momentum
        self.x = [list(START) for _ in range(n)]
        self.v = [[0.0] * len(START) for _ in range(n)]

    def descend(self, worker: int, g: Vector) -> None:
        for k, g_k in enumerate(g):
            self.v[worker][k] = self.momentum * self.v[worker][k] + g_k
            self.x[worker][k] -= RATE * self.v[worker][k]


Gradient = Callable[[int, Sequence[float]], Vector]


def grouped(groups: Sequence[Sequence[int]], of_ranks: bool = False) -> Gradient:
    """Gradient of a group, the mean of its members'; or, of a rank, that of its group."""

    def mean(worker: int, x: Sequence[float]) -> Vector:
        members = next(group for group in groups if worker in group) if of_ranks else groups[worker]
        gradients = [gradient(rank, x) for rank in members]
        return [sum(column) / len(members) for column in zip(*gradients, strict=True)]

    return mean


def together(n: int) -> Gradient:
    """Gradient of all workers, before the local steps of post-local SGD (Lin, Stich, Patel, Jaggi 2018) begin."""
    return grouped([range(n)], of_ranks=True)


def easgd(
    n: int,
    exchanges: set[int],
    rate: Callable[[int], float],
    momentum: float = 0.0,
    rho: float = 0.0,
    gradient: Gradient = gradient,
    start: int = 0,
) -> Result:
    """Zhang, Choromanska, LeCun (2015), synchronous; ``rate(τ)`` is α for an exchange that covers τ steps."""
    workers, c, last = Workers(n, momentum), list(START), 0
    read = [list(START) for _ in range(n)]
    for step in range(1, STEPS + 1):
        for i in range(n):
            g = (gradient if step > start else together(n))(i, workers.x[i])
            pull = rho if step > start else 0.0
            workers.descend(
                i, [g_k + pull * (x_k - r_k) for g_k, x_k, r_k in zip(g, workers.x[i], read[i], strict=True)]
            )
        if step == start:
            c, last, read = list(workers.x[0]), step, [list(x) for x in workers.x]
        if step in exchanges:
            alpha, last = rate(step - last), step
            old = list(c)
            for i in range(n):
                for k in range(len(old)):
                    difference = workers.x[i][k] - old[k]
                    workers.x[i][k] -= alpha * difference
                    c[k] += alpha * difference
                read[i] = list(old)
    return workers.x, c


def local(n: int, momentum: float) -> list[list[Vector]]:
    """Parameters that are "local": every worker descends on its own; return all replicas after each step."""
    workers, seen = Workers(n, momentum), []
    for _ in range(STEPS):
        for i in range(n):
            workers.descend(i, gradient(i, workers.x[i]))
        seen.append([list(x) for x in workers.x])
    return seen


def broadcast(n: int, exchanges: set[int], root: int, momentum: float) -> tuple[list[list[Vector]], Vector]:
    """Parameters that are "broadcast": all take the root's; return all replicas after each step, and the center."""
    workers, c, seen = Workers(n, momentum), list(START), []
    for step in range(1, STEPS + 1):
        for i in range(n):
            workers.descend(i, gradient(i, workers.x[i]))
        if step in exchanges:
            c = list(workers.x[root])
            workers.x = [list(c) for _ in range(n)]
        seen.append([list(x) for x in workers.x])
    return seen, c


def touches(worker: int, step: int, k: int) -> bool:
    """Return whether a step of a worker touches a row of a table; in some rounds nobody touches a row, or all do."""
    return (worker + 2 * step + 3 * k) % 7 == 0


def of_table(worker: int, step: int, x: Sequence[float], gradient: Gradient = gradient) -> Vector:
    """Gradient of a table whose rows have one element, at a step: 0 in rows that it does not touch."""
    return [g_k if touches(worker, step, k) else 0.0 for k, g_k in enumerate(gradient(worker, x))]


def easgd_of_table(n: int, exchanges: set[int], rate: float) -> tuple[Result, list[list[int]]]:
    """Elastic averaging of a table, without momentum; also returns the rows that travel, for every exchange.

    A row that no worker has touched since the last exchange does not travel: all know d = Σ_j (x_j − c) of it.
    """
    workers, c, d, travelled = Workers(n, 0.0), list(START), [0.0] * len(START), []
    touched: set[int] = set()
    for step in range(1, STEPS + 1):
        for i in range(n):
            workers.descend(i, of_table(i, step, workers.x[i]))
        touched |= {k for k in range(len(START)) if any(touches(i, step, k) for i in range(n))}
        if step in exchanges:
            for k in range(len(START)):
                total = sum(workers.x[i][k] - c[k] for i in range(n)) if k in touched else d[k]
                for i in range(n):
                    workers.x[i][k] -= rate * (workers.x[i][k] - c[k])
                c[k] += rate * total
                d[k] = (1 - rate * (n + 1)) * total
            travelled.append(sorted(touched))
            touched = set()
    return (workers.x, c), travelled


def slope(worker: int, x: float) -> float:
    """Gradient of ½ h (x − b)², with curvature and minimum of the worker's own."""
    return (0.5 + 0.25 * worker) * (x - (1.5 - worker))


def has_gradient(worker: int, step: int, which: int) -> bool:
    """Return whether a worker has a gradient of a parameter at a step: in some rounds none has, or one, or all."""
    return (worker + 2 * step + which) % 5 < 2 and not 5 <= step <= 8


@dataclass
class Present:
    """One element of a parameter that is "present", on all workers, and its center.

    Workers descend on quadratic losses of their own by heavy-ball momentum, and leave the element alone at steps at
    which they have no gradient of it. p_i = 1 where a worker has had one since the last exchange:

        ḡ = Σ w_i p_i (h − x_i) / Σ w_i p_i ;  nothing moves where Σ p_i = 0
        elastic averaging: c ← c + α Σ p_i (x_i − c) ;  x_i ← x_i − α (x_i − c) on all

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


def present(
    element: Present,
    steps: int,
    exchanges: Collection[int],
    having: Callable[[int, int], bool],
    delay: int = 0,
) -> list[list[float]]:
    """Return the replicas of all workers after each step.

    Args:
        element: the element; it is changed.
        steps: number of local steps.
        exchanges: the steps after which an exchange begins.
        having: whether a worker has a gradient at a step.
        delay: steps after which the result of an exchange is added, at most until the next begins.
    """
    found, since, landing, moves = [], 0, 0, list[float]()

    def land() -> None:
        element.x = [x + move for x, move in zip(element.x, moves, strict=True)]
        moves.clear()

    for step in range(1, steps + 1):
        since += 1
        for worker in range(element.workers):
            element.step(worker, having(worker, step))
        if moves and (step == landing or step in exchanges):
            land()
        if step in exchanges:
            moves += element.exchange([since] * element.workers)
            since, landing = 0, step + delay
            if delay == 0 or element.algorithm == "easgd":
                land()
        found.append(list(element.x))
    return found


def default_rate(n: int) -> float:
    """The paper's rate β/n, β = .9, as far as the center does not overshoot."""
    return min(0.9 / n, 1 / (n + 1))


def averaging(
    n: int, exchanges: set[int], momentum: float = 0.0, gradient: Gradient = gradient, start: int = 0
) -> Result:
    """McDonald, Hall, Mann (2010): the mean of the replicas replaces them all."""
    workers, c = Workers(n, momentum), list(START)
    for step in range(1, STEPS + 1):
        for i in range(n):
            workers.descend(i, (gradient if step > start else together(n))(i, workers.x[i]))
        if step == start:
            c = list(workers.x[0])
        if step in exchanges:
            c = [sum(workers.x[i][k] for i in range(n)) / n for k in range(len(START))]
            workers.x = [list(c) for _ in range(n)]
    return workers.x, c


def agn(
    n: int,
    exchanges: set[int],
    op: str,
    momentum: float = 0.0,
    center: tuple[float, float] | None = None,
    gradient: Gradient = gradient,
    start: int = 0,
) -> Result:
    """Hermans, Spanakis, Möckel (2017), with SGD of rate and momentum ``center`` on the center."""
    center_rate, center_momentum = (RATE, momentum) if center is None else center
    workers, c, last = Workers(n, momentum), list(START), 0
    center_v = [0.0] * len(START)
    a = [[0.0] * len(START) for _ in range(n)]
    for step in range(1, STEPS + 1):
        for i in range(n):
            g = (gradient if step > start else together(n))(i, workers.x[i])
            for k, g_k in enumerate(g):
                a[i][k] += g_k
            workers.descend(i, g)
        if step == start:
            c, last, a = list(workers.x[0]), step, [[0.0] * len(START) for _ in range(n)]
        if step in exchanges:
            period, last = step - last, step
            for k in range(len(START)):
                total = sum(a[i][k] / period for i in range(n)) / (n if op == "average" else 1)
                center_v[k] = center_momentum * center_v[k] + total
                c[k] -= center_rate * center_v[k]
            workers.x = [list(c) for _ in range(n)]
            a = [[0.0] * len(START) for _ in range(n)]
    return workers.x, c


def grouped_results(groups: Sequence[Sequence[int]]) -> dict[str, Result]:
    """Return what exchanges between groups have to arrive at, whose gradients are averaged inside: x by rank, and c.

    Groups of different sizes count as often as they have members.
    """
    ranks = sorted(rank for group in groups for rank in group)
    of_ranks = len({len(group) for group in groups}) > 1
    n, of_group = len(ranks) if of_ranks else len(groups), grouped(groups, of_ranks)
    results = {
        "easgd": easgd(n, periodic(2), lambda _: 0.25, MOMENTUM, gradient=of_group),
        "easgd_rho": easgd(n, periodic(2), lambda _: 0.25, MOMENTUM, rho=0.5, gradient=of_group),
        "average": averaging(n, periodic(2), MOMENTUM, gradient=of_group),
        "agn": agn(n, periodic(4), "sum", MOMENTUM, gradient=of_group),
    }
    if of_ranks:
        return results
    place = [next(i for i, group in enumerate(groups) if rank in group) for rank in ranks]
    return {name: ([x[i] for i in place], c) for name, (x, c) in results.items()}


def island_results(islands: Sequence[Sequence[int]]) -> dict[str, Result]:
    """Return the same for islands of one size, and for DiLoCo between them."""
    x, c = outer(len(islands), periodic(2), "diloco", MOMENTUM, gradient=grouped(islands))
    ranks = sorted(rank for island in islands for rank in island)
    of_ranks = [next(x[i] for i, island in enumerate(islands) if rank in island) for rank in ranks]
    return grouped_results(islands) | {"diloco": (of_ranks, c)}


def post_local_results(n: int, start: int) -> dict[str, Result]:
    """Return what n workers arrive at that average gradients until a step, and then exchange after every third."""
    exchanges = set(range(start + 3, STEPS + 1, 3))
    return {
        "easgd": easgd(n, exchanges, lambda _: 0.25, MOMENTUM, start=start),
        "easgd_rho": easgd(n, exchanges, lambda _: 0.25, MOMENTUM, rho=0.5, start=start),
        "average": averaging(n, exchanges, MOMENTUM, start=start),
        "agn": agn(n, exchanges, "sum", MOMENTUM, start=start),
    }


def averages_of_averages(groups: Sequence[Sequence[int]]) -> list[list[Vector]]:
    """Return all replicas after each of 12 steps: means in groups after every second, and of all after every sixth."""
    n = sum(map(len, groups))
    workers, seen = Workers(n, MOMENTUM), []
    for step in range(1, 13):
        for i in range(n):
            workers.descend(i, gradient(i, workers.x[i]))
        averaged = [*(groups if step % 2 == 0 else []), *([range(n)] if step % 6 == 0 else [])]
        for group in averaged:
            mean = [sum(workers.x[i][k] for i in group) / len(group) for k in range(len(START))]
            for i in group:
                workers.x[i] = list(mean)
        seen.append([list(x) for x in workers.x])
    return seen


def contrib_results(n: int) -> dict[str, Result]:
    """Return what the optimizers of TensorFlow 1 graphs have to arrive at, by name."""
    return named_results(n) | {"easgd_contrib": easgd(n, periodic(2), lambda tau: 0.9 / tau / n, MOMENTUM)}


def outer(n: int, exchanges: set[int], kind: str, momentum: float, gradient: Gradient = gradient) -> Result:
    """DiLoCo (Douillard 2023; λ .7, μ .9), SlowMo (Wang 2019; α 1, β .5), BMUF (Chen, Huo 2016; ζ 1, η 1 − 1/n)."""
    workers, c, handed, m = Workers(n, momentum), list(START), list(START), [0.0] * len(START)
    eta = 1 - 1 / n
    for step in range(1, STEPS + 1):
        for i in range(n):
            workers.descend(i, gradient(i, workers.x[i]))
        if step in exchanges:
            for k in range(len(START)):
                g = handed[k] - sum(x[k] for x in workers.x) / n
                if kind == "diloco":
                    m[k] = 0.9 * m[k] + g
                    c[k] = handed[k] = c[k] - 0.7 * (g + 0.9 * m[k])
                elif kind == "slowmo":
                    m[k] = 0.5 * m[k] + g / RATE
                    c[k] = handed[k] = c[k] - RATE * m[k]
                else:
                    m[k] = eta * m[k] - g
                    c[k] += m[k]
                    handed[k] = c[k] + eta * m[k]
            workers.x = [list(handed) for _ in range(n)]
    return workers.x, c


def parallel_results(n: int) -> dict[str, Result]:
    """Return what the optimizers of the scenario programs have to arrive at, by name."""
    return named_results(n) | {kind: outer(n, periodic(2), kind, MOMENTUM) for kind in ("diloco", "slowmo", "bmuf")}


def named_results(n: int) -> dict[str, Result]:
    """Return what the three named optimizers have to arrive at, by name."""
    every_2, every_4 = periodic(2), periodic(4)
    return {
        "easgd": easgd(n, every_2, lambda _: 0.25, MOMENTUM),
        "easgd_default": easgd(n, every_2, lambda _: default_rate(n), MOMENTUM),
        "easgd_rho": easgd(n, every_2, lambda _: 0.25, MOMENTUM, rho=0.5),
        "average": averaging(n, every_2, MOMENTUM),
        "post_local": averaging(n, {1, 2, 5, 8, 11}, MOMENTUM),
        "agn": agn(n, every_4, "sum", MOMENTUM),
        "agn_average": agn(n, every_4, "average", MOMENTUM),
    }
