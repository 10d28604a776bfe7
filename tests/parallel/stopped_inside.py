"""Ranks push, and one of them is stopped in the middle; see ``asynchronous_scenarios.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.parallel.program import stop_until


def local_steps(rank: int, push: int) -> list[float]:
    """Return what a rank adds to nine numbers before a push, or the gradient that it pushes."""
    return [(1.0 + rank) * (1 + push) * number / 8 for number in range(1, 10)]


def pushes(
    worker: tuple[int, int],
    barrier: Callable[[], object],
    files: str,
    transport: Any,
    units: int,
    push: Callable[[list[float]], list[float]],
    inside: tuple[type, str],
) -> tuple[list[list[float]], list[list[int]]]:
    """Push once; the last rank is stopped in its second push until the others have pushed four times; push once more.

    Args:
        worker: rank, and number of ranks.
        barrier: waits for all ranks.
        files: first part of the paths of files by which ranks tell each other where they are.
        transport: the transport, through the window.
        units: number of units that a push changes, apart from the ledger.
        push: pushes what :func:`local_steps` returns; returns what the rank has then.
        inside: class and method: the rank is stopped as soon as one call of it has ended.

    Returns:
        What this rank had after every push; and the versions that its transactions replaced, which are their order.
    """
    (rank, size), versions = worker, transport._slots.versions
    begun, awake, *done = (Path(f"{files}.{i}") for i in range(1 + size))
    seen: list[list[float]] = []
    replaced: list[list[int]] = []

    def once() -> None:
        proposed: dict[int, int] = {}
        with patch.object(versions, "propose", tell(versions.propose, lambda *a: proposed.update([a[:2]]))):
            seen.append(push(local_steps(rank, len(seen))))
        replaced.append([proposed[unit] for unit in range(units)])

    def stop(*_: Any) -> None:
        if not begun.exists():
            begun.touch()
            stop_until(awake, *done)

    once()
    barrier()
    if rank == size - 1:
        with patch.object(*inside, tell(getattr(*inside), stop)):
            once()
    else:
        while not begun.exists():
            time.sleep(0.01)
        for _ in range(4):
            once()
        done[rank].touch()
    once()
    return seen, replaced


def tell(function: Callable[..., Any], heard: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that tells its arguments once it has run."""

    def told(*arguments: Any) -> Any:
        result = function(*arguments)
        heard(*arguments)
        return result

    return told


def check_steps(reports: list[Any], rate: float, momentum: float, nesterov: bool) -> None:
    """Check that all ranks took steps of one optimizer in the order of the transactions, each push once.

    Args:
        reports: of every rank, what it had after its pushes, the center, the versions replaced, and the staleness.
        rate: learning rate of the optimizer.
        momentum: its momentum.
        nesterov: its form.
    """
    c, velocity = np.zeros(9), np.zeros(9)
    for rank, push in order_of_pushes([replaced for _, _, replaced, _ in reports], 0):
        gradient = np.array(local_steps(rank, push))
        velocity = momentum * velocity + gradient
        c = c - rate * (gradient + momentum * velocity if nesterov else velocity)
        assert np.allclose(reports[rank][0][push], c, rtol=1e-12)
    assert all(np.allclose(center, c, rtol=1e-12) for _, center, _, _ in reports)
    assert reports[-1][3] >= 4 * (len(reports) - 1), "pushes of the others while it was stopped"


def order_of_pushes(replaced: list[list[list[int]]], unit: int) -> list[tuple[int, int]]:
    """Return rank and number of all pushes, in the order in which they have changed a unit."""
    order = sorted(
        (version[unit], rank, push) for rank, versions in enumerate(replaced) for push, version in enumerate(versions)
    )
    size = len(replaced)
    assert len({version for version, _, _ in order}) == len(order) == 3 + 6 * (size - 1)
    assert [push for _, rank, push in order if rank == size - 1] == [0, 1, 2]
    return [(rank, push) for _, rank, push in order]
