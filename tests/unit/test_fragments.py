"""The parameters in fragments that are exchanged one after another, on threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_periodic import SGD, Clock, PeriodicOptimizer
from hvd_periodic.comm.base import Communicator
from tests import oracle
from tests.helpers import run_ranks
from tests.unit.test_overlap import ALGORITHMS, late

PERIOD = 5


def arrays() -> dict[str, Any]:
    return {f"x{k}": np.array([value]) for k, value in enumerate(oracle.START)}


def train(
    communicator: Communicator,
    name: str,
    schedule: Any = PERIOD,
    steps: int = oracle.STEPS,
    look: bool = False,
    **options: Any,
) -> list[Any]:
    """Return x after every step, and x and c at the end, of one array per element."""
    x = arrays()
    optimizer = PeriodicOptimizer(
        SGD(oracle.RATE, oracle.MOMENTUM),
        x,
        ALGORITHMS[name](),
        schedule,
        communicator=late(communicator) if options.get("overlap") else communicator,
        **options,
    )
    seen = []

    def note() -> None:
        seen.append([value.item() for value in x.values()])

    for _ in range(steps):
        now = [value.item() for value in x.values()]
        optimizer.step([np.array([g]) for g in oracle.gradient(communicator.rank, now)])
        if look:
            with optimizer.center():
                pass
            optimizer.synchronizer.distance()
        note()
    optimizer.synchronizer.finalize()
    note()
    with optimizer.center():
        note()
    return seen


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_fragment_goes_where_all_go_that_begin_with_it(name: str, size: int) -> None:
    """Elements do not depend on each other here, so that a fragment has the trajectory of its own phase, to the bit."""
    for fragments in (2, 3):
        found = run_ranks(size, lambda communicator, f=fragments: train(communicator, name, fragments=f))  # type: ignore[misc]
        for element in range(3):
            fragment = min(element, fragments - 1) if fragments == 3 else int(element > 0)
            first = -(-(fragment + 1) * PERIOD // fragments)

            def phase(clock: Clock, first: int = first) -> int:
                return PERIOD if clock.round else first

            alone = run_ranks(size, lambda communicator, phase=phase: train(communicator, name, phase))  # type: ignore[misc]
            for rank in range(size):
                assert [x[element] for x in found[rank]] == [x[element] for x in alone[rank]], (fragments, element)
