"""Cuts a layout into fragments: runs of buckets with about equal bytes, which travel one after another."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvd_periodic.vectors.layout import Bucket, Layout

_UNEVEN = 1.5
"""Factor by which the largest fragment may be larger, in order to keep tensors whole."""


@dataclass(frozen=True)
class Fragment:
    """A part of the parameters, exchanged at different steps than the other parts.

    Attributes:
        index: number of the fragment, from 0.
        buckets: the buckets of the fragment.
    """

    index: int
    buckets: tuple[Bucket, ...]


def cut_into_fragments(layout: Layout, count: int, whole: bool = False) -> tuple[Layout, list[Fragment]]:
    """Return the layout, with each bucket in a single fragment, and the fragments.

    Fragments end where tensors end; if one tensor dominates, so that their sizes would differ widely, they may also end
    where buckets end.

    Args:
        layout: the layout to cut; it may have several kinds, and any of them may be cut.
        count: number of fragments, F; with 1, the layout stays as it is.
        whole: fragments end only where tensors end, whatever their sizes.

    Raises:
        ValueError: there are more fragments than tensors and buckets.

    Example:
        >>> from hvd_periodic.vectors.layout import TensorSpec
        >>> layout = Layout([TensorSpec(name, (size,), "f4", 4) for name, size in (("a", 3), ("b", 4), ("c", 2))])
        >>> _, fragments = cut_into_fragments(layout, 2)
        >>> [[(bucket.start, bucket.stop) for bucket in fragment.buckets] for fragment in fragments]
        [[(0, 3)], [(3, 9)]]
    """
    if count == 1:
        return layout, [Fragment(0, layout.buckets)]
    starts: dict[str, int] = {}  # The arenas, in bytes, as if they lay one after another.
    total = 0
    for kind, size in layout.arenas.items():
        starts[kind] = total
        total += size * layout.itemsizes[kind]

    def place(kind: str, element: int) -> int:
        return starts[kind] + element * layout.itemsizes[kind]

    tensors = {place(*layout.span(i)[:2]) for i in range(len(layout.specs))}
    buckets = {place(bucket.kind, bucket.start) for bucket in layout.buckets if not whole}
    choices = [_nearest(sorted(places - {0, total}), total, count) for places in (tensors, tensors | buckets)]
    possible = [cuts for cuts in choices if cuts is not None]
    if not possible:
        most = len((tensors | buckets) - {0, total}) + 1
        raise ValueError(
            f"`fragments` must be at most {most}, the number of tensors{'' if whole else ' and buckets'} that the "
            f"model can be cut into. Received: fragments={count}"
        )
    sizes = [max(after - before for before, after in pairwise([0, *cuts, total])) for cuts in possible]
    cuts = possible[0] if sizes[0] <= _UNEVEN * sizes[-1] else possible[-1]
    cut = layout.cut_at(
        {
            kind: [
                (each - start) // layout.itemsizes[kind]
                for each in cuts
                if start < each < place(kind, layout.arenas[kind])
            ]
            for kind, start in starts.items()
        }
    )
    fragments: list[list[Bucket]] = [[] for _ in range(count)]
    for bucket in cut.buckets:
        fragments[bisect(cuts, place(bucket.kind, bucket.start))].append(bucket)
    cut.ends = frozenset(buckets[-1].index for buckets in fragments)
    return cut, [Fragment(index, tuple(buckets)) for index, buckets in enumerate(fragments)]


def _nearest(places: Sequence[int], total: int, count: int) -> list[int] | None:
    """Return increasing places, the k-th nearest to k / ``count`` of the total; None if there are too few."""
    cuts: list[int] = []
    first = 0
    for k in range(1, count):
        choices = range(first, len(places) - (count - 1 - k))
        if not choices:
            return None
        chosen = min(choices, key=lambda i: abs(places[i] * count - k * total))
        cuts.append(places[chosen])
        first = chosen + 1
    return cuts
