"""Trains once on simulated workers: threads of this process, with the numpy front end and the whole core."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hvd_periodic import Algorithm, Communicator, Schedule, Wire
from hvd_periodic.cli import output
from hvd_periodic.cli.problems import Problem
from hvd_periodic.comm.threads import run
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.numpy.sgd import Array

DIVERGED = 1e30
"""A loss above which training counts as diverged."""

POINTS = 100
"""Number of steps at which losses are measured."""

_PATIENCE = 24 * 3600.0
"""Seconds for which a worker waits for the others; users' functions may be slow."""


@dataclass(frozen=True)
class Setting:
    """An algorithm, a period and a learning rate, and the words that the user typed for them."""

    algorithm: str
    period: str
    learning_rate: float
    made: Algorithm = field(repr=False)
    schedule: Schedule = field(repr=False)

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.period}, {self.learning_rate:g}"


@dataclass(frozen=True)
class Training:
    """Arguments that all settings share."""

    workers: int
    steps: int
    momentum: float
    seed: int
    overlap: int | str
    fragments: int
    compression: Wire


@dataclass
class Point:
    """State of a training at one step.

    Attributes:
        step: local steps so far.
        exchanges, bytes: exchanges of one worker and the bytes that it has sent, so far.
        center: loss of the center.
        replicas: mean of the losses of the replicas.
        distance: mean distance of replicas to the center.
    """

    step: int
    exchanges: int
    bytes: int
    center: float
    replicas: float
    distance: float


@dataclass
class Outcome:
    """Result of a training.

    Attributes:
        course: points during training; the last one is at the last step.
        center: loss of the final center, after the last exchange.
        exchanges, bytes: exchanges of one worker and the bytes that it has sent, including the last exchange.
        diverged: the step at which training diverged; only the course up to it is known then. None: it did not.
    """

    course: list[Point]
    center: float = math.nan
    exchanges: int = 0
    bytes: int = 0
    diverged: int | None = None

    def record(self, setting: Setting) -> dict[str, Any]:
        """Return plain values."""
        typed = {"algorithm": setting.algorithm, "period": setting.period, "learning_rate": setting.learning_rate}
        return typed | asdict(self)


class _DivergedError(Exception):
    """Training diverged on one of the workers; the others end with it."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class _Descent(SGD):
    """SGD that ends training when an update overflows, before ranks exchange the result."""

    steps = 0

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Update the parameters in place."""
        self.steps += 1
        super().step(parameters, gradients)
        if not all(np.isfinite(x).all() for x in parameters):
            raise _DivergedError(self.steps)


def simulate(problem: Problem, setting: Setting, training: Training, tick: Callable[[int], None]) -> Outcome:
    """Train on simulated workers; call ``tick`` with the number of local steps since its last call."""
    marks = _marks(training)
    notes: list[list[Point]] = [[] for _ in range(training.workers)]

    def work(communicator: Communicator) -> Outcome:
        rank = communicator.rank
        with np.errstate(all="ignore"):
            advance = output.nothing if rank else tick
            return _train(communicator, problem, setting, training, marks, notes[rank], advance)

    try:
        outcome = run(training.workers, work, _PATIENCE)[0]
    except _DivergedError as error:
        outcome = Outcome([], diverged=error.step)
    outcome.course = [_mean(points) for points in zip(*notes, strict=False)]
    return outcome


def _train(
    communicator: Communicator,
    problem: Problem,
    setting: Setting,
    training: Training,
    marks: set[int],
    notes: list[Point],
    tick: Callable[[int], None],
) -> Outcome:
    """Train as one of the workers; note a point at every mark."""
    own = np.random.default_rng([training.seed, communicator.rank])
    x = problem.start.copy()
    # Fragments consist of whole tensors: these are views of one vector.
    tensors = np.array_split(x, training.fragments)
    optimizer = PeriodicOptimizer(
        _Descent(setting.learning_rate, training.momentum),
        {f"x{i}": tensor for i, tensor in enumerate(tensors)},
        setting.made,
        setting.schedule,
        process_set=communicator,
        overlap=training.overlap,
        fragments=training.fragments,
        compression=training.compression,
        nonfinite="ignore",  # The next loss shows it.
    )
    synchronizer = optimizer.synchronizer
    for step in range(training.steps + 1):
        if step:
            try:
                loss, gradient = problem.sample(communicator.rank, x, own)
            except OverflowError as error:  # In Python, as of ``math.exp`` in a user's function.
                raise _DivergedError(step) from error
            if not (abs(loss) < DIVERGED and np.isfinite(gradient).all()):
                raise _DivergedError(step)
            synchronizer.report(loss)
            optimizer.step(np.array_split(gradient, training.fragments))
        if step in marks:
            counters, replica = synchronizer.counters, problem.loss(x)
            distance = synchronizer.distance() if step else 0.0
            with optimizer.center():
                center = problem.loss(x) if communicator.rank == 0 else math.nan
            notes.append(Point(step, counters.rounds, counters.bytes_sent, center, replica, distance))
            tick(step - (notes[-2].step if step else 0))
    synchronizer.finalize()
    counters = synchronizer.counters
    with optimizer.center():
        center = problem.loss(x)
    return Outcome([], center, counters.rounds, counters.bytes_sent)


def _marks(training: Training) -> set[int]:
    """Return steps at which losses are measured: random ones, as equal spacing would hit exchanges always or never."""
    edges = np.linspace(0, training.steps, min(POINTS, training.steps) + 1).astype(int)
    return {0, training.steps, *np.random.default_rng(0).integers(edges[:-1], edges[1:], endpoint=True).tolist()}


def _mean(points: tuple[Point, ...]) -> Point:
    """Return one point for all workers: the common center, and means over the replicas."""
    replicas = float(np.mean([point.replicas for point in points]))
    distance = float(np.mean([point.distance for point in points]))
    return replace(points[0], replicas=replicas, distance=distance)
