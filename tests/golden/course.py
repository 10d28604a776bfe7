"""The course of a training, and how it is written down: exactly, and so that a difference can be read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from tests.golden.cases import RESUMED_AT, Array, Case, checkpoints, in_turn
from tests.parallel.program import THOROUGH, end_together, take_graphs_as_built

HERE = Path(__file__).parent
CHECKPOINTS = HERE / "checkpoints"

ABOUT = "≈"
"""Before numbers that are not compared to the bit: sums of squares."""

MOST = 1000
"""Elements that are written one by one."""


class Trainer(Protocol):
    """Tensors of one rank and the optimizer that trains them, in some framework."""

    def step(self, step: int) -> None:
        """Train on a batch."""

    def skip(self) -> None:
        """Count an iteration without update."""

    def values(self) -> list[Array]:
        """Return copies of the tensors, statistics included."""

    def center(self) -> list[Array]:
        """Return copies of the tensors as the center has them."""

    def distance(self) -> float:
        """Return the distance from the center."""

    def counters(self) -> tuple[int, int, int]:
        """Return local steps, rounds and skipped updates."""

    def finalize(self) -> None:
        """Leave training."""

    def save(self, path: Path) -> None:
        """Write a file; all ranks together."""

    def load(self, path: Path) -> None:
        """Read it."""


Make = Callable[[Case], Trainer]


def follow(case: Case, make: Make, rank: int, folder: Path) -> list[str]:
    """Train, and return a line per step and one for the end."""
    trainer, rounds, lines = make(case), 0, []
    for step in range(case.steps(rank)):
        if step == RESUMED_AT and case.course in ("resume", "state", "restart"):
            path = folder / f"{case.file}-{rank}"
            trainer.save(path)
            trainer = make(case)
            trainer.load(path)
        if case.skips(rank, step):
            trainer.skip()
        else:
            trainer.step(step)
        exchanged = trainer.counters()[1] > rounds
        rounds = trainer.counters()[1]
        lines.append(written(trainer, with_center=exchanged and case.course != "uneven"))
    return [*lines, *end(trainer)]


def end(trainer: Trainer) -> list[str]:
    """Return the line after the end of training."""
    trainer.finalize()
    return [written(trainer, with_center=True)]


def go_on(case: Case, make: Make, rank: int, path: Path) -> list[str]:
    """Load the checkpoint of another version, and return lines from there."""
    trainer = make(case)
    trainer.load(path)
    lines = []
    for step in range(RESUMED_AT, case.steps(rank)):
        trainer.step(step)
        lines.append(written(trainer, with_center=False))
    return [*lines, *end(trainer)]


def save(case: Case, make: Make, path: Path) -> None:
    """Write the checkpoint that later versions load."""
    trainer = make(case)
    for step in range(RESUMED_AT):
        trainer.step(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.save(path)


def written(trainer: Trainer, with_center: bool) -> str:
    """Return a line: counters, replica and center."""
    steps, rounds, skipped = trainer.counters()
    parts = [f"steps {steps}, rounds {rounds}, skipped {skipped}", f"x {words(trainer.values())}"]
    if with_center:
        parts += [f"c {words(trainer.center())}", f"distance {ABOUT}{trainer.distance():.9g}"]
    return "; ".join(parts)


def words(arrays: Iterable[Array]) -> str:
    """Return all elements, tensors apart.

    Example:
        >>> words([np.array(0.75), np.array([1, 2])])
        '0x1.8p-1 | 1 2'
    """
    return " | ".join(
        " ".join(map(word, array.ravel()))
        if array.size <= MOST
        else f"{array.dtype} sha256 {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
        for array in arrays
    )


def word(value: np.generic) -> str:
    """Return a number, exactly."""
    return str(int(value)) if isinstance(value, np.integer) else re.sub(r"\.?0*p", "p", float(value).hex())


def difference(found: Sequence[str], recorded: Sequence[str]) -> str | None:
    """Return the first difference between two trainings of a rank, in words.

    Example:
        >>> difference(["steps 2, rounds 1; x 0x1p+0 0x1.8p+0"], ["steps 2, rounds 1; x 0x1p+0 3"])
        'at steps 2, rounds 1: element 1 of x is 0x1.8p+0 (1.5), recorded: 3'
    """
    for here, there in zip(found, recorded, strict=False):
        moment = here.split(";")[0]
        for part, other in zip(here.split("; "), there.split("; "), strict=False):
            name, *elements = part.split(" ")
            pairs = zip(elements, other.split(" ")[1:], strict=False)
            for index, (element, expected) in enumerate(pair for pair in pairs if pair[0] != "|"):
                if not same(element, expected):
                    return (
                        f"at {moment}: element {index} of {name} is {readable(element)}, recorded: {readable(expected)}"
                    )
            if len(elements) != len(other.split(" ")) - 1:
                return f"at {moment}: {part}, recorded: {other}"
        if here.count(";") != there.count(";"):
            return f"at {moment}: {here}, recorded: {there}"
    return None if len(found) == len(recorded) else f"{len(found)} lines, recorded: {len(recorded)}"


def same(element: str, recorded: str) -> bool:
    """Return whether two words are; to rounding where they say that they are about."""
    if element.startswith(ABOUT) and recorded.startswith(ABOUT):
        # Processors add up a million squares in float32 in different orders.
        return math.isclose(float(element[1:]), float(recorded[1:]), rel_tol=1e-3, abs_tol=1e-6)
    return element == recorded


def readable(element: str) -> str:
    """Return a word with its value."""
    return f"{element} ({float.fromhex(element)!r})" if "x" in element else element


def run(
    front_end: str,
    make: Make,
    planned: Iterable[Case],
    rank: int,
    size: int,
    folder: Path,
    saving: bool = False,
    kept: Iterable[Case] | None = None,
) -> None:
    """Follow the cases, and on two ranks go on from checkpoints; or write these. Report the lines of this rank.

    In thorough runs and in recordings, these are all cases; otherwise, but for numpy's, those that ``in_turn`` chooses.
    """
    take_graphs_as_built()
    if os.environ.get(THOROUGH) != "1" and front_end != "numpy":
        planned = in_turn(planned)
    lines: dict[str, list[str]] = {}
    for case in () if saving else planned:
        lines[case.name] = follow(case, make, rank, folder)
    for case in (checkpoints() if kept is None else kept) if size == 2 else ():
        path = CHECKPOINTS / front_end / f"{case.file}-{rank}"
        if saving:
            save(case, make, path)
        else:
            lines[f"{case.name}, loaded"] = go_on(case, make, rank, path)
    (folder / f"{rank}.json").write_text(json.dumps(lines))
    end_together()
