"""A slow oracle of exchanges that are taken some steps after they began, in plain Python floats; see ``oracle.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests import oracle

PERIOD = 3


def move(name: str, state: dict[str, Any], c: float, total: float, n: int) -> tuple[float, float]:
    """Return one element of the center after an exchange, and what is handed out, in plain floats."""
    kind = name.partition("_")[0]
    if kind == "average":
        return c + total / n, c + total / n
    if kind == "diloco":
        gradient = -total / n
        state["m"] = 0.9 * state.get("m", 0.0) + gradient
        c -= 0.7 * (gradient + 0.9 * state["m"])
        return c, c
    if kind == "slowmo":
        state["u"] = 0.5 * state.get("u", 0.0) - total / n / oracle.RATE
        c -= oracle.RATE * state["u"]
        return c, c
    if kind == "bmuf":
        state["d"] = 0.5 * state.get("d", 0.0) + total / n
        c += state["d"]
        return c, c if name == "bmuf_classic" else c + 0.5 * state["d"]
    scale = 1 / n if name == "agn_average" else 1.0
    state["v"] = oracle.MOMENTUM * state.get("v", 0.0) + scale * total
    c -= oracle.RATE * state["v"]
    return c, c


def expected(
    name: str, n: int, overlap: int | str, own: Sequence[int] = (), landing: Sequence[int] = ()
) -> list[list[list[float]]]:
    """Return x of every worker after every step, by the difference rule.

    Args:
        name: of the algorithm.
        n: workers.
        overlap: local steps, or ``"period"``.
        own: steps of exchanges; default: every third.
        landing: steps at which what is under way is taken at the latest; default: those of exchanges.
    """
    own = own or range(PERIOD, oracle.STEPS + 1, PERIOD)
    landing, last = landing or own, 0
    size = len(oracle.START)
    workers = oracle.Workers(n, oracle.MOMENTUM)
    center, handed_out = list(oracle.START), list(oracle.START)
    sums = [[0.0] * size for _ in range(n)]
    states: list[dict[str, Any]] = [{} for _ in range(size)]
    in_flight: tuple[float, list[list[float]], list[float]] | None = None
    seen: list[list[list[float]]] = []
    for step in range(1, oracle.STEPS + 1):
        for worker in range(n):
            gradient = oracle.gradient(worker, workers.x[worker])
            sums[worker] = [a + g for a, g in zip(sums[worker], gradient, strict=True)]
            workers.descend(worker, gradient)
        exchange = step in own
        if in_flight is not None and (step in landing or step >= in_flight[0]):
            _, snapshots, new = in_flight
            for worker, snapshot in enumerate(snapshots):
                pairs = zip(workers.x[worker], new, snapshot, strict=True)
                workers.x[worker] = [x + (h - s) for x, h, s in pairs]
            in_flight = None
        if exchange:
            for k in range(size):
                if name.startswith("agn"):
                    total = sum(a[k] / (step - last) for a in sums)
                else:
                    total = sum(x[k] - handed_out[k] for x in workers.x)
                center[k], handed_out[k] = move(name, states[k], center[k], total, n)
            sums, last = [[0.0] * size for _ in range(n)], step
            due = math.inf if overlap == "period" else step + float(overlap)
            in_flight = due, [list(x) for x in workers.x], list(handed_out)
        seen.append([list(x) for x in workers.x])
    return seen
