"""Cuts buckets into blocks that stay in the processor's cache while they are computed."""

from __future__ import annotations

from itertools import pairwise

from hvd_periodic.vectors.layout import Bucket


def cut_into_blocks(bucket: Bucket, elements: int, cut_tensors: bool = True) -> tuple[Bucket, ...]:
    """Return parts of a bucket, in order and without gaps.

    Pieces larger than half a block get their own blocks, so that these can be views of tensors; smaller pieces share
    blocks.

    Args:
        bucket: the bucket to cut.
        elements: largest number of elements per block.
        cut_tensors: cut within pieces as well; otherwise a block of one piece may have any size.

    Example:
        >>> from hvd_periodic.vectors.layout import Layout, TensorSpec
        >>> sizes = {"a": 2, "b": 1, "c": 10}
        >>> layout = Layout([TensorSpec(name, (size,), "f4", 4) for name, size in sizes.items()])
        >>> [(block.start, block.stop) for block in cut_into_blocks(layout.buckets[0], elements=4)]
        [(0, 3), (3, 7), (7, 11), (11, 13)]
    """
    if bucket.size <= elements:
        return (bucket,)
    cuts, begun = {0, bucket.size}, 0
    for piece in bucket.pieces:
        size = piece.stop - piece.start
        end = piece.offset + size
        if 2 * size > elements:
            cuts.update(range(piece.offset, end, elements if cut_tensors else size), (end,))
            begun = end
        elif end - begun > elements:
            cuts.add(piece.offset)
            begun = piece.offset
    places = sorted(cuts)
    return tuple(bucket.part(start, stop) for start, stop in pairwise(places))
