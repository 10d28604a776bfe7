"""The values that users pass as ``compression``."""

from __future__ import annotations

from typing import Any

from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.chunked_topk import ChunkedTopK
from hvd_periodic.wires.e3m0 import E3M0
from hvd_periodic.wires.half import Half
from hvd_periodic.wires.int2 import Int2
from hvd_periodic.wires.int4 import Int4
from hvd_periodic.wires.int8 import Int8
from hvd_periodic.wires.plain import Plain
from hvd_periodic.wires.topk import TopK


class Compression:
    """Encodings of messages, spelled as in Horovod.

    Attributes:
        none: unchanged.
        fp16: as float16.
        bf16: as bfloat16.
        int8: in 8 bits, with a scale per 1024 elements.
        int4: in 4 bits, at equal distances, with a scale per 256 elements.
        e3m0: in 4 bits, as powers of two, with a scale per 256 elements.
        int2: in 2 bits, as 0 or ± the mean of the large ones, with a scale per 256 elements.

    Example:
        >>> Compression.topk(0.01), Compression.topk(chunk=4096, keep=64)
        (TopK(fraction=0.01), ChunkedTopK(chunk=4096, keep=64))
    """

    none: Wire = Plain()
    fp16: Wire = Half("f2")
    bf16: Wire = Half("bf2")
    int8: Wire = Int8()
    int4: Wire = Int4()
    e3m0: Wire = E3M0()
    int2: Wire = Int2()

    @staticmethod
    def topk(fraction: float | None = None, *, chunk: int | None = None, keep: int | None = None) -> Wire:
        """Return a wire that sends only the largest elements, either of every bucket or of every chunk.

        Args:
            fraction: as in :class:`~hvd_periodic.wires.TopK`: 0.01 for one in a hundred.
            chunk: as in :class:`~hvd_periodic.wires.ChunkedTopK`.
            keep: likewise.

        Raises:
            TypeError: neither a fraction, nor both others, or a value is not a number.
            ValueError: a value is out of its range.
        """
        if fraction is not None and chunk is keep is None:
            return TopK(fraction)
        if fraction is None and chunk is not None and keep is not None:
            return ChunkedTopK(chunk, keep)
        raise TypeError(
            "`Compression.topk` takes a fraction, as in topk(0.01), or `chunk` and `keep`, as in "
            f"topk(chunk=4096, keep=64). Received: fraction={fraction!r}, chunk={chunk!r}, keep={keep!r}"
        )


_OF_HOROVOD = {"NoneCompressor": Compression.none, "FP16Compressor": Compression.fp16}


def as_wire(compression: Any) -> Wire:
    """Return the wire for a ``compression``.

    Args:
        compression: a member of :class:`Compression`, a custom :class:`Wire`, or a member of ``hvd.Compression``.

    Raises:
        TypeError: ``compression`` is something else.

    Example:
        >>> as_wire("zip")
        Traceback (most recent call last):
        TypeError: `compression` must be one of hvdp.Compression.none, .fp16, ..., .topk(...). Received: 'zip'
    """
    if isinstance(compression, Wire):
        return compression
    for base in getattr(compression, "__mro__", ()):
        if base.__name__ in _OF_HOROVOD and base.__module__.startswith("horovod."):
            return _OF_HOROVOD[base.__name__]
    raise TypeError(
        "`compression` must be one of hvdp.Compression.none, .fp16, .bf16, .int8, .int4, .e3m0, .int2, .topk(0.01). "
        f"Received: {compression!r}"
    )
