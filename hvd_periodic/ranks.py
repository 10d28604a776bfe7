"""Wording of ranks in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PIECES = 4
"""Largest number of ranges and single ranks that a message shows in full."""

_FIRST = 2
"""Number of them that are shown if there are more."""


def named(ranks: Iterable[int]) -> str:
    """Return ranks as a message names them: as ranges, and abridged if there are many.

    Example:
        >>> named([3]), named([0, 2]), named(range(48)), named([0, 1, 5, 6, 7])
        ('rank 3', 'ranks 0 and 2', 'ranks 0 to 47', 'ranks 0, 1 and 5 to 7')
        >>> named(range(1, 48, 2))
        'ranks 1, 3 and 22 more'
    """
    found = sorted(set(ranks))
    pieces: list[list[int]] = []
    for rank in found:
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1].append(rank)
        else:
            pieces.append([rank])
    pieces = [part for piece in pieces for part in ([piece] if len(piece) > 2 else [[rank] for rank in piece])]
    shown = pieces if len(pieces) <= _PIECES else pieces[:_FIRST]
    words = [str(piece[0]) if len(piece) == 1 else f"{piece[0]} to {piece[-1]}" for piece in shown]
    if len(shown) < len(pieces):
        words.append(f"{len(found) - sum(map(len, shown))} more")
    listed = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    return f"{'rank' if len(found) == 1 else 'ranks'} {listed}"


def titled(ranks: Iterable[int]) -> str:
    """Return the same text for the beginning of a sentence.

    Example:
        >>> titled([0, 2])
        'Ranks 0 and 2'
    """
    return named(ranks).capitalize()


def by_value(values: Mapping[int, str]) -> str:
    """Return which ranks have which values, the first ones if there are many.

    Args:
        values: values by rank.

    Example:
        >>> by_value({0: "5", 1: "4", 2: "5"})
        '5 on ranks 0 and 2; 4 on rank 1'
        >>> by_value({rank: f"step {rank}" for rank in range(48)})
        'step 0 on rank 0; step 1 on rank 1; others on ranks 2 to 47'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    groups = list(ranks.items())
    shown = groups if len(groups) <= _PIECES else groups[:_FIRST]
    words = [f"{value} on {named(members)}" for value, members in shown]
    if len(shown) < len(groups):
        words.append(f"others on {named(rank for _, members in groups[len(shown) :] for rank in members)}")
    return "; ".join(words)
