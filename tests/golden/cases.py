"""What is recorded: cases, and the data that they are trained on; numpy alone.

Momentum and rates are powers of two, and targets are short dyadic numbers: elastic averaging, averaging and AGN then
compute without any rounding, so that no order of a sum, no vector width and no fused multiplication can show in a bit.
Averages over three ranks divide by three: their data are multiples of 27, of which every exchange takes one 3. Adam
does round; it gets gradients that do not depend on where it is, so that nothing but its division and its root rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (3, 1))
"""11 elements: neither two nor three ranks divide them, and a share ends within a tensor."""

LARGE: tuple[tuple[int, ...], ...] = ((3,), (4_300_001,))
"""In float32 more than one bucket, of 16 MB."""

STEPS = 7
PERIOD = 2
RESUMED_AT = 5
"""Within a period."""

RATE, MOMENTUM = 0.5, 0.5
MOVING_RATE, RHO = 0.25, 2.0
ADAM = {"rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 2.0**-20}

POST_LOCAL = (2, 3)
"""Start and period."""

GROUPS = ((0, 1), (2,))

PLACES = ("replicated", "root", "sharded")
ALGORITHMS = ("elastic", "elastic_rho", "average", "agn", "agn_average")


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        algorithm: one of ``ALGORITHMS``.
        local: the local optimizer, of which AGN's center has another: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        center: where it lives.
        dtype: of the parameters; ``"mixed"``: of each another one.
        course: ``"even"``; ``"uneven"``, ranks have different numbers of batches; ``"skip"``, some updates are left
            out; ``"resume"``, other objects go on within a period, from a file; ``"state"``, from a state dict;
            ``"restart"``, as scripts of contrib do, from the root's global variables alone.
        loop: ``"eager"`` or ``"compiled"``; in contrib ``"resource"`` variables.
        kind: ``"post_local"``, ``"distributed"`` (the same around a DistributedOptimizer), ``"groups"``,
            ``"asynchronous"``, ``"statistics"``, ``"large"``, ``"adopted"`` (contrib without a getter); or nothing.
    """

    algorithm: str
    local: str = "momentum"
    center: str = "replicated"
    dtype: str = "float32"
    course: str = "even"
    loop: str = "eager"
    kind: str = ""

    @property
    def name(self) -> str:
        """All attributes that say something."""
        values = [getattr(self, field.name) for field in fields(self)]
        return ", ".join(value for value in values if value and value not in ("even", "eager"))

    @property
    def file(self) -> str:
        """The name, for a file."""
        return self.name.replace(", ", "-")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters."""
        return LARGE if self.kind == "large" else SHAPES

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the parameters."""
        return ("float16", "float32", "float64") if self.dtype == "mixed" else (self.dtype,) * len(self.shapes)

    @property
    def curvature(self) -> float:
        """Of the loss: 1, or 0 where the gradient is the same everywhere."""
        return 0.0 if self.local == "adam" else 1.0

    @property
    def unit(self) -> int:
        """What all data are multiples of."""
        return 27 if "average" in self.algorithm or self.kind == "statistics" else 1

    def start(self, rank: int) -> list[Array]:
        """Return what a rank starts with, until the root's is broadcast."""
        return self._arrays(lambda element: 4.0 + element % 3 + rank)

    def targets(self, rank: int, step: int) -> list[Array]:
        """Return b of the gradient ``curvature * x - b``; different on every rank, and at every step."""
        if self.local == "adam":
            return self._arrays(lambda element: ((3 * element + 5 * rank + 2 * step) % 7 - 3.25) / 2)
        return self._arrays(lambda element: 4.0 + ((3 * element + 5 * rank + 2 * step) % 7) / 2)

    def statistic(self, rank: int, step: int) -> Array:
        """Return what this step moves a statistic towards."""
        return np.array([self.unit * (4 + (rank + step) % 3), self.unit * (8 - rank)], "float32")

    def steps(self, rank: int) -> int:
        """Return the number of batches of a rank."""
        return (3, 8, 5)[rank] if self.course == "uneven" else STEPS

    def skips(self, rank: int, step: int) -> bool:
        """Return whether a rank leaves out the update of a step."""
        return self.course == "skip" and step in (1, 2 + rank)

    def _arrays(self, value: Any) -> list[Array]:
        arrays, first = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = int(np.prod(shape))
            elements = np.arange(first, first + size, dtype=np.int32)
            arrays.append((self.unit * value(elements)).astype(dtype).reshape(shape))
            first += size
        return arrays


