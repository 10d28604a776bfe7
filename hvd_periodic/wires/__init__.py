"""Wires: encodings of messages. One file each."""

from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.chunked_topk import ChunkedTopK
from hvd_periodic.wires.compression import Compression, as_wire
from hvd_periodic.wires.e3m0 import E3M0
from hvd_periodic.wires.half import Half
from hvd_periodic.wires.int2 import Int2
from hvd_periodic.wires.int4 import Int4
from hvd_periodic.wires.int8 import Int8
from hvd_periodic.wires.plain import Plain
from hvd_periodic.wires.topk import TopK

__all__ = [
    "E3M0",
    "ChunkedTopK",
    "Compression",
    "Half",
    "Int2",
    "Int4",
    "Int8",
    "Link",
    "Plain",
    "Sent",
    "TopK",
    "Wire",
    "as_wire",
]
