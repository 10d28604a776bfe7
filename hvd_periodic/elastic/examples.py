"""Which examples of an epoch are left when ranks come and go, so that every example is given to exactly one rank.

While the ranks stay the same, in a *stretch* of training, each takes its share of the examples that were left when the
stretch began: of k ranks, rank r takes those numbered r, r + k, r + 2k, …, in this order. How far a rank has come in a
stretch is therefore two numbers: its epoch, and how many examples of its share of that epoch it has processed. The
numbers of all ranks, stretch by stretch, say which examples are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Stretch = Sequence[tuple[int, int]]
"""For each rank of a stretch, its epoch, and the number of examples of its share of it that it has processed."""


def share_of(left: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return the share of a rank among the examples that are left; a view.

    Example:
        >>> share_of(np.array([5, 3, 1, 0, 4]), 1, 2).tolist()
        [3, 0]
    """
    return left[rank::size]


def left_after(order: np.ndarray, stretches: Sequence[Stretch], epoch: int) -> np.ndarray:
    """Return the examples of an epoch that no rank has processed in some stretches.

    Args:
        order: all examples, in the order of that epoch.
        stretches: how far the ranks have come, from the first stretch on that has begun in that epoch or before. Ranks
            that have come to a later epoch have processed their share of this one.
        epoch: its number.

    Example:
        Two ranks have processed two examples and one. Then there are three, one of which has come to the next epoch.

        >>> left_after(np.arange(9), [[(0, 2), (0, 1)]], epoch=0).tolist()
        [3, 4, 5, 6, 7, 8]
        >>> left_after(np.arange(9), [[(0, 2), (0, 1)], [(0, 1), (1, 0), (0, 0)]], epoch=0).tolist()
        [5, 6, 8]
    """
    for stretch in stretches:
        taken = np.zeros(len(order), bool)
        for rank, (at, processed) in enumerate(stretch):
            if at >= epoch:
                share_of(taken, rank, len(stretch))[: processed if at == epoch else None] = True
        order = order[~taken]
    return order


def still_told(stretches: Sequence[Stretch], epoch: int) -> list[Stretch]:
    """Return the stretches in which examples of an epoch or of later ones were processed.

    Example:
        >>> still_told([[(0, 4), (0, 4)], [(1, 0), (0, 4)], [(1, 2), (1, 0)], [(1, 0), (1, 0)]], epoch=1)
        [[(1, 2), (1, 0)]]
    """
    return [stretch for stretch in stretches if any((at, processed) > (epoch, 0) for at, processed in stretch)]