def gradients(case: Case, values: Sequence[Array], rank: int, step: int) -> list[Array]:
    """Return the gradients of a rank at some values."""
    pairs = zip(values, case.targets(rank, step), strict=True)
    return [np.asarray(x - b if case.curvature else -b, dtype=x.dtype) for x, b in pairs]


def everywhere(*cases: Case) -> Iterator[Case]:
    """Yield cases in all placements."""
    for case in cases:
        yield from (replace(case, center=place) for place in PLACES)


def cases(size: int) -> Iterator[Case]:
    """Yield what front ends with all placements have in common."""
    each = [Case(algorithm) for algorithm in ALGORITHMS]
    yield from everywhere(*each)
    yield from everywhere(*(replace(case, dtype="float64") for case in each))
    yield from (replace(case, local="sgd") for case in each)
    yield from everywhere(*(replace(case, course="resume") for case in each))
    yield from everywhere(*(replace(case, kind="post_local") for case in each))
    yield from (replace(case, course="skip") for case in each)
    if size > 1:
        yield from everywhere(*(replace(case, course="uneven") for case in each))
    if size == 2:
        yield Case("elastic_rho", kind="large")
        yield Case("agn", center="sharded", kind="large")
    if size == 1:
        yield from (replace(case, kind="asynchronous") for case in each if "average" not in case.algorithm)


def with_adam(size: int) -> Iterator[Case]:
    """Yield what has an optimizer that rounds: sums of three ranks only of gradients, which are exact."""
    agn = Case("agn", "adam")
    yield from everywhere(agn, replace(agn, dtype="float64"), replace(agn, course="resume"))
    if size < 3:
        yield from (Case(algorithm, "adam") for algorithm in ("elastic", "elastic_rho", "average"))


def around_horovod(size: int) -> Iterator[Case]:
    """Yield what has a DistributedOptimizer inside."""
    kind = {2: "distributed", 3: "groups"}.get(size)
    if kind is not None:
        yield from (Case(algorithm, kind=kind) for algorithm in ALGORITHMS if algorithm != "agn_average")


def mixed(size: int) -> Iterator[Case]:
    """Yield what has parameters of three dtypes; float16 rounds, so that sums of three ranks would."""
    yield from (Case(algorithm, dtype="mixed") for algorithm in ALGORITHMS if size < 3)


def statistics() -> Iterator[Case]:
    """Yield what has averaged buffers."""
    yield from everywhere(*(Case(algorithm, kind="statistics") for algorithm in ("elastic_rho", "average", "agn")))


def in_turn(planned: Iterable[Case]) -> list[Case]:
    """Return the cases of every run where steps take their time: plain training in all placements, all other in one.

    These take turns: over the algorithms, each placement has everything that is special. Of large ones, one remains.
    """
    alike: dict[Case, list[Case]] = {}
    for case in planned:
        any_algorithm = {"algorithm": ""} if case.kind == "large" else {}
        alike.setdefault(replace(case, center="", **any_algorithm), []).append(case)
    chosen = []
    for number, found in enumerate(alike.values()):
        plain = (found[0].dtype, found[0].course, found[0].kind, found[0].local) == ("float32", "even", "", "momentum")
        chosen += found if plain else [found[number % len(found)]]
    return chosen


def checkpoints() -> Iterator[Case]:
    """Yield whose states are kept from version to version, on two ranks."""
    yield from everywhere(*(Case(algorithm) for algorithm in ALGORITHMS if algorithm != "agn_average"))
