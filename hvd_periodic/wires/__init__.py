"""Wires: encodings of messages. One file each."""

from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.compression import Compression, as_wire
from hvd_periodic.wires.half import Half
from hvd_periodic.wires.int8 import Int8
from hvd_periodic.wires.plain import Plain
from hvd_periodic.wires.topk import TopK

__all__ = ["Compression", "Half", "Int8", "Link", "Plain", "Sent", "TopK", "Wire", "as_wire"]
