"""The values that users pass as ``compression``."""

from __future__ import annotations

from typing import Any

from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.half import Half
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
        topk: only the largest elements; ``Compression.topk(0.01)``, one in a hundred.

    Example:
        >>> Compression.topk(0.01)
        TopK(fraction=0.01)
    """

    none: Wire = Plain()
    fp16: Wire = Half("f2")
    bf16: Wire = Half("bf2")
    int8: Wire = Int8()
    topk = TopK


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
        TypeError: `compression` must be one of hvdp.Compression.none, .fp16, .bf16, .int8, .topk(0.01). Received: 'zip'
    """
    if isinstance(compression, Wire):
        return compression
    for base in getattr(compression, "__mro__", ()):
        if base.__name__ in _OF_HOROVOD and base.__module__.startswith("horovod."):
            return _OF_HOROVOD[base.__name__]
    raise TypeError(
        "`compression` must be one of hvdp.Compression.none, .fp16, .bf16, .int8, .topk(0.01). "
        f"Received: {compression!r}"
    )
