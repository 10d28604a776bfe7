"""The ranks that contribute to a parameter: those whose local steps had a gradient of it since the last exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_periodic.centers.touched_rows import packed_bits
from hvd_periodic.replica import Replica
from hvd_periodic.sync.fragment_plan import DueFragments, FragmentExchange
from hvd_periodic.sync.progress import ProgressTracker

Seen = Sequence[Sequence[str]]
"""For every fragment, the names of the parameters that had a gradient since its last exchange; empty if none had."""


class Presence:
    """Notes which of the ``"present"`` parameters had a gradient, and tells the other ranks at an exchange.

    p_i = 1 for a parameter of which an update of rank i since the last exchange had a gradient that was not None, even
    if it was zeros; otherwise p_i = 0. What ranks tell each other is one bit per parameter and fragment, and travels
    with the handshake.

    Args:
        replica: the replica of this rank.
        progress: keeps what was seen, so that it is saved and loaded.
        fragments: number of fragments, which are exchanged at different steps.
    """

    def __init__(self, replica: Replica[Any], progress: ProgressTracker, fragments: int) -> None:
        self._replica, self._progress, self._fragments = replica, progress, fragments
        names = [spec.name for spec in replica.parameters.layout.specs]
        self._indices = {names.index(name): name for name in replica.present}

    def note(self) -> None:
        """Note the gradients of this iteration."""
        found = self._replica.with_gradient_now(self._indices.keys())
        if found:
            self._progress.see([self._indices[i] for i in sorted(found)], self._fragments)

    def packed(self, seen: Seen) -> np.ndarray:
        """Return what this rank has seen as bits, in 64-bit integers."""
        bits = [[name in part for name in self._replica.present] for part in seen or [()] * self._fragments]
        return packed_bits(np.array(bits, bool).reshape(-1))

    def weighed(
        self, due: DueFragments, packed: Sequence[np.ndarray], rank: int, weights: Sequence[float] | None
    ) -> DueFragments:
        """Return the due fragments, with this rank's weight among the ranks that are present for each parameter.

        Args:
            due: the fragments.
            packed: the bits of all ranks, by rank.
            rank: this rank.
            weights: the weights of all ranks, 1 on average; None if all are equal.
        """
        shape = len(packed), self._fragments, len(self._replica.present)
        bits = np.array([np.unpackbits(part.view(np.uint8), count=shape[1] * shape[2]) for part in packed])
        seen, of_ranks = bits.reshape(shape), weights or [1.0] * len(packed)
        turns = []
        for turn in due.turns:
            columns = zip(self._replica.present, seen[:, turn.fragment.index].T.tolist(), strict=True)
            presence = {name: weight_among(of_ranks, column, rank) for name, column in columns}
            turns.append(FragmentExchange(turn.fragment, replace(turn.exchange, presence=presence)))
        return replace(due, turns=turns)

    def alone(self, seen: Seen) -> dict[str, float | None]:
        """Return p_i by name, for an asynchronous exchange of this rank."""
        return {name: float(any(name in part for part in seen)) for name in self._replica.present}

    def after(self, seen: Seen, due: DueFragments) -> Seen:
        """Return what has been seen since the last exchange of every fragment, once the due ones are exchanged."""
        exchanged = {turn.fragment.index for turn in due.turns}
        left = [[] if i in exchanged else list(part) for i, part in enumerate(seen)]
        return left if any(left) else []


def weight_among(weights: Sequence[float], present: Sequence[int], rank: int) -> float | None:
    """Return the weight of a rank among those present, w_i p_i n / Σ_j w_j p_j; None if none is or all weigh nothing.

    Example:
        >>> weight_among([1.0, 1.0, 1.0], [1, 1, 0], rank=0), weight_among([1.0, 1.0, 1.0], [1, 1, 0], rank=2)
        (1.5, 0.0)
        >>> weight_among([1.0, 1.0], [0, 0], rank=0)
    """
    of_present = [weight * here for weight, here in zip(weights, present, strict=True)]
    total = math.fsum(of_present)
    return of_present[rank] * (len(of_present) / total) if total else None
